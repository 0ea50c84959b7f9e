"""Bodies of Anthropic's Messages API, read as chats."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from tot.decoders.constraint import Constraint
from tot.decoders.request import Message
from tot.decoders.serving.protocol import Body, Conversation, GenerationBody, joined_text
from tot.decoders.serving.tool_fields import Form

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def _messages(given: list[Any]) -> list[Any]:
    """Return messages of blocks as chat messages: calls belong to their message, and results are messages."""
    messages: list[Any] = []
    for one in given:
        if not isinstance(one, dict) or not isinstance(one.get("content"), list):
            messages.append(one)
            continue
        message: dict[str, Any] = {"role": one.get("role"), "content": []}
        calls: list[dict[str, Any]] = []
        for block in one["content"]:
            kind = block.get("type") if isinstance(block, dict) else None
            if kind == "tool_use":
                function = {"name": block.get("name"), "arguments": json.dumps(block.get("input"), ensure_ascii=False)}
                calls.append({"id": block.get("id"), "function": function})
            elif kind == "tool_result":
                content = block.get("content", "")
                messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
            elif kind == "thinking":
                message["reasoning_content"] = block.get("thinking")
            elif kind != "redacted_thinking":
                message["content"].append(block)
        if calls:
            message["tool_calls"] = calls
        if message["content"] or calls or one.get("role") == "assistant":
            messages.append(message)
    return messages


class OutputConfig(Body):
    """The field `output_config`."""

    ignored: ClassVar[Collection[str]] = ("effort",)

    format: Form = None


class MessagesBody(Conversation):
    """`POST /v1/messages`. Blocks of messages are text, thinking, calls and results."""

    ignored: ClassVar[Collection[str]] = (
        *GenerationBody.ignored,
        *("cache_control", "context_management", "diagnostics", "inference_geo", "speed"),
    )
    alternatives: ClassVar = None
    return_token_ids: ClassVar = False
    most_tokens: ClassVar = None
    form_field: ClassVar = "output_config.format"

    max_tokens: Annotated[int, Field(ge=1)]
    """Maximum tokens with the thinking. The server's limit is not an error."""
    system: Annotated[str, BeforeValidator(joined_text)] = ""
    output_config: OutputConfig = OutputConfig()

    @model_validator(mode="before")
    @classmethod
    def _as_chat(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        body = {name: value for name, value in given.items() if name != "stop_sequences"}
        body["stop"] = given.get("stop_sequences")
        if isinstance(given.get("messages"), list):
            body["messages"] = _messages(given["messages"])
        if isinstance(given.get("tools"), list):
            body["tools"] = [_tool(one) for one in given["tools"]]
        if isinstance(choice := given.get("tool_choice"), dict):
            kind = choice.get("type")
            named = {"type": "function", "name": choice.get("name")}
            body["tool_choice"] = named if kind == "tool" else _CHOICES.get(str(kind), choice)
            body["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use", False)
        return body

    @property
    def form(self) -> Constraint | None:
        return self.output_config.format

    @property
    def history(self) -> list[Message]:
        """The system's text and all messages."""
        first = [Message(role="system", content=self.system)] if self.system else []
        return [*first, *super().history]


class CountBody(MessagesBody):
    """`POST /v1/messages/count_tokens`."""

    max_tokens: Annotated[int, Field(ge=1)] = 1


def _tool(given: Any) -> Any:
    """Return a tool as Chat Completions have it. Tools of Anthropic's servers keep their type, which is refused."""
    if not isinstance(given, dict) or given.get("type", "custom") != "custom":
        return given
    about = {"name": given.get("name"), "description": given.get("description")}
    return {"type": "function", "function": about | {"parameters": given.get("input_schema")}}
