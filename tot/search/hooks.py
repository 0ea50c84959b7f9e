"""Hooks: a user's functions that watch a search, and may prune, re-rank, inject thoughts or stop it.

Each is called with the search under way (a SearchState) and the nodes that an event is about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tot.decoders.errors import OptionError, unknown
from tot.task.checked import user_code
from tot.tree.tree import Node

EVENTS = ("on_select", "on_expand", "on_evaluate", "on_simulate", "on_backpropagate", "on_level", "on_goal")
Hook = Callable[[Any, list[Node]], Sequence[Node] | None]


class Hooks:
    """One object with some of these methods, or a mapping from their names to functions.

    on_select         nodes about to be expanded
    on_expand         new children
    on_evaluate       nodes that were just valued
    on_level          BFS: the states kept for the next level
    on_goal           a state that the task takes for a solution
    on_simulate       MCTS: the path that a rollout took
    on_backpropagate  MCTS: the path that a reward was backed up along

    A hook returns None to leave things as they are, or the nodes to go on with, in their new order: those left out are
    pruned (a goal left out is no goal), those from `search.inject(parent, "thought")` come in. The last two only watch.
    `search.stop("why")` ends the search.
    """

    def __init__(self, hooks: object | Mapping[str, Hook] | None = None) -> None:
        if hooks is None:
            found: dict[str, Any] = {}
        elif isinstance(hooks, Mapping):
            found = dict(hooks)
        else:
            found = {name: getattr(hooks, name) for name in dir(hooks) if name.startswith("on_")}
            if not found:
                raise OptionError(f"hooks={hooks!r} has none of the methods {', '.join(EVENTS)}: define some")
        for name, hook in found.items():
            if name not in EVENTS:
                raise OptionError(unknown("hook", str(name), EVENTS))
            if not callable(hook):
                raise OptionError(f"hook {name} = {hook!r} can't be called: give a function of (search, nodes)")
        self._hooks: dict[str, Hook] = found

    def emit(self, event: str, search: Any, nodes: list[Node]) -> list[Node]:
        """Tell the hook of `event`; the nodes to go on with."""
        hook = self._hooks.get(event)
        with user_code(f"hook {event}"):
            answer = hook(search, nodes) if hook is not None and nodes else None
        if answer is None:
            return nodes
        if event in ("on_simulate", "on_backpropagate"):
            raise OptionError(f"hook {event} returned nodes, but it can only watch: return None")
        kept = list(answer) if isinstance(answer, Iterable) else [answer]
        if not all(isinstance(node, Node) for node in kept):
            raise OptionError(f"hook {event} returned {answer!r}: return nodes, or None")
        staying = {node.id for node in kept}
        for node in nodes:
            if node.id not in staying and event != "on_goal":
                search.tree.prune(node)
        return kept
