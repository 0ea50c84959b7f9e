"""ThoughtTree: its structure, its complete JSON form, and errors for invalid files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tot import Node, State, Thought, ThoughtTree
from tot.decoders import TaskError


@pytest.fixture
def tree() -> ThoughtTree:
    """root -> a, b; b -> c, d; d -> e."""
    tree = ThoughtTree(State(question="q"))
    named: dict[str, Node] = {"": tree.root}
    for parent, name in (("", "a"), ("", "b"), ("b", "c"), ("b", "d"), ("d", "e")):
        named[name] = tree.add(named[parent], Thought(parts={"thought": name}), value=float(ord(name)))
    return tree


# -- the tree ---------------------------------------------------------------------------------------------------


def test_a_node_knows_its_parent_depth_and_place_among_its_siblings(tree: ThoughtTree) -> None:
    assert [(node.id, node.parent, node.depth, node.index) for node in tree] == [
        (0, None, 0, 0),
        (1, 0, 1, 0),
        (2, 0, 1, 1),
        (3, 2, 2, 0),
        (4, 2, 2, 1),
        (5, 4, 3, 0),
    ]


# -- files ------------------------------------------------------------------------------------------------------


def test_a_file_is_written_atomically(tree: ThoughtTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tree.json"
    tree.save(path)
    before = path.read_bytes()

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full)
        with pytest.raises(TaskError, match=r"tree\.json can't be written: No space left on device; give another file"):
            tree.save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["tree.json"]  # noqa: PTH208 - no temporary file is left


@pytest.mark.parametrize("where", ["absent/tree.json", "."])
def test_an_unwritable_path_is_named(tree: ThoughtTree, tmp_path: Path, where: str) -> None:
    with pytest.raises(TaskError, match=r"can't be written: .*; give another file"):
        tree.save(tmp_path / where)
    assert list(tmp_path.iterdir()) == []


def changed(tree: ThoughtTree, node: int, **fields: Any) -> dict[str, Any]:
    """Return the tree's JSON with some fields of one node changed, or left out if None."""
    data = tree.to_json()
    data["nodes"][node] = {k: v for k, v in (data["nodes"][node] | fields).items() if v is not None}
    return data


@pytest.mark.parametrize(
    ("node", "fields"),
    [
        (0, {"id": 1}),
        (0, {"parent": 0}),
        (0, {"parent": 3}),
        (0, {"thought": {"parts": {}}}),
        (1, {"id": 7}),
        (1, {"id": 0}),
        (1, {"parent": None}),
        (1, {"parent": 1}),
        (1, {"parent": 99}),
        (2, {"parent": 5}),  # 5 is a child of 2
        (1, {"parent": -1}),
        (1, {"parent": "x"}),
        (1, {"thought": None}),
        (1, {"thought": {"parts": {"thought": 5}}}),
        (1, {"thought": {"text": "x"}}),
        (1, {"value": "high"}),
        (1, {"colour": "red"}),
    ],
)
def test_a_damaged_node_is_rejected(tree: ThoughtTree, node: int, fields: dict[str, Any]) -> None:
    assert ThoughtTree.from_json(changed(tree, node)).to_json() == tree.to_json()
    with pytest.raises(TaskError, match=r"^the tree is damaged: "):
        ThoughtTree.from_json(changed(tree, node, **fields))


@pytest.mark.parametrize(
    "data",
    [
        {"nodes": []},
        {"nodes": None},
        {"nodes": 3},
        {"nodes": [1]},
        {"root": None},
        {"root": {"question": 1}},
        {"root": {}},
    ],
)
def test_a_damaged_tree_is_rejected(tree: ThoughtTree, data: dict[str, Any]) -> None:
    with pytest.raises(TaskError, match=r"^the tree is damaged: "):
        ThoughtTree.from_json(tree.to_json() | data)


@pytest.mark.parametrize("data", [{}, [], "tree", 3, None, {"tree": 3}])
def test_a_file_that_is_not_a_tree_is_rejected_with_a_remedy(tmp_path: Path, data: Any) -> None:
    (tmp_path / "x.json").write_text(json.dumps(data))
    with pytest.raises(TaskError, match=r"x\.json is not a tree of thoughts: save one with `tree\.save"):
        ThoughtTree.load(tmp_path / "x.json")


def test_another_version_of_a_run_is_rejected_by_name(tree: ThoughtTree, tmp_path: Path) -> None:
    run = {"format": "tot.run", "version": 99, "tree": tree.to_json()}
    (tmp_path / "x.json").write_text(json.dumps(run))
    (tmp_path / "x.jsonl").write_text(
        json.dumps({"format": "tot.checkpoint", "version": 2}) + "\n" + json.dumps({"step": "end", "run": run}) + "\n"
    )
    for name in ("x.json", "x.jsonl"):
        with pytest.raises(TaskError, match=f"{name} has version 99 of tot.run: this program reads 2$"):
            ThoughtTree.load(tmp_path / name)


@pytest.mark.parametrize("version", [0, 3, "1", None])
def test_another_version_is_rejected_by_name(tree: ThoughtTree, version: Any) -> None:
    with pytest.raises(TaskError, match=f"^this has version {version!r} of tot.tree: this program reads 2$"):
        ThoughtTree.from_json(tree.to_json() | {"version": version})


def test_a_tree_may_grow_while_its_nodes_are_iterated() -> None:
    tree = ThoughtTree(State(question="q"))
    for text in "abc":
        tree.add(tree.root, Thought(parts={"thought": text}), None)
    seen = []
    for node in tree:
        seen.append(node.id)
        tree.add(tree.root, Thought(parts={"thought": f"more {node.id}"}), None)
    assert seen == [0, 1, 2, 3]
    assert len(tree) == 8
