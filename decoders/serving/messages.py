"""Replies of Anthropic's Messages API, whole or as events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic_core import from_json

from tot.decoders.serving.errors import ServingError
from tot.decoders.serving.messages_body import MessagesBody
from tot.decoders.serving.replies import ChatReply, Event, usage_of
from tot.decoders.serving.service import Choice, Piece, Result

_FIELDS = {"thinking": "thinking_delta", "text": "text_delta", "partial_json": "input_json_delta"}
"""The type of a delta with each field."""


class MessagesReply(ChatReply):
    """A message, whose content is blocks of thinking, text and calls."""

    prefix: ClassVar = "msg_"

    def __init__(self, body: MessagesBody, about: Mapping[str, Any]) -> None:
        super().__init__(body, about)
        self._stops = body.stop
        self._key = ""
        """The kind of the block that is written, or the id of its call."""
        self._index = -1

    def piece(self, piece: Piece) -> Iterator[Event]:
        field = "partial_json" if piece.call else "thinking" if piece.thinking else "text"
        key = piece.call.id if piece.call else field
        if key != self._key:
            yield from self._end()
            self._key, self._index = key, self._index + 1
            yield {"type": "content_block_start", "index": self._index, "content_block": _block(piece)}
        if piece.text:
            delta = {"type": _FIELDS[field], field: piece.text}
            yield {"type": "content_block_delta", "index": self._index, "delta": delta}

    def ending(self, choice: Choice) -> Iterator[Event]:
        if self._index < 0:
            yield from self.piece(Piece(0, ""))
        yield from self._end()
        self._choice = choice

    def last(self, result: Result) -> Iterator[Event]:
        about = {**self.about, **self._choice.about}
        yield {"type": "message_delta", "delta": self._stop(self._choice), "usage": _usage(result), "tot": about}
        yield {"type": "message_stop"}

    def failed(self, error: ServingError) -> Event:
        return {"type": "error", **error.body()}

    def whole(self, result: Result) -> dict[str, Any]:
        (choice,) = result.choices
        pieces = [Piece(0, choice.thinking, True)] * bool(choice.thinking)
        pieces += [Piece(0, choice.text)] * bool(choice.text or not choice.calls)
        pieces += [Piece(0, call.arguments, call=call) for call in choice.calls]
        about = {**self.about, **choice.about}
        content = [_block(piece, piece.text) for piece in pieces]
        return {**self._message(content), **self._stop(choice), "usage": _usage(result), "tot": about}

    def _end(self) -> Iterator[Event]:
        """End the block, or begin the message."""
        if self._index >= 0:
            yield {"type": "content_block_stop", "index": self._index}
            return
        message = {**self._message([]), "stop_reason": None, "stop_sequence": None}
        usage = {"input_tokens": 0, "output_tokens": 0}  # known at the end
        yield {"type": "message_start", "message": message | {"usage": usage, "tot": self.about}}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self._head["id"], "model": self._head["model"]}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def _stop(self, choice: Choice) -> dict[str, Any]:
        only = self._stops[0] if choice.stopped and len(self._stops) == 1 else None
        ended = "tool_use" if choice.calls else "stop_sequence" if choice.stopped else "end_turn"
        return {"stop_reason": "max_tokens" if choice.truncated else ended, "stop_sequence": only}


def _block(piece: Piece, text: str = "") -> dict[str, Any]:
    """Return a block with the text of a piece."""
    if piece.call is not None:
        return {"type": "tool_use", "id": piece.call.id, "name": piece.call.name, "input": from_json(text or "{}")}
    if piece.thinking:
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _usage(result: Result) -> dict[str, Any]:
    usage = usage_of(result)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    tokens = {"input_tokens": usage["prompt_tokens"] - cached, "output_tokens": usage["completion_tokens"]}
    return {**tokens, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}
