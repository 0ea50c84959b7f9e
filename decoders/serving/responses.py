"""Replies of OpenAI's Responses API, whole or as events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tot.decoders.request import ToolCall
from tot.decoders.serving.errors import ServingError
from tot.decoders.serving.replies import ChatReply, Event, usage_of
from tot.decoders.serving.responses_body import ResponsesBody
from tot.decoders.serving.service import Choice, Piece, Result

_CHOICES = ("none", "auto", "required")
_NAMES = {
    "message": ("content", "output_text", "content_part", "output_text"),
    "reasoning": ("content", "reasoning_text", "content_part", "reasoning_text"),
    "summary": ("summary", "summary_text", "reasoning_summary_part", "reasoning_summary_text"),
}
"""For each kind of item: its field for the part, the part's type, and the names of the events of part and text."""


class ResponsesReply(ChatReply):
    """A response. Its output is an item of reasoning, if there is thinking, a message, and calls of functions.

    Thinking is the summary of the reasoning if the client asked for one, otherwise its text. Each item except a call
    has one part.
    """

    prefix: ClassVar = "resp_"

    def __init__(self, body: ResponsesBody, about: Mapping[str, Any]) -> None:
        super().__init__(body, about)
        self._body = body
        self._output: list[dict[str, Any]] = []
        self._item: dict[str, Any] | None = None
        """The item that is written."""
        self._key = ""
        """Its type, or the id of its call."""
        self._number = 0

    def piece(self, piece: Piece) -> Iterator[Event]:
        key = "reasoning" if piece.thinking else "message" if piece.call is None else piece.call.id
        if self._key != key:
            yield from self._end("completed") if self._item is not None else self._opening()
            self._key = key
            yield from self._begin(key) if piece.call is None else self._begin_call(piece.call)
        self._part["text"] += piece.text
        if piece.call is None or piece.text:
            yield self._of_text("delta", delta=piece.text)

    def ending(self, choice: Choice) -> Iterator[Event]:
        if self._item is None or self._item["type"] == "reasoning":
            yield from self.piece(Piece(0, ""))
        self._choice = choice
        yield from self._end(self._status)

    def last(self, result: Result) -> Iterator[Event]:
        usage = usage_of(result)
        final = {
            "incomplete_details": {"reason": "max_output_tokens"} if self._choice.incomplete else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            },
            "tot": {**self.about, **self._choice.about},
        }
        yield self._event(f"response.{self._status}", response={**self._response(self._status), **final})

    def failed(self, error: ServingError) -> Event:
        body = error.body()["error"]
        return self._event("error", error=body, **{name: body[name] for name in ("code", "message", "param")})

    def whole(self, result: Result) -> dict[str, Any]:
        (choice,) = result.choices
        pieces = [Piece(0, choice.thinking, True)] * bool(choice.thinking)
        pieces += [Piece(0, choice.text)] * bool(choice.text or not choice.calls)
        pieces += [Piece(0, call.arguments, call=call) for call in choice.calls]
        for piece in pieces:
            list(self.piece(piece))
        list(self.ending(choice))
        (event,) = self.last(result)
        return event["response"] if isinstance(event, dict) else {}

    @property
    def _status(self) -> str:
        return "incomplete" if self._choice.incomplete else "completed"

    def _opening(self) -> Iterator[Event]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def _begin(self, kind: str) -> Iterator[Event]:
        """Begin an item with one part."""
        summary = kind == "reasoning" and self._body.reasoning.summary is not None
        self._field, part_type, self._part_event, self._text_event = _NAMES["summary" if summary else kind]
        about: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        self._item = {"id": f"{self._head['id']}-{kind}", "type": kind, "status": "in_progress", "content": [], **about}
        self._part: dict[str, Any] = {"type": part_type, "text": ""}
        if kind == "message":
            self._part |= {"annotations": [], "logprobs": []}
        yield self._event("response.output_item.added", output_index=len(self._output), item=self._item)
        yield self._event(f"response.{self._part_event}.added", **self._place, part=dict(self._part))

    def _begin_call(self, call: ToolCall) -> Iterator[Event]:
        about = {"type": "function_call", "status": "in_progress", "call_id": call.id, "name": call.name}
        self._item = {"id": f"fc_{call.id}", **about, "arguments": ""}
        self._part, self._text_event = {"text": ""}, "function_call_arguments"
        yield self._event("response.output_item.added", output_index=len(self._output), item=self._item)

    def _end(self, status: str) -> Iterator[Event]:
        assert self._item is not None
        text = self._part["text"]
        if self._item["type"] == "function_call":
            yield self._of_text("done", arguments=text, name=self._item["name"])
            item = {**self._item, "status": status, "arguments": text}
        else:
            yield self._of_text("done", text=text)
            yield self._event(f"response.{self._part_event}.done", **self._place, part=self._part)
            item = {**self._item, "status": status, self._field: [self._part]}
        yield self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)

    @property
    def _place(self) -> dict[str, Any]:
        assert self._item is not None
        part = {} if self._item["type"] == "function_call" else {f"{self._field}_index": 0}
        return {"item_id": self._item["id"], "output_index": len(self._output), **part}

    def _of_text(self, what: str, **fields: Any) -> dict[str, Any]:
        logprobs: dict[str, Any] = {"logprobs": []} if self._text_event == "output_text" else {}
        return self._event(f"response.{self._text_event}.{what}", **self._place, **fields, **logprobs)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _response(self, status: str) -> dict[str, Any]:
        body, choice = self._body, self._body.tool_choice
        return {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "status": status,
            "model": body.model,
            "max_output_tokens": body.max_output_tokens,
            "store": False,
            "error": None,
            "tools": [{"type": "function", **tool.model_dump(), "strict": True} for tool in body.tools],
            "tool_choice": choice if choice in _CHOICES else {"type": "function", "name": choice},
            "parallel_tool_calls": body.parallel_tool_calls,
            "reasoning": {"effort": body.effort, "summary": body.reasoning.summary},
            "output": self._output,
            "tot": self.about,
        }
