"""Export a tree of thoughts as GraphML or DOT. Thoughts become escaped labels."""

from __future__ import annotations

import re

import networkx as nx

from tot.tree.tree import USAGE_FIELDS, Node, ThoughtTree

_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML can't represent, even escaped."""


def graphml(tree: ThoughtTree) -> str:
    """Return GraphML with the nodes and all their fields, the edges and the links."""
    return "\n".join(nx.generate_graphml(_graph(tree))) + "\n"


def dot(tree: ThoughtTree) -> str:
    """Return DOT with nodes labelled by thought and value, the chosen path bold and links dashed."""
    lines = ["digraph {", "node [shape=box];"]
    for node in tree:
        value = "" if node.value is None else f"\n{node.value:.3g}"
        style = "bold" if node.chosen else "solid"
        lines.append(f"{node.id} [label={_quoted(_label(tree, node) + value)}, style={style}];")
        if node.parent is not None:
            lines.append(f"{node.parent} -> {node.id};")
    for tail, head, thought in tree.links():
        lines.append(f"{tail.id} -> {head.id} [label={_quoted(thought.text)}, style=dashed];")
    return "\n".join([*lines, "}", ""])


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


def _quoted(text: str) -> str:
    """Quote a DOT string, escaping quotes, backslashes and line breaks."""
    escaped = text.replace("\x00", "\ufffd").replace("\\", "\\\\").replace('"', '\\"').replace("\r", "")
    return '"' + escaped.replace("\n", "\\n") + '"'


GRAPHS = {".graphml": graphml, ".dot": dot, ".gv": dot}
"""The export function of each file extension."""
