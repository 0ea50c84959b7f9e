"""World: the methods that a task may define, such as the effects of thoughts, and protocols of capabilities.

A search checks `isinstance(task, HasActions)` before it enumerates. A task has a capability if it defines its method.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

from tot.decoders.errors import TaskError
from tot.tree.thought import Observation, State, Thought


class World:
    """Methods and attributes that a task may define, with the defaults of a task without them.

    A task defines them without inheriting from this class. A task whose thoughts are actions stores its world as JSON
    data in `State.world`, and defines `step`.
    """

    data_set: str = ""
    """Default source of questions for `tot eval`: a file, `org/name:split` on the hub, a file of an installed
    package, `package:name/file`, or seeds for `instance`, `instances:0-99`."""
    programs: Collection[str] = ()
    """Templates that ask for programs, which run in the sandbox."""
    version: str = ""
    """Identifies the files that results depend on, such as a scorer. Only a run of the same version can be resumed."""

    def step(self, state: State, thought: Thought) -> State | None:
        """Return the state after a thought, None if the thought is not legal. By default the world stays the same."""
        return state.then(thought)

    def key(self, state: State) -> Hashable:
        """Return a key; states with equal keys are equal. The default is the world, or else the thoughts."""
        return repr(state.world) if state.world is not None else tuple(thought.canonical for thought in state.thoughts)

    def actions(self, state: State) -> Sequence[Any]:
        """Return the legal next thoughts, as a model would write them; empty at a dead end.

        They are texts. If thoughts have a schema, they may be its pydantic objects, which stand for their JSON.
        """
        raise _lacks(self, "actions", "or sample thoughts (generator='sample')")

    async def act(self, state: State, thought: Thought) -> Observation | None:
        """Execute a thought and return the observation: run a program, move in a game.

        It is awaited before the thought is added to the tree. The thoughts of one step run concurrently, so the method
        must not change shared state. An exception becomes the observation. A resumed run executes no thought twice.
        """
        return None

    def is_terminal(self, state: State) -> bool:
        """Return whether the state needs no further thought. Without this method, states at full depth are terminal."""
        return False

    def is_goal(self, state: State) -> bool:
        """Return whether a terminal state is a solution; by default True."""
        return True

    def answer_at(self, state: State) -> Any | None:
        """Return the answer that a state contains, or None if the model must be asked for it."""
        return None

    def cost(self, state: State, thought: Thought) -> float:
        """Return the cost of `thought`, at least 0: by default 1."""
        return 1.0

    def heuristic(self, state: State) -> float:
        """Return the estimated cost to a goal. A* finds the cheapest plan if it never exceeds the true cost."""
        raise _lacks(self, "heuristic", "or choose another evaluator (evaluator='vote')")

    def measured(self, state: State) -> float | None:
        """Return the value that executing the last thought has measured, higher is better; None if it failed."""
        raise _lacks(self, "measured", "or choose another evaluator (evaluator='vote')")

    def reward(self, state: State) -> float:
        """Return the reward that MCTS adds to a visited state's value (RAP's goal reward); by default 0."""
        return 0.0

    def elect(
        self, question: str, answers: Sequence[Any], weights: Sequence[float]
    ) -> tuple[Sequence[Hashable], int] | None:
        """Return a key for each answer, which equal answers share in votes, and the index of the elected answer.

        By default, None: the key is `canonical`, and the answer with the most weight wins.
        """
        return None

    def scores(self, answers: Sequence[tuple[Any, Any]]) -> Sequence[float]:
        """Return the scores of pairs of an answer and a reference. Define it if `score` is slow to begin."""
        return [self.score(answer, reference) for answer, reference in answers]  # type: ignore[attr-defined]

    def steps(self, template: str, state: State) -> Sequence[str]:
        """Return the titles of independent parts of a template's text; by default empty.

        `pdos` decodes the parts in parallel, other decoders one after another.
        """
        return ()

    def hints(self, state: State) -> Sequence[str]:
        """Return directions for the next thought: one of them, chosen by the seed, is appended to each prompt.

        They make samples differ. The default is empty.
        """
        return ()

    def candidate(self, state: State) -> str:
        """Return the text of a state in a vote: by default its last thought."""
        return state.thoughts[-1].text

    def is_answered(self, message: str) -> bool:
        """Return whether an unfinished message already contains its answer, so that decoding can stop."""
        return False

    def parse_truncated(self, text: str) -> Any | None:
        """Return the answer in a text that the token limit ended: by default as `parse_answer` does.

        If `parse_answer` guesses, for example by taking the last number, accept only an announced answer here.
        """
        return self.parse_answer(text)  # type: ignore[attr-defined]

    def choices(self, state: State) -> Sequence[str]:
        """Return the answers to choose from. If not empty, the most likely one after the answer template is used."""
        return ()

    def instance(self, seed: int) -> dict[str, Any]:
        """Generate a row from a seed. By default raises TaskError: the task has no generator."""
        raise TaskError(f"task {type(self).__name__} can't generate questions: define `instance`")


def _lacks(task: Any, method: str, remedy: str) -> TaskError:
    return TaskError(f"task {type(task).__name__} has no `{method}`: define it, {remedy}")


@runtime_checkable
class HasActions(Protocol):
    def actions(self, state: State) -> Sequence[Any]: ...


@runtime_checkable
class HasAct(Protocol):
    async def act(self, state: State, thought: Thought) -> Observation | None: ...


@runtime_checkable
class HasTerminal(Protocol):
    def is_terminal(self, state: State) -> bool: ...


@runtime_checkable
class HasHeuristic(Protocol):
    def heuristic(self, state: State) -> float: ...


@runtime_checkable
class HasMeasured(Protocol):
    def measured(self, state: State) -> float | None: ...


@runtime_checkable
class HasAnswer(Protocol):
    def answer_at(self, state: State) -> Any | None: ...


@runtime_checkable
class HasElection(Protocol):
    def elect(
        self, question: str, answers: Sequence[Any], weights: Sequence[float]
    ) -> tuple[Sequence[Hashable], int]: ...


@runtime_checkable
class HasScores(Protocol):
    def scores(self, answers: Sequence[tuple[Any, Any]]) -> Sequence[float]: ...
