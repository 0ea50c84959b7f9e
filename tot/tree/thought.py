"""Thought and State: immutable values that tasks, generators and evaluators pass around."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue
from pydantic_core import to_jsonable_python

from tot.decoders.request import Message, ToolCall, UnicodeText


def to_text(value: Any, canonical: bool = False) -> str:
    """Return text as it is, and other values as JSON on one line, as a constrained model writes it.

    Equal values have equal canonical texts: keys are sorted.
    """
    plain = value if isinstance(value, str) else to_jsonable_python(value, fallback=str)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False, sort_keys=canonical)


class SampledText(BaseModel):
    """A text as sampled by a decoder, before parsing, with its tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str
    tokens: tuple[int, ...]
    """Token ids; empty if a server returns only log-probabilities."""
    logprobs: tuple[float, ...] = ()
    """Log-probability of each token (nats), if known."""


class Observation(BaseModel):
    """The result of executing a thought."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: UnicodeText
    """The text shown to the model."""
    verified: bool = False
    """Whether the result proves that the thought solves the question."""
    data: JsonValue = None
    """Other data for the task."""


class Thought(BaseModel):
    """One step of reasoning. `parts` holds the output of each of the task's thought templates, by name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    parts: dict[str, str]
    objects: dict[str, Any] = Field(default={}, exclude=True)
    """The objects that parts stand for, if the task has schemas for their templates. Not saved: a search parses the
    parts again."""
    drawn: dict[str, SampledText] = {}
    """The sampled tokens of parts, so that a local model can continue exactly these tokens."""
    ended: bool = False
    """Whether it ends the model's message. The thoughts of the path together are then the whole message."""
    truncated: bool = False
    """Whether the token limit ended its text."""
    observation: Observation | None = None
    """The result of the thought, if the task executes thoughts."""
    thinking: int = 0
    """Number of characters at the beginning of its text that are thinking, if it is a piece of a message."""
    messages: tuple[Message, ...] = ()
    """The assistant's message and the results of its calls, if the thought is a turn: later prompts contain them."""

    @classmethod
    def turn(cls, name: str, *messages: Message, **about: Any) -> Thought:
        """Return a turn: the assistant's message, and the results of its calls. `name`: the part with the text."""
        said, *results = messages
        texts = [result.content for result in results]
        lines = filter(None, (said.content, *map(str, said.tool_calls), *texts))
        observation = Observation(text="\n".join(texts)) if results else None
        text = "\n".join(lines) + "\n" * bool(said.tool_calls)
        return cls(parts={name: text}, messages=messages, observation=observation, **about)

    def __eq__(self, other: object) -> bool:
        """Compare texts only; tokens may differ."""
        return isinstance(other, Thought) and self.parts == other.parts

    @property
    def text(self) -> str:
        return "\n".join(self.parts.values())

    @property
    def outputs(self) -> dict[str, Any]:
        """The parts, as objects if their templates have schemas."""
        return {**self.parts, **self.objects}

    @property
    def canonical(self) -> str:
        """The text with canonical objects: equal thoughts have equal canonical texts."""
        return "\n".join(to_text(one, canonical=True) for one in self.outputs.values())

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.messages[0].tool_calls if self.messages else ()

    @property
    def open_calls(self) -> tuple[ToolCall, ...]:
        """The calls of a turn, if they were not executed: they are an answer."""
        return self.tool_calls if len(self.messages) == 1 else ()

    @property
    def answer_text(self) -> str:
        """The text without thinking."""
        return self.text[self.thinking :]


class State(BaseModel):
    """A question and the path of thoughts so far."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    question: str
    thoughts: tuple[Thought, ...] = ()
    world: JsonValue = None
    """The task's own state, if it has one: JSON data, so that a tree can be saved without loss."""

    @property
    def text(self) -> str:
        """The thoughts' texts, one per line, without thinking."""
        return "\n".join(thought.answer_text for thought in self.thoughts)

    @property
    def message(self) -> str:
        """The thoughts after the last calls, concatenated to one message, without thinking."""
        begin = max((i for i, thought in enumerate(self.thoughts, 1) if thought.tool_calls), default=0)
        return "".join("".join(thought.parts.values())[thought.thinking :] for thought in self.thoughts[begin:])

    def then(self, thought: Thought, world: JsonValue = None) -> State:
        """Return the state after one more thought. `world` is its new world; None keeps the current one."""
        next_world = self.world if world is None else world
        return self.model_copy(update={"thoughts": (*self.thoughts, thought), "world": next_world})
