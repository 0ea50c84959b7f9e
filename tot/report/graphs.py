"""Export a tree of thoughts as GraphML. Thoughts become labels."""

from __future__ import annotations

import re

import networkx as nx

from tot.tree.tree import USAGE_FIELDS, Node, ThoughtTree

_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML can't represent, even escaped."""


def graphml(tree: ThoughtTree) -> str:
    """Return GraphML with the nodes and all their fields, the edges and the links."""
    return "\n".join(nx.generate_graphml(_graph(tree))) + "\n"


def _graph(tree: ThoughtTree) -> nx.DiGraph:
    """Convert the tree to a graph whose attributes are plain values."""
    graph = nx.DiGraph()
    for node in tree:
        fields = node.model_dump(mode="json", exclude={"thought", "world", "usage"}, exclude_none=True)
        fields |= {name: getattr(node.usage, name) for name in USAGE_FIELDS}
        plain = {name: _in_xml(value) if isinstance(value, str) else value for name, value in fields.items()}
        graph.add_node(node.id, label=_in_xml(_label(tree, node)), **plain)
    for node in tree:
        if node.parent is not None:
            graph.add_edge(node.parent, node.id, kind="thought")
    for tail, head, thought in tree.links():
        graph.add_edge(tail.id, head.id, kind="link", label=_in_xml(thought.text))
    return graph


def _in_xml(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)


def _label(tree: ThoughtTree, node: Node) -> str:
    return tree.state(node).question if node.thought is None else node.thought.text
