"""Hooks: user functions that watch a search, and may prune, re-rank, inject thoughts or stop it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tot.decoders.errors import OptionError, unknown
from tot.task.checked import user_code
from tot.tree.tree import Node

EVENTS = ("on_select", "on_expand", "on_evaluate", "on_level", "on_goal")
Hook = Callable[[Any, list[Node]], Sequence[Node] | None]


class Hooks:
    """The hooks of a search: an object with some of these methods, or a mapping from their names to functions.

    on_select    nodes about to be expanded
    on_expand    new children
    on_evaluate  nodes that were just evaluated
    on_level     BFS: the frontier of the next level
    on_goal      a state that the task accepts as a solution

    Each is called with the running search (a SearchState) and the nodes. It returns None to change nothing, or the
    nodes to continue with, in their new order. Omitted nodes are pruned; an omitted goal is no longer a goal. Nodes
    from `search.inject(parent, "thought")` can be added.
    `search.stop("why")` ends the search.
    """

    def __init__(self, hooks: object | Mapping[str, Hook]) -> None:
        methods = hooks
        if not isinstance(methods, Mapping):
            methods = {name: getattr(hooks, name) for name in dir(hooks) if name.startswith("on_")}
            if not methods:
                raise OptionError(f"hooks={hooks!r} has none of the methods {', '.join(EVENTS)}: define at least one")
        for name, hook in methods.items():
            if name not in EVENTS:
                raise OptionError(unknown("hook", str(name), EVENTS))
            if not callable(hook):
                raise OptionError(f"hook {name} = {hook!r} can't be called: pass a function of (search, nodes)")
        self._hooks = methods

    def emit(self, event: str, search: Any, nodes: list[Node]) -> list[Node]:
        """Call the hook of `event`. Return the nodes to continue with."""
        if event not in self._hooks or not nodes:
            return nodes
        with user_code(f"hook {event}"):
            result = self._hooks[event](search, nodes)
        if result is None:
            return nodes
        retained = list(result) if isinstance(result, Iterable) else [result]
        if not all(isinstance(node, Node) for node in retained):
            raise OptionError(f"hook {event} returned {result!r}: return nodes, or None")
        for node in nodes:
            if node not in retained and event != "on_goal":
                search.tree.prune(node)
        return retained
