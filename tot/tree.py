"""ThoughtTree: the tree of thoughts a search grew, on a networkx DiGraph; JSON in and out."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import networkx as nx
from pydantic import BaseModel, ConfigDict, ValidationError

from tot.decoders.errors import TaskError
from tot.state import State, Thought

_FORMAT = "tot.tree"
_VERSION = 1


class Node(BaseModel):
    """A thought in the tree, and what was learnt and spent there. The root has no thought."""

    model_config = ConfigDict(extra="forbid")

    id: int
    parent: int | None = None
    depth: int = 0
    index: int = 0
    """Which of its siblings it is."""
    thought: Thought | None = None
    value: float | None = None
    terminal: bool = False
    chosen: bool = False
    """On the path that the answer was asked at."""
    new_tokens: int = 0
    seconds: float = 0.0
    parse_failures: int = 0
    """Replies about this node that could not be read: rejected thoughts of its own making, evaluations."""


class ThoughtTree:
    """Nodes are numbered in the order in which they were added; 0 is the root."""

    def __init__(self, root: State) -> None:
        self.graph = nx.DiGraph()
        self._states: dict[int, State] = {}
        self._put(Node(id=0), root)

    def _put(self, node: Node, state: State) -> Node:
        self.graph.add_node(node.id, node=node)
        if node.parent is not None:
            self.graph.add_edge(node.parent, node.id)
        self._states[node.id] = state
        return node

    def add(self, parent: Node, thought: Thought, state: State | None = None, **fields: Any) -> Node:
        """A new child. `state` is what the thought leads to, where the task has a world of its own."""
        node = Node(
            id=len(self.graph),
            parent=parent.id,
            depth=parent.depth + 1,
            index=self.graph.out_degree(parent.id),
            thought=thought,
            **fields,
        )
        return self._put(node, state or self.state(parent).then(thought))

    def __len__(self) -> int:
        return len(self.graph)

    def __iter__(self) -> Iterator[Node]:
        return (self.graph.nodes[i]["node"] for i in self.graph.nodes)

    @property
    def root(self) -> Node:
        return self[0]

    def __getitem__(self, node_id: int) -> Node:
        node: Node = self.graph.nodes[node_id]["node"]
        return node

    def state(self, node: Node) -> State:
        return self._states[node.id]

    def children(self, node: Node) -> list[Node]:
        return [self[i] for i in self.graph.successors(node.id)]

    def path(self, node: Node) -> list[Node]:
        """From the root to `node`, both included."""
        path = [node]
        while path[-1].parent is not None:
            path.append(self[path[-1].parent])
        return path[::-1]

    def place(self, node: Node) -> str:
        """Where a node stands whatever the order of growth: sibling numbers from the root, such as "0.2.1"."""
        return ".".join(str(step.index) for step in self.path(node))

    def leaves(self) -> list[Node]:
        return [node for node in self if self.graph.out_degree(node.id) == 0]

    def choose(self, node: Node) -> None:
        """Mark the path to `node` as the chosen one."""
        for other in self:
            other.chosen = False
        for step in self.path(node):
            step.chosen = True

    def to_json(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "root": self.state(self.root).model_dump(mode="json"),
            "nodes": [node.model_dump(mode="json", exclude_defaults=True) for node in self],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ThoughtTree:
        """Raises TaskError for data that is not a tree, or of a version this program does not know."""
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise TaskError("this is not a tree of thoughts: save one with `tree.save(...)` or `tot solve --out`")
        if data.get("version") != _VERSION:
            raise TaskError(f"trees of version {data.get('version')!r} are unknown here: this program reads {_VERSION}")
        try:
            tree = cls(State.model_validate(data["root"]))
            nodes = [Node.model_validate(entry) for entry in data["nodes"]]
            if nodes[0].id != 0 or nodes[0].parent is not None or nodes[0].thought is not None:
                raise ValueError("the first node is not a root")
            tree.graph.nodes[0]["node"] = nodes[0]
            for node in nodes[1:]:
                if node.parent is None or node.thought is None or node.id != len(tree):
                    raise ValueError(f"node {node.id} has no parent, no thought, or stands out of order")
                tree._put(node, tree.state(tree[node.parent]).then(node.thought))
        except (KeyError, IndexError, TypeError, ValueError, ValidationError) as error:
            raise TaskError(f"the tree is damaged: {error}") from None
        return tree

    def save(self, path: str | Path) -> None:
        """Write JSON, at once or not at all: a killed process leaves the old file or the new one."""
        write_json(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> ThoughtTree:
        """Read a saved tree, or the tree in a saved run."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise TaskError(f"{path} can't be read as JSON: {error}") from None
        return cls.from_json(data.get("tree", data) if isinstance(data, dict) else data)


def write_json(path: Path, data: Any) -> None:
    """Write to a file beside `path`, then rename. Raises TaskError where that is impossible."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    except (OSError, UnicodeError) as error:
        temporary.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or error
        raise TaskError(f"{path} can't be written: {reason}; give another --out") from None
