"""ThoughtTree as a graph of thoughts: links, worlds and all fields in JSON; pruning and leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tot import Node, State, Thought, ThoughtTree
from tot.decoders import TaskError, Usage

Named = tuple[ThoughtTree, dict[str, Node]]
texts = st.text(max_size=5)
numbers = st.floats(allow_nan=False)
counts = st.integers(0, 10**6)
worlds = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


def thought(text: str) -> Thought:
    return Thought(parts={"thought": text})


@st.composite
def graphs(draw: st.DrawFn) -> ThoughtTree:
    """Up to nine nodes with any fields, and links between any of them."""
    tree = ThoughtTree(State(question=draw(texts), thoughts=(thought("before"),), world=draw(worlds)))
    for size in range(1, draw(st.integers(2, 9))):
        parent = tree[draw(st.integers(0, size - 1))]
        node = tree.add(parent, thought(draw(texts)), draw(worlds), cost=draw(st.floats(0, 1e9)))
        for field in ("value", "fast", "prior", "confidence", "reward", "q"):
            setattr(node, field, draw(st.none() | numbers))
        for field in ("visits", "merged", "rejected"):
            setattr(node, field, draw(counts))
        for field in ("terminal", "goal", "pruned", "chosen"):
            setattr(node, field, draw(st.booleans()))
        node.decoder, node.parse_failures = draw(st.none() | texts), draw(counts)
        node.usage = Usage(draw(counts), 0, draw(counts), drafted=draw(counts), seconds=draw(st.floats(0, 9)))
    for _ in range(draw(st.integers(0, 6))):
        tail, head = tree[draw(st.integers(0, len(tree) - 1))], tree[draw(st.integers(1, len(tree) - 1))]
        if tail.id == head.id:
            continue
        tree.link(tail, head, thought(draw(texts)))
    return tree


@pytest.fixture
def grow() -> Callable[..., Named]:
    """Make a tree from paths, in order: grow("a", "b", "b/c"); return its nodes by path."""

    def make(*paths: str) -> Named:
        tree = ThoughtTree(State(question="q"))
        named = {"": tree.root}
        for path in paths:
            parent, _, text = path.rpartition("/")
            named[path] = tree.add(named[parent], thought(text))
        return tree, named

    return make


# -- JSON -------------------------------------------------------------------------------------------------------


@given(graphs())
def test_json_keeps_links_worlds_and_every_field(tree: ThoughtTree) -> None:
    read = ThoughtTree.from_json(json.loads(json.dumps(tree.to_json())))
    assert list(read) == list(tree)
    assert [(tail.id, head.id, step) for tail, head, step in read.links()] == [
        (tail.id, head.id, step) for tail, head, step in tree.links()
    ]
    assert [read.state(node) for node in read] == [tree.state(node) for node in tree]
    assert [read.place(node) for node in read] == [tree.place(node) for node in tree]
    assert {node.id for node in read.leaves()} == {node.id for node in tree.leaves()}
    assert read.to_json() == tree.to_json()


def test_every_non_default_field_of_a_node_is_in_the_json() -> None:
    other: dict[str, Any] = {
        "world": [1, {"a": None}], "cost": 2.5, "value": 0.5, "fast": 0.25, "prior": 0.1, "confidence": 0.75,
        "reward": -1.0, "visits": 3, "q": 0.125, "terminal": True, "goal": True, "verified": True,
        "pruned": True, "chosen": True, "decoder": "ar", "merged": 5, "rejected": 6, "parse_failures": 7,
        "answer": "x", "share": 0.5,
    }  # fmt: skip
    used = {
        "prompt_tokens": 1, "new_tokens": 2, "drafted": 3, "accepted": 4, "seconds": 0.5, "approximate_tokens": 9,
        "undecoded_tokens": 10, "reached": 11,
    }  # fmt: skip
    assert {*other, "id", "parent", "depth", "index", "thought", "usage"} == set(Node.model_fields)
    tree = ThoughtTree(State(question="q"))
    tree.add(tree.root, thought("first"))
    tree.add(tree.root, thought("a"), usage=Usage(**used), **other)
    saved = tree.to_json()["nodes"][2]
    assert (
        saved == {"id": 2, "parent": 0, "depth": 1, "index": 1, "thought": {"parts": {"thought": "a"}}} | other | used
    )
    assert tree.to_json()["nodes"][0] == {"id": 0}
    assert ThoughtTree.from_json(tree.to_json())[2] == tree[2]


@pytest.mark.parametrize(
    "link",
    [
        {"parent": 0},
        {"parent": 9, "node": 1, "thought": {"parts": {}}},
        {"parent": 1, "node": 9, "thought": {"parts": {}}},
        {"parent": 1, "node": 2, "thought": {"text": "x"}},
        {"parent": 1, "node": 2, "thought": None},
        3,
    ],
)
def test_a_damaged_link_is_rejected(grow: Any, link: Any) -> None:
    tree, _ = grow("a", "b")
    with pytest.raises(TaskError, match=r"^the tree is damaged: "):
        ThoughtTree.from_json(tree.to_json() | {"links": [link]})


@pytest.mark.parametrize("version", [1, 2])
def test_trees_of_earlier_versions_are_loaded(grow: Any, version: int) -> None:
    """Version 1 has no links, and version 2 had the field "numbered"."""
    tree, _ = grow("a", "b", "b/c")
    saved = tree.to_json()
    old = {key: value for key, value in saved.items() if key != "links"} | {"version": version}
    old["nodes"] = [node | {"numbered": 2} for node in saved["nodes"]]
    assert ThoughtTree.from_json(old).to_json() == saved


# -- pruning, leaves ----------------------------------------------------------------------------------


def test_pruning_marks_descendants_but_not_linked_nodes(grow: Any) -> None:
    tree, node = grow("a", "b", "b/c", "b/c/d", "b/e", "a/f")
    tree.link(node["b/c"], node["a/f"], thought("x"))
    tree.prune(node["b"])
    assert {path for path, one in node.items() if one.pruned} == {"b", "b/c", "b/c/d", "b/e"}
    assert [one.id for one in tree.leaves()] == [node["a/f"].id]


def test_costs_of_calls_add_up_at_a_node() -> None:
    tree = ThoughtTree(State(question="q"))
    first = Usage(prompt_tokens=7, new_tokens=5, drafted=8, accepted=4, reached=5, seconds=0.5)
    tree.spend(tree.root, first, ())
    tree.spend(tree.root, Usage(new_tokens=2, drafted=8, accepted=8, reached=10, seconds=0.25), ())
    assert tree.root.usage == Usage(prompt_tokens=7, new_tokens=7, drafted=16, accepted=12, reached=15, seconds=0.75)
