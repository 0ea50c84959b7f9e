"""Requests for searches: OpenAI's chat completions and Responses, and how they limit a search.

`reasoning_effort` limits the whole search, `max_completion_tokens` its new tokens, and `max_tokens` each text. All
limits that are given hold: these, the search's own, and the server's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from tot.decoders.budget import Budget
from tot.decoders.request import Message
from tot.decoders.serving.wire import ChatMessage, Effort, Wanted, Wire
from tot.llm.filters import FILTERS

EFFORTS: Mapping[str, Budget] = {
    "none": Budget(tokens=1_000, seconds=10),
    "minimal": Budget(tokens=1_000, seconds=10),
    "low": Budget(tokens=4_000, seconds=30),
    "medium": Budget(tokens=16_000, seconds=120),
    "high": Budget(tokens=64_000, seconds=480),
    "xhigh": Budget(tokens=256_000),
}


_OF_ITEM = frozenset(("type", "id", "status", "phase"))
"""Fields of a message in the output of a reply, which clients send back."""


class SearchLimits(Wire):
    """The field `x_tot`: limits of a search that OpenAI's API does not have."""

    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    until: Annotated[float, Field(gt=0, le=1)] | None = None
    """As `SearchConfig.until`: stop a vote when it is this sure."""


class SearchWanted(Wanted):
    """`POST /v1/chat/completions` for a search. Sampling options that are missing are the search's own."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **Wanted.neutral,
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "logprobs": (False,),
        "n": (1,),
        "top_logprobs": (0,),
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    x_tot: SearchLimits = SearchLimits()

    @model_validator(mode="after")
    def _ends_with_a_question(self) -> Self:
        if (last := self.messages[-1].role) != "user":
            raise ValueError(f"the last message has the role {last}, and a search answers a user: end with the user's")
        return self

    @property
    def history(self) -> list[Message]:
        """The messages before the question."""
        return [Message(role=one.role, content=one.content) for one in self.messages[:-1]]

    @property
    def question(self) -> str:
        return self.messages[-1].content

    @property
    def effort(self) -> Effort | None:
        return self.reasoning_effort

    @property
    def summary(self) -> str | None:
        """The kind of summary of the reasoning that is requested."""
        return None

    @property
    def options(self) -> dict[str, Any]:
        """The options of `SearchConfig` that are given, without limits."""
        given = self.model_dump(include={"temperature", *FILTERS} & self.model_fields_set)
        return given | ({} if self.x_tot.until is None else {"until": self.x_tot.until})

    def budget(self, *others: Budget | None) -> Budget:
        """Return the limits of this request and all others together."""
        own = Budget(tokens=self.max_completion_tokens, seconds=self.x_tot.seconds)
        given = [budget for budget in (own, EFFORTS.get(self.effort or ""), *others) if budget is not None]
        limits = {name: [limit for one in given if (limit := getattr(one, name)) is not None] for name in dict(own)}
        return Budget(**{name: min(values, default=None) for name, values in limits.items()})


class Reasoning(Wire):
    """The field `reasoning`. Every kind of summary is the whole reasoning."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"generate_summary": ("auto",)}

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(Wire):
    """The field `text`: only plain text is supported."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"format": ({"type": "text"},)}


def _messages(given: Any) -> Any:
    """Return text as a message, and a list of items without the reasoning of earlier replies."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        return given
    messages = []
    for item in given:
        kind = item.get("type", "message") if isinstance(item, dict) else "message"
        if kind not in ("message", "reasoning"):
            raise ValueError(f"an item has type {str(kind)[:40]!r}, and only messages are supported: remove it")
        if kind == "message":
            messages.append(
                {name: item[name] for name in item if name not in _OF_ITEM} if isinstance(item, dict) else item
            )
    return messages


class ResponsesWanted(SearchWanted):
    """`POST /v1/responses`, stateless: the request has the whole conversation, and nothing is stored."""

    harmless: ClassVar[Collection[str]] = set(SearchWanted.harmless) - {"store"}
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **SearchWanted.neutral,
        "background": (False,),
        "include": ([], ["reasoning.encrypted_content"]),
        "store": (False,),
        "truncation": ("disabled",),
    }

    messages: Annotated[list[ChatMessage], BeforeValidator(_messages), Field(min_length=1, validation_alias="input")]
    max_completion_tokens: Annotated[
        Annotated[int, Field(ge=1)] | None, Field(validation_alias="max_output_tokens")
    ] = None
    instructions: str = ""
    reasoning: Reasoning = Reasoning()
    text: TextFormat = TextFormat()

    @property
    def effort(self) -> Effort | None:
        return self.reasoning.effort or self.reasoning_effort

    @property
    def summary(self) -> str | None:
        return self.reasoning.summary

    @property
    def history(self) -> list[Message]:
        """The messages before the question, after the instructions."""
        first = [Message(role="system", content=self.instructions)] if self.instructions else []
        return [*first, *super().history]
