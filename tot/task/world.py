"""World: how thoughts lead from state to state, and the capabilities that searches look for.

A search asks `isinstance(task, HasActions)` before it enumerates; a task has a capability by defining its method.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

from tot.tree.thought import Observation, State, Thought


@runtime_checkable
class HasActions(Protocol):
    def actions(self, state: State) -> Sequence[str]:
        """The legal next thoughts, as a model would write them; an empty list at a dead end."""
        ...


@runtime_checkable
class HasAct(Protocol):
    async def act(self, state: State, thought: Thought) -> Observation | None:
        """Execute a thought and return the observation: run a program, move in a game.

        It is awaited before the thought goes into the tree. Thoughts of one step run side by side, so it must not
        share what it changes. An exception becomes the observation. A resumed run executes no thought twice.
        """
        ...


@runtime_checkable
class HasTerminal(Protocol):
    def is_terminal(self, state: State) -> bool:
        """True where no further thought is needed. Without this method, states at full depth are terminal."""
        ...


@runtime_checkable
class HasHeuristic(Protocol):
    def heuristic(self, state: State) -> float:
        """The estimated cost to a goal. A* finds the cheapest plan if this is never more than the true cost."""
        ...


@runtime_checkable
class HasAnswer(Protocol):
    def answer_at(self, state: State) -> Any | None:
        """The answer that a state holds by itself; None where the model has to be asked for it."""
        ...


class World:
    """How thoughts lead from state to state: every task has these methods, with the defaults described.

    A task whose thoughts are actions keeps its world as JSON data in `State.world`, overrides `step`, and defines the
    capabilities above that it has.
    """

    def step(self, state: State, thought: Thought) -> State | None:
        """The state that a thought leads to; None where the thought is not legal.

        By default the same world, one thought longer.
        """
        return state.then(thought)

    def key(self, state: State) -> Hashable:
        """States with equal keys are the same state: by default those of equal worlds, or of equal thoughts."""
        return repr(state.world) if state.world is not None else tuple(thought.text for thought in state.thoughts)

    def is_goal(self, state: State) -> bool:
        """True where a terminal state is a solution: by default each is."""
        return True

    def cost(self, state: State, thought: Thought) -> float:
        """What taking `thought` costs, at least 0: by default 1."""
        return 1.0

    def reward(self, state: State) -> float:
        """What MCTS adds to a visited state's value: RAP's goal reward."""
        return 0.0
