"""Thought and State: immutable values that tasks, generators and evaluators pass around."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, JsonValue

from tot.decoders.request import UnicodeText


class Drawn(BaseModel):
    """A text as a decoder drew it: before anything was read from it, and in tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str
    tokens: tuple[int, ...]
    """None from a server that gives log-probabilities alone."""
    logprobs: tuple[float, ...] = ()
    """Of each token, in nats, where they are known."""


class Observation(BaseModel):
    """What came back when a thought was acted on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: UnicodeText
    """As a model is shown it."""
    verified: bool = False
    """It shows that the thought solves the question."""
    data: JsonValue = None
    """What else the task keeps of it."""


class Thought(BaseModel):
    """One step of reasoning. `parts` holds what each of the task's thought templates gave, by template name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    parts: dict[str, str]
    drawn: dict[str, Drawn] = {}
    """Of parts that a model here wrote: what it drew, so that it can go on with just that."""
    ended: bool = False
    """The model ended its message with it: what the path's thoughts say, one after another, is all that it says."""
    truncated: bool = False
    """The token limit ended its text, which the model would have continued."""
    observation: Observation | None = None
    """What came of it, where the task acts on thoughts."""

    def __eq__(self, other: object) -> bool:
        """Thoughts that say the same are equal, in whatever tokens."""
        return isinstance(other, Thought) and self.parts == other.parts

    @property
    def text(self) -> str:
        return "\n".join(self.parts.values())


class State(BaseModel):
    """A question and the path of thoughts taken so far; `world` is the task's own state, if it has one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    question: str
    thoughts: tuple[Thought, ...] = ()
    world: JsonValue = None
    """The task's own state: JSON data, so that a tree can be saved and read without loss."""

    @property
    def text(self) -> str:
        """The thoughts' texts, one after another."""
        return "\n".join(thought.text for thought in self.thoughts)

    @property
    def message(self) -> str:
        """The thoughts as pieces of one message."""
        return "".join(part for thought in self.thoughts for part in thought.parts.values())

    def then(self, thought: Thought, world: JsonValue = None) -> State:
        """The state after one more thought; `world` is its new world, None keeps the old one."""
        kept = self.world if world is None else world
        return self.model_copy(update={"thoughts": (*self.thoughts, thought), "world": kept})


def after_thinking(text: str) -> str:
    """What a model says after the thinking that it opened with `<think>`, or that its template opened for it; nothing
    where the thinking does not end."""
    return "" if is_thinking(text) else text.rpartition("</think>")[2]


def is_thinking(text: str) -> bool:
    """Whether a message has opened its thinking with `<think>`, and not ended it."""
    return text.lstrip().startswith("<think>") and "</think>" not in text
