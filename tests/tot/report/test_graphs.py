"""GraphML exports, parsed by networkx, with hostile text as labels."""

from __future__ import annotations

import re
from typing import Any

import networkx as nx
import pytest

from tot import State, Thought, ThoughtTree
from tot.report.graphs import graphml

HOSTILE = 'say "<b>&amp;</b>" \\ \\n ]; x -> y [label="z"\nline two\x00\x1b é 🙂'


@pytest.fixture
def tree() -> ThoughtTree:
    tree = ThoughtTree(State(question="q <1>"))
    a = tree.add(tree.root, Thought(parts={"thought": HOSTILE}), value=2.5, visits=3)
    b = tree.add(tree.root, Thought(parts={"thought": "b"}))
    c = tree.add(a, Thought(parts={"thought": "c"}), terminal=True)
    tree.link(b, c, Thought(parts={"thought": "other way"}))
    tree.choose(c)
    return tree


def test_graphml_has_all_nodes_edges_links_and_fields(tree: ThoughtTree) -> None:
    graph = nx.parse_graphml(graphml(tree))
    assert set(graph.edges) == {("0", "1"), ("0", "2"), ("1", "3"), ("2", "3")}
    assert graph.nodes["0"]["label"] == "q <1>"
    assert graph.nodes["1"]["label"] == HOSTILE.replace("\x00", "�").replace("\x1b", "�")
    assert (graph.nodes["1"]["value"], graph.nodes["1"]["visits"], graph.nodes["3"]["terminal"]) == (2.5, 3, True)
    assert graph.edges["2", "3"] == {"kind": "link", "label": "other way"}
    assert graph.edges["1", "3"] == {"kind": "thought"}


@pytest.mark.parametrize("answer", ["a\ud800b", "a\x00b", "a\ufffeb", "\x1b[31m"])
def test_an_answer_that_xml_cannot_represent_is_replaced(grown: Any, answer: str) -> None:
    tree = grown("a")
    tree[1].answer = answer
    text = graphml(tree)
    assert nx.parse_graphml(text).nodes["1"]["answer"] == re.sub("[\ud800\x00\ufffe\x1b]", "\ufffd", answer)
