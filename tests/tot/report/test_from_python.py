"""Reports of a tree from Python: a page, and figures that Jupyter displays."""

from __future__ import annotations

from pathlib import Path

import pytest

from tot import State, Thought, ThoughtTree
from tot.decoders import TaskError
from tot.report.page import tree_page
from tot.report.plots import curves


@pytest.fixture
def tree() -> ThoughtTree:
    grown = ThoughtTree(State(question="Which letters?"))
    grown.add(grown.root, Thought(parts={"thought": "a < b"}), value=0.5)
    return grown


def test_a_tree_writes_the_same_page_as_the_command_line(tree: ThoughtTree, tmp_path: Path) -> None:
    tree.report(tmp_path / "tree.html")
    assert (tmp_path / "tree.html").read_text(encoding="utf-8") == "".join(tree_page(tree, {}))


def test_an_unwritable_page_error_names_the_file(tree: ThoughtTree, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"nowhere/tree\.html can't be written: .+; give another file"):
        tree.report(tmp_path / "nowhere" / "tree.html")


def test_figures_are_pictures_in_jupyter_without_pyplot(tree: ThoughtTree) -> None:
    for figure in (tree.plot(), curves({"line": ([0, 1], [1, 0])}, "x", "y")):
        assert figure._repr_png_().startswith(b"\x89PNG")
