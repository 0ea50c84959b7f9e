"""CheckedTask: a wrapper that checks the results of a task's methods. Its errors name the method."""

from __future__ import annotations

import inspect
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from pydantic import JsonValue, TypeAdapter, ValidationError

from tot.decoders.errors import TaskError, TotError, describe
from tot.decoders.request import Message
from tot.task.task import Task
from tot.task.world import HasAct, HasActions, HasAnswer, HasElection, HasHeuristic, HasMeasured, HasTerminal
from tot.tree.thought import Observation, State, Thought

_WORLD: TypeAdapter[JsonValue] = TypeAdapter(JsonValue)
_OBSERVED = 4000
"""Maximum length of an observation in characters; the rest is cut."""


class CheckedTask:
    """A task whose results are checked. Raises TaskError if a method fails or returns an invalid result."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._name = type(task).__name__

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the task. Wrap methods that are not checked here, so that errors name them."""
        result = getattr(vars(self)["task"], name)
        return partial(self._call, name) if inspect.ismethod(result) else result

    def start(self, question: str) -> State:
        if not isinstance(question, str):
            raise TaskError(f"the question is {question!r:.60}, not text: give text")
        state = self._call("start", question)
        if not isinstance(state, State):
            raise self._wrong("start", state, "return a State")
        return state

    def prompt(self, template: str, state: State, /, **extra: Any) -> tuple[Message, ...]:
        messages = self._call("prompt", template, state, **extra)
        if not isinstance(messages, tuple) or not all(isinstance(one, Message) for one in messages):
            raise self._wrong("prompt", messages, "return a tuple of Messages")
        return messages

    def parse_thought(self, template: str, text: str) -> str | None:
        result = self._call("parse_thought", template, text)
        if result is not None and not isinstance(result, str):
            raise self._wrong("parse_thought", result, "return text, or None to reject it")
        return result

    def parse_proposals(self, text: str) -> list[str]:
        return self._texts("parse_proposals", text)

    def parse_value(self, text: str) -> float | None:
        result = self._call("parse_value", text)
        if result is not None and not isinstance(result, int | float):
            raise self._wrong("parse_value", result, "return a number, or None if there is no value")
        return result

    def parse_vote(self, text: str, candidates: int) -> int | None:
        result = self._call("parse_vote", text, candidates)
        if result is not None and (not isinstance(result, int) or not 1 <= result <= candidates):
            raise self._wrong("parse_vote", result, f"return a number from 1 to {candidates}, or None")
        return result

    def candidate(self, state: State) -> str:
        result = self._call("candidate", state)
        if not isinstance(result, str):
            raise self._wrong("candidate", result, "return text")
        return result

    def choices(self, state: State) -> list[str]:
        return self._texts("choices", state)

    def steps(self, template: str, state: State) -> list[str]:
        return self._texts("steps", template, state)

    def is_answered(self, message: str) -> bool:
        return bool(self._call("is_answered", message))

    def canonical(self, answer: Any) -> Hashable:
        return self._hashable("canonical", answer)

    def score(self, answer: Any | None, reference: Any) -> float:
        return self._number("score", answer, reference)

    def actions(self, state: State) -> list[str]:
        if not isinstance(self.task, HasActions):
            raise TaskError(
                f"task {self._name} has no `actions` to enumerate: define it, or sample thoughts (generator='sample')"
            )
        return self._texts("actions", state)

    async def act(self, before: State, thought: Thought) -> Observation | None:
        """Execute a thought and return its observation. An exception becomes the text of the observation."""
        try:
            result = await self.task.act(before, thought) if isinstance(self.task, HasAct) else None
        except TotError:
            raise
        except Exception as error:  # a failed action does not end the run  # noqa: BLE001
            return Observation(text=describe(error)[:_OBSERVED])
        if result is not None and not isinstance(result, Observation):
            raise TaskError(f"{self._name}.act gave {result!r}: return an Observation, or None if nothing was executed")
        if result is not None and len(result.text) > _OBSERVED:
            text = f"{result.text[:_OBSERVED]}\n… (cut: {len(result.text)} characters)"
            return result.model_copy(update={"text": text})
        return result

    def step(self, before: State, thought: Thought) -> State | None:
        after = self._call("step", before, thought)
        if after is None:
            return None
        if not isinstance(after, State) or len(after.thoughts) != len(before.thoughts) + 1:
            raise TaskError(
                f"{self._name}.step gave {after!r}: return state.then(thought, world), or None if it is not legal"
            )
        try:
            _WORLD.validate_python(after.world)
        except ValidationError:
            raise TaskError(
                f"{self._name}.step gave a world that is not JSON data, {after.world!r}: use text, numbers, lists and "
                "dicts"
            ) from None
        return after

    def key(self, state: State) -> Hashable:
        return self._hashable("key", state)

    def cost(self, state: State, thought: Thought) -> float:
        cost = self._number("cost", state, thought)
        if cost < 0:
            raise TaskError(f"{self._name}.cost of {thought.text!r} is {cost}: return 0 or more")
        return cost

    def heuristic(self, state: State) -> float:
        if not isinstance(self.task, HasHeuristic):
            raise TaskError(
                f"task {self._name} has no `heuristic`: define it, or choose another evaluator (evaluator='vote')"
            )
        return self._number("heuristic", state)

    def measured(self, state: State) -> float | None:
        if not isinstance(self.task, HasMeasured):
            raise TaskError(f"task {self._name} has no `measured`: define it, or choose another evaluator")
        return None if self.task.measured(state) is None else self._number("measured", state)

    def reward(self, state: State) -> float:
        return self._number("reward", state)

    def is_terminal(self, state: State) -> bool:
        return isinstance(self.task, HasTerminal) and bool(self._call("is_terminal", state))

    def is_goal(self, state: State) -> bool:
        return bool(self._call("is_goal", state))

    def is_whole(self, thought: Thought | None) -> bool:
        """Return whether a thought is a whole solution or the end of one."""
        return thought is not None and (thought.ended or self.task.chain in thought.parts)

    def came_of(self, thought: Thought) -> bool:
        """Return whether a solution was executed: its answer is then in the observation, not in its text."""
        solution = not thought.parts.keys() <= set(self.task.thought)
        return solution and thought.observation is not None and isinstance(self.task, HasAnswer)

    def answer_at(self, state: State) -> Any | None:
        """Return the answer that a state contains, in its text or its observation, or None."""
        last = state.thoughts[-1] if state.thoughts else None
        if last is not None and self.is_whole(last) and not self.came_of(last):
            return self.answer_in(last.parts.get(self.task.chain) or state.message, last.truncated)
        return self._call("answer_at", state) if isinstance(self.task, HasAnswer) else None

    def answer_in(self, text: str, truncated: bool = False) -> Any | None:
        """Return the answer in a model's text. `truncated`: the token limit ended the text."""
        return self._call("parse_truncated" if truncated else "parse_answer", text)

    def elect(
        self, question: str, answers: Sequence[Any], weights: Sequence[float]
    ) -> tuple[list[Hashable], int] | None:
        """Return a key for each answer and the index of the elected one; None if the task has no `elect`."""
        if not isinstance(self.task, HasElection) or not answers:
            return None
        result = self._call("elect", question, answers, weights)
        try:
            keys, index = list(result[0]), result[1]
            hash(tuple(keys))
            answers[index]
        except (TypeError, ValueError, LookupError):
            raise self._wrong("elect", result, "return a list of hashable keys and an index") from None
        if len(keys) != len(answers):
            raise self._wrong("elect", result, f"return one key for each of the {len(answers)} answers")
        return keys, index

    def claims(self, text: str) -> frozenset[Hashable]:
        return frozenset(self._call("claims", text))

    def verify(self, question: str, answer: Any) -> bool:
        return bool(self._call("verify", question, answer))

    def _number(self, method: str, *arguments: Any) -> float:
        number = self._call(method, *arguments)
        if not isinstance(number, int | float) or not math.isfinite(_as_float(number)):
            raise self._wrong(method, number, "return a finite number")
        return float(number)

    def _hashable(self, method: str, *arguments: Any) -> Hashable:
        key: Hashable = self._call(method, *arguments)
        try:
            hash(key)  # a tuple that contains a list is not hashable
        except TypeError:
            raise self._wrong(method, key, "not hashable; return text or tuples") from None
        return key

    def _texts(self, method: str, *arguments: Any) -> list[str]:
        texts = self._call(method, *arguments)
        result: list[Any] = list(texts) if isinstance(texts, Iterable) and not isinstance(texts, str) else [None]
        if not all(isinstance(text, str) for text in result):
            raise self._wrong(method, texts, "return a list of texts")
        return result

    def _wrong(self, method: str, result: Any, remedy: str) -> TaskError:
        return TaskError(f"{self._name}.{method} gave {result!r:.100}: {remedy}")

    def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        try:
            return getattr(self.task, method)(*arguments, **named)
        except TotError:
            raise
        except Exception as error:  # user code may raise anything
            state = next((argument for argument in arguments if isinstance(argument, State)), None)
            after = f" after {state.text!r}" if state is not None and state.thoughts else ""
            raise TaskError(f"{self._name}.{method} raised {describe(error)}{after}: fix the task") from error


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Raise a TaskError that names `what` for any exception in the block, except TotError."""
    try:
        yield
    except TotError:
        raise
    except Exception as error:
        raise TaskError(f"{what} raised {describe(error)}") from error
