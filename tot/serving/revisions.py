"""Revisions of a growing tree, for pages that show it and may lose their connection."""

from __future__ import annotations

from copy import copy
from itertools import takewhile
from typing import Any

from tot.tree.calls import calls_to_json
from tot.tree.tree import ThoughtTree, link_to_json

_PATCH = 500
"""Changed parts of a tree in a patch at most."""


class Revisions:
    """Numbers the changes of a tree without a record of them: each part has the number of its last change."""

    def __init__(self, tree: ThoughtTree) -> None:
        self._tree = tree
        self._last = 0
        self._parts: dict[tuple[str, int], tuple[int, Any]] = {}
        """By part (a node, the calls about a node, the links): its last change and its state, ordered by the change."""

    def scan(self) -> None:
        """Find the changes. Another thread may change the tree meanwhile: the next scan finds that."""
        for node in self._tree:
            self._update("node", node.id, node.__dict__)
            if node.id in self._tree.calls:
                self._update("calls", node.id, len(self._tree.calls[node.id]))
        self._update("links", 0, [(tail.id, head.id) for tail, head, _ in self._tree.links()])

    def _update(self, kind: str, node: int, state: Any) -> None:
        if state != self._parts.get((kind, node), (0, None))[1]:
            self._last += 1
            self._parts.pop((kind, node), None)
            self._parts[kind, node] = self._last, copy(state)

    def since(self, seen: int) -> tuple[int, dict[str, Any]] | None:
        """Return a revision after `seen` and its patch, a part of the saved tree; None without changes.

        A patch has a limited size. If its field `more` is true, another one follows at once.
        """
        seen = seen if 0 <= seen <= self._last else 0
        if seen == self._last:
            return None
        changed = [*takewhile(lambda part: part[1][0] > seen, reversed(self._parts.items()))][::-1]
        parts = [part for part, _ in changed[:_PATCH]]
        calls = {node: list(self._tree.calls[node]) for kind, node in parts if kind == "calls"}
        patch = {"more": len(changed) > _PATCH, **calls_to_json(calls)}
        patch["nodes"] = [self._tree[node].to_json() for kind, node in parts if kind == "node"]
        if seen == 0:
            patch["root"] = self._tree.state(self._tree.root).model_dump(mode="json")
        if ("links", 0) in parts:
            patch["links"] = [link_to_json(*link) for link in self._tree.links()]
        return changed[:_PATCH][-1][1][0], patch
