"""World: state transitions of a task, and protocols for optional capabilities.

A search checks `isinstance(task, HasActions)` before it enumerates. A task has a capability if it defines its method.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

from tot.tree.thought import Observation, State, Thought


@runtime_checkable
class HasActions(Protocol):
    def actions(self, state: State) -> Sequence[str]:
        """Return the legal next thoughts, as a model would write them; empty at a dead end."""
        ...


@runtime_checkable
class HasAct(Protocol):
    async def act(self, state: State, thought: Thought) -> Observation | None:
        """Execute a thought and return the observation: run a program, move in a game.

        It is awaited before the thought is added to the tree. The thoughts of one step run concurrently, so the method
        must not change shared state. An exception becomes the observation. A resumed run executes no thought twice.
        """
        ...


@runtime_checkable
class HasTerminal(Protocol):
    def is_terminal(self, state: State) -> bool:
        """Return whether the state needs no further thought. Without this method, states at full depth are terminal."""
        ...


@runtime_checkable
class HasHeuristic(Protocol):
    def heuristic(self, state: State) -> float:
        """Return the estimated cost to a goal. A* finds the cheapest plan if it never exceeds the true cost."""
        ...


@runtime_checkable
class HasMeasured(Protocol):
    def measured(self, state: State) -> float | None:
        """Return the value that executing the last thought has measured, higher is better; None if it failed."""
        ...


@runtime_checkable
class HasAnswer(Protocol):
    def answer_at(self, state: State) -> Any | None:
        """Return the answer that a state contains, or None if the model must be asked for it."""
        ...


@runtime_checkable
class HasElection(Protocol):
    def elect(self, question: str, answers: Sequence[Any], weights: Sequence[float]) -> tuple[Sequence[Hashable], int]:
        """Return a key for each answer, which equal answers share in votes, and the index of the elected answer.

        Without this method, the key is `canonical`, and the answer with the most weight wins.
        """
        ...


class World:
    """State transitions of a task, with defaults for tasks without a world.

    A task whose thoughts are actions stores its world as JSON data in `State.world`, overrides `step`, and defines the
    methods of the capabilities that it has.
    """

    def step(self, state: State, thought: Thought) -> State | None:
        """Return the state after a thought, or None if the thought is not legal.

        By default the world stays the same.
        """
        return state.then(thought)

    def key(self, state: State) -> Hashable:
        """Return a key; states with equal keys are equal. The default is the world, or else the thoughts."""
        return repr(state.world) if state.world is not None else tuple(thought.text for thought in state.thoughts)

    def is_goal(self, state: State) -> bool:
        """Return whether a terminal state is a solution; by default True."""
        return True

    def cost(self, state: State, thought: Thought) -> float:
        """Return the cost of `thought`, at least 0: by default 1."""
        return 1.0

    def reward(self, state: State) -> float:
        """Return the reward that MCTS adds to a visited state's value (RAP's goal reward); by default 0."""
        return 0.0
