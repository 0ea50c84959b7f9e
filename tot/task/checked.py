"""CheckedTask: a task with defaults for the methods that it lacks, and errors that name the method that failed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    InstanceOf,
    JsonValue,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
)

from tot.decoders.errors import TaskError, TotError, describe, readable, reason
from tot.decoders.request import Message
from tot.task.call_votes import elect, elected, is_calls
from tot.task.schemas import Schema
from tot.task.task import Task, answer_text
from tot.task.world import HasAct, HasAnswer, HasElection, HasTerminal, World
from tot.tree.thought import Observation, State, Thought, to_text

_WORLD: TypeAdapter[JsonValue] = TypeAdapter(JsonValue)
_OBSERVED = 4000
"""Maximum length of an observation in characters; the rest is cut."""


def _of(form: Any, remedy: str) -> tuple[Callable[[Any], Any], str]:
    return TypeAdapter(form).validate_python, remedy


def _as_text(given: Any) -> Any:
    return to_text(given) if isinstance(given, BaseModel) else given


def _hashable(result: Any) -> Any:
    hash(result)  # a tuple that contains a list is not hashable
    return result


_Number = Annotated[float, Field(allow_inf_nan=False)]
_TEXTS = _of(list[str], "return a list of texts")
_NUMBER = _of(_Number, "return a finite number")
_KEY = (_hashable, "not hashable; return text or tuples")
_TRUTH = (bool, "return True or False")
_CHECKS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "start": _of(InstanceOf[State], "return a State"),
    "prompt": _of(tuple[InstanceOf[Message], ...], "return a tuple of Messages"),
    "parse_thought": _of(str | None, "return text, or None to reject it"),
    "parse_proposals": _TEXTS,
    "parse_value": _of(float | None, "return a number, or None if there is no value"),
    "candidate": _of(str, "return text"),
    "choices": _TEXTS,
    "steps": _TEXTS,
    "hints": _TEXTS,
    "actions": _of(list[Annotated[str, BeforeValidator(_as_text)]], "return a list of texts, or of pydantic objects"),
    "canonical": _KEY,
    "key": _KEY,
    "cost": _of(Annotated[_Number, Field(ge=0)], "return a finite number, 0 or more"),
    "heuristic": _NUMBER,
    "measured": _of(_Number | None, "return a finite number, or None"),
    "reward": _NUMBER,
    "score": _NUMBER,
    "scores": _of(list[_Number], "return a list of finite numbers"),
    "is_answered": _TRUTH,
    "is_goal": _TRUTH,
    "verify": _TRUTH,
}
"""For each method: a function that converts its result or raises, and the remedy for an invalid result."""

if TYPE_CHECKING:

    class _Methods(Task, World):
        """All methods of a task."""

else:
    _Methods = object


class CheckedTask(_Methods):
    """A task whose results are checked. Raises TaskError if a method fails or returns an invalid result.

    The methods of `World` that the task does not define have their defaults.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self._schemas: dict[str, Schema | None] = {}

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the task. Methods are wrapped: their results are checked, and errors name them."""
        found = self._find(name)
        return partial(self._call, name) if inspect.isroutine(found) else found

    def _find(self, name: str) -> Any:
        """Return an attribute of the task, or the default of `World`."""
        task = vars(self)["task"]
        if hasattr(task, name):
            return getattr(task, name)
        default = getattr(World, name)
        return MethodType(default, task) if callable(default) else default

    def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        name = f"{type(self.task).__name__}.{method}"
        try:
            result = self._find(method)(*arguments, **named)
        except TotError:
            raise
        except Exception as error:  # user code may raise anything
            state = next((argument for argument in arguments if isinstance(argument, State)), None)
            after = f" after {state.text!r}" if state is not None and state.thoughts else ""
            raise TaskError(f"{name} raised {describe(error)}{after}: fix the task") from error
        convert, remedy = _CHECKS.get(method, (None, ""))
        try:
            return result if convert is None else convert(result)
        except (TypeError, ValueError, OverflowError):
            raise self._wrong(method, result, remedy) from None

    def check_schemas(self) -> None:
        """Raise TaskError if a schema is invalid, or if the task lacks its template."""
        for name in self.task.schemas:
            if name not in self.task.prompts and name not in self.task.thought:
                raise TaskError(f"{self._schema_name(name)} has no template: rename it, or define the template")
            self.schema(name)

    def schema(self, template: str) -> Schema | None:
        """Return the schema of a template, or None."""
        if template not in self._schemas:
            given = self.task.schemas.get(template)
            try:
                self._schemas[template] = Schema(given) if template in self.task.schemas else None
            except (PydanticUserError, ValueError, TypeError, NameError) as error:
                why = readable(error) if isinstance(error, ValidationError) else reason(error)
                raise TaskError(
                    f"{self._schema_name(template)} is {given!r:.60} ({why}): give a type of pydantic, or a Constraint"
                ) from None
        return self._schemas[template]

    def _schema_name(self, template: str) -> str:
        return f"{type(self.task).__name__}.schemas[{template!r}]"

    def read(self, template: str, text: str) -> Any | None:
        """Return the object of a template's text, None if it is invalid, or the text if the template has no schema."""
        if (schema := self.schema(template)) is None:
            return text
        try:
            return schema.parse(self._after_trigger(template, text))
        except Exception as error:  # a validator of the user may raise anything
            name = self._schema_name(template)
            raise TaskError(f"{name} raised {describe(error)} for {text!r:.100}: fix the validator") from error

    def _after_trigger(self, template: str, text: str) -> str:
        trigger = self.task.triggers.get(template)
        return text.rpartition(trigger)[2] if trigger else text

    def typed(self, thought: Thought) -> Thought | None:
        """Return a thought with the objects of its parts. None if a part does not meet the schema of its template."""
        objects = dict(thought.objects)
        for name, text in thought.parts.items():
            if name not in objects and self.schema(name) is not None:
                objects[name] = self.read(name, text)
        if any(one is None for one in objects.values()):
            return None
        return thought.model_copy(update={"objects": objects}) if len(objects) > len(thought.objects) else thought

    def parse_thought(self, template: str, text: str) -> str | None:
        """Return the thought in a template's text, after a trigger if the template has a schema. None if invalid."""
        if self.schema(template) is None:
            return self._call("parse_thought", template, text)  # type: ignore[no-any-return]
        return None if self.read(template, text) is None else self._after_trigger(template, text).strip()

    def parse_proposals(self, text: str) -> list[str]:
        found = self.read("propose", text)
        return [] if found is None else self._call("parse_proposals", found)

    def _wrong(self, method: str, result: Any, remedy: str, kind: str = "") -> TaskError:
        return TaskError(f"{type(self.task).__name__}.{method} gave {kind}{result!r:.100}: {remedy}")

    def start(self, question: str) -> State:
        if not isinstance(question, str):
            raise TaskError(f"the question is {question!r:.60}, not text: give text")
        state: State = self._call("start", question)
        return state.model_copy(update={"thoughts": (*self.task.turns, *state.thoughts)})

    def parse_vote(self, text: str, candidates: int) -> int | None:
        found = self.read("vote", text)
        vote: int | None = None if found is None else self._call("parse_vote", found, candidates)
        if vote is not None and (not isinstance(vote, int) or not 1 <= vote <= candidates):
            raise self._wrong("parse_vote", vote, f"return a number from 1 to {candidates}, or None")
        return vote

    async def act(self, state: State, thought: Thought) -> Observation | None:
        """Execute a thought and return its observation. An exception becomes the text of the observation."""
        try:
            result = await self.task.act(state, thought) if isinstance(self.task, HasAct) else None
        except TotError:
            raise
        except Exception as error:  # a failed action does not end the run  # noqa: BLE001
            return Observation(text=describe(error)[:_OBSERVED])
        if result is not None and not isinstance(result, Observation):
            raise self._wrong("act", result, "return an Observation, or None if nothing was executed")
        if result is not None and len(result.text) > _OBSERVED:
            text = f"{result.text[:_OBSERVED]}\n… (cut: {len(result.text)} characters)"
            return result.model_copy(update={"text": text})
        return result

    def step(self, state: State, thought: Thought) -> State | None:
        after = self._call("step", state, thought)
        if after is None:
            return None
        if not isinstance(after, State) or len(after.thoughts) != len(state.thoughts) + 1:
            raise self._wrong("step", after, "return state.then(thought, world), or None if it is not legal")
        try:
            _WORLD.validate_python(after.world)
        except ValidationError:
            remedy = "use text, numbers, lists and dicts"
            raise self._wrong("step", after.world, remedy, "a world that is not JSON data, ") from None
        if (last := self.typed(after.thoughts[-1])) is None:
            raise self._wrong("step", after.thoughts[-1].text, "keep to the schema")
        return after.model_copy(update={"thoughts": (*after.thoughts[:-1], last)})

    def is_terminal(self, state: State) -> bool:
        return isinstance(self.task, HasTerminal) and bool(self._call("is_terminal", state))

    def is_whole(self, thought: Thought | None) -> bool:
        """Return whether a thought is a whole solution or the end of one."""
        return thought is not None and (thought.ended or "chain" in thought.parts)

    def is_executed(self, thought: Thought) -> bool:
        """Return whether a solution was executed: its answer is then in the observation, not in its text."""
        solution = not thought.parts.keys() <= set(self.task.thought)
        return solution and thought.observation is not None and isinstance(self.task, HasAnswer)

    def answer_at(self, state: State) -> Any | None:
        """Return the answer that a state contains, in its text or its observation, or None."""
        last = state.thoughts[-1] if state.thoughts else None
        if last is not None and last.tool_calls:
            return last.open_calls or None
        if last is not None and self.is_whole(last) and not self.is_executed(last):
            name = next(reversed(last.parts), "")
            return self.answer_in(last.parts.get("chain") or state.message, last.truncated, name)
        return self._call("answer_at", state)

    def answer_in(self, text: str, truncated: bool = False, template: str = "answer") -> Any | None:
        """Return the answer in a model's text for a template. `truncated`: the token limit ended the text."""
        found = self.read(template, text)
        return None if found is None else self._call("parse_truncated" if truncated else "parse_answer", found)

    def restored(self, answer: Any | None) -> Any | None:
        """Return an answer that was saved as JSON, as the object of the schema if there is one."""
        schema = self.schema("answer")
        return answer if schema is None or answer is None else schema.restore(answer)

    def verify(self, question: str, answer: Any) -> bool:
        return not is_calls(answer) and bool(self._call("verify", question, answer))

    def score(self, answer: Any, reference: Any) -> float:
        score: float = self._call("score", answer_text(answer) if is_calls(answer) else answer, reference)
        return score

    def elect(self, question: str, answers: Sequence[Any], weights: Sequence[float]) -> tuple[list[Hashable], int]:
        """Return a key for each answer, which equal answers share, and the index of the elected one.

        Calls of functions, and JSON in a form that is not the task's, are elected by `call_votes`.
        """
        free = self.task.form is None
        own = [i for i, one in enumerate(answers) if (free and not is_calls(one)) or isinstance(one, str)]
        if len(own) == len(answers):
            return self._elected(question, answers, weights)
        keys, index = elect(answers, weights)
        if own:
            given, first = self._elected(question, [answers[i] for i in own], [weights[i] for i in own])
            index = own[first] if index in own else index
            for i, key in zip(own, given, strict=True):
                keys[i] = key
        return keys, index

    def _elected(self, question: str, answers: Sequence[Any], weights: Sequence[float]) -> tuple[list[Hashable], int]:
        """Return the result of the task's `elect`; without it, the first of the answers with the most weight."""
        if not isinstance(self.task, HasElection):
            keys = [self.canonical(answer) for answer in answers]
            return keys, elected(keys, weights)[0]
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


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Raise a TaskError that names `what` for any exception in the block, except TotError."""
    try:
        yield
    except TotError:
        raise
    except Exception as error:
        raise TaskError(f"{what} raised {describe(error)}") from error
