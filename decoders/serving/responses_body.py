"""Bodies of OpenAI's Responses API, whose items are read as chat messages."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from tot.decoders.constraint import Constraint
from tot.decoders.request import Message
from tot.decoders.serving.errors import invalid
from tot.decoders.serving.protocol import Body, ChatMessage, Conversation, Effort, GenerationBody
from tot.decoders.serving.tool_fields import Form

_OF_ITEM = frozenset(("type", "id", "status", "phase"))
"""Fields of a message in the output of a response, which clients send back."""


class Reasoning(Body):
    """The field `reasoning`. Every kind of summary is the whole reasoning."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(Body):
    """The field `text`."""

    ignored: ClassVar[Collection[str]] = ("verbosity",)

    format: Form = None


def _messages(given: Any) -> Any:
    """Return text as a message, and a list of items as messages, each reply with the reasoning before it."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        return given
    messages: list[dict[str, Any]] = []
    thinking = ""
    for item in given:
        fields = item if isinstance(item, dict) else {}
        kind = fields.get("type", "message")
        if kind == "reasoning":
            parts = fields.get("content") or fields.get("summary") or []
            texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
            thinking += "".join(text for text in texts if isinstance(text, str))
            continue
        if kind == "function_call":
            if not messages or messages[-1].get("role") != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {name: fields.get(name) for name in ("name", "arguments")}
            calls = messages[-1].get("tool_calls", [])
            messages[-1]["tool_calls"] = [*calls, {"id": fields.get("call_id"), "function": function}]
        elif kind == "function_call_output":
            result = {"tool_call_id": fields.get("call_id"), "content": fields.get("output")}
            messages.append({"role": "tool", **result})
        elif kind == "message":
            messages.append({name: value for name, value in fields.items() if name not in _OF_ITEM})
        else:
            reason = "and only messages, reasoning, function calls and their outputs are supported"
            raise ValueError(f"an item has type {str(kind)[:40]!r}, {reason}: remove it")
        if thinking and messages[-1].get("role") == "assistant":
            messages[-1]["reasoning_content"] = thinking
        thinking = ""
    return messages


class ResponsesBody(Conversation):
    """`POST /v1/responses`, stateless: a request has the whole conversation, and nothing is stored."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationBody.neutral,
        "background": (False,),
        "include": ([], ["reasoning.encrypted_content"]),
        "store": (False,),
        "truncation": ("disabled",),
    }

    alternatives: ClassVar = None
    return_token_ids: ClassVar = False
    place: ClassVar = "input"
    form_field: ClassVar = "text.format"

    messages: Annotated[list[ChatMessage], BeforeValidator(_messages), Field(min_length=1, validation_alias="input")]
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    instructions: str = ""
    reasoning: Reasoning = Reasoning()
    text: TextFormat = TextFormat()

    @property
    def form(self) -> Constraint | None:
        return self.text.format

    @property
    def history(self) -> list[Message]:
        """The instructions and all messages."""
        first = [Message(role="system", content=self.instructions)] if self.instructions else []
        return [*first, *super().history]

    @property
    def effort(self) -> Effort | None:
        return self.reasoning.effort or self.reasoning_effort

    @property
    def most_tokens(self) -> int | None:
        return self.max_output_tokens

    @model_validator(mode="after")
    def _one_effort(self) -> Self:
        if self.reasoning_effort not in (None, self.effort):
            raise invalid("reasoning.effort and reasoning_effort differ: give one of them", "reasoning_effort")
        return self
