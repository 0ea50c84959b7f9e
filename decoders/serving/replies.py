"""Replies of chat and text completions in OpenAI's JSON: whole, or as the chunks of a stream.

The additional field `tot` has the decoder and the seed, or the facts about a search.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tot.decoders.serving.errors import ServingError
from tot.decoders.serving.protocol import GenerationBody
from tot.decoders.serving.service import Choice, Piece, Result
from tot.decoders.tools import call_json

Event = dict[str, Any] | str
"""JSON, whose `type` is the name of the event, or text."""


class ChatReply:
    """The reply to one request, with one id and one creation time for all of its chunks."""

    kind: ClassVar = "chat.completion"
    chunk_kind: ClassVar = "chat.completion.chunk"
    prefix: ClassVar = "chatcmpl-"

    def __init__(self, body: GenerationBody, about: Mapping[str, Any]) -> None:
        """`about` is the field `tot`."""
        self.includes_usage = body.stream_options.include_usage
        self.about = about
        self._opened: set[int] = set()
        self._calls: dict[int, list[str]] = {}
        """For each choice the ids of its calls."""
        self._head = {"id": f"{self.prefix}{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}

    def piece(self, piece: Piece) -> Iterator[Event]:
        """Yield the events of a piece. The first one opens its choice."""
        if piece.call is None:
            yield self._chunk(piece.index, {"reasoning_content" if piece.thinking else "content": piece.text})
            return
        ids = self._calls.setdefault(piece.index, [])
        delta: dict[str, Any] = {"function": {"arguments": piece.text}}
        if piece.call.id not in ids:
            ids.append(piece.call.id)
            delta = call_json(piece.call, piece.text)
        yield self._chunk(piece.index, {"tool_calls": [{"index": ids.index(piece.call.id), **delta}]})

    def ending(self, choice: Choice) -> Iterator[Event]:
        """Yield the last events of a choice."""
        yield self._chunk(choice.index, {}, choice)

    def last(self, result: Result) -> Iterator[Event]:
        """Yield the last events of the stream."""
        if self.includes_usage:
            chunk = {**self._head, "object": self.chunk_kind, "tot": self.about, "choices": []}
            yield {**chunk, "usage": usage_of(result)}
        yield "[DONE]"

    def failed(self, error: ServingError) -> Event:
        """Return the last event of a stream that fails."""
        return error.body()

    def whole(self, result: Result) -> dict[str, Any]:
        """Return the complete reply."""
        choices = [{**self._ended(choice.index, choice), **self._text(choice)} for choice in result.choices]
        head = {**self._head, "object": self.kind, "tot": {**self.about, **result.choices[0].about}}
        return {**head, "choices": choices, "usage": usage_of(result)}

    def _text(self, choice: Choice) -> dict[str, Any]:
        content = None if choice.calls and not choice.text else choice.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.calls:
            message["tool_calls"] = [call_json(call, call.arguments) for call in choice.calls]
        return {"message": message | ({"reasoning_content": choice.thinking} if choice.thinking else {})}

    def _delta(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        role = {} if index in self._opened else {"role": "assistant", "content": ""}
        self._opened.add(index)
        return {"delta": role | delta}

    def _chunk(self, index: int, delta: dict[str, Any], choice: Choice | None = None) -> dict[str, Any]:
        about = self.about if choice is None else {**self.about, **choice.about}
        content = {**self._ended(index, choice), **self._delta(index, delta)}
        return {**self._head, "object": self.chunk_kind, "tot": about, "choices": [content]}

    def _ended(self, index: int, choice: Choice | None) -> dict[str, Any]:
        """Return the fields of a choice without its text; None for one that has not ended."""
        if choice is None:
            return {"index": index, "finish_reason": None, "logprobs": None}
        reason = "length" if choice.truncated else "tool_calls" if choice.calls else "stop"
        return {"index": index, "finish_reason": reason, "logprobs": None, **choice.fields}


class TextReply(ChatReply):
    """A text completion, which has no place for thinking."""

    kind: ClassVar = "text_completion"
    chunk_kind: ClassVar = "text_completion"
    prefix: ClassVar = "cmpl-"

    def piece(self, piece: Piece) -> Iterator[Event]:
        if not piece.thinking:
            yield from super().piece(piece)

    def _text(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.text}

    def _delta(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"text": delta.get("content", "")}


def usage_of(result: Result) -> dict[str, Any]:
    usage = result.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.new_tokens,
        "total_tokens": usage.prompt_tokens + usage.new_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.reused_prompt_tokens},
        "completion_tokens_details": {"reasoning_tokens": result.reasoning_tokens},
    }
