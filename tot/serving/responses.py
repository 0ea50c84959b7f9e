"""OpenAI's Responses API by searches, stateless: a request has the whole conversation, and nothing is stored."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from tot.decoders.request import Message
from tot.decoders.serving.errors import ServingError
from tot.decoders.serving.protocol import Body, ChatMessage, Effort
from tot.serving.chat import ChatReply, Events, Result, SearchBody

_OF_ITEM = frozenset(("type", "id", "status", "phase"))
"""Fields of a message in the output of a reply, which clients send back."""


class Reasoning(Body):
    """The field `reasoning`. Every kind of summary is the whole reasoning."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"generate_summary": ("auto",)}

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(Body):
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
        if kind == "message" and isinstance(item, dict):
            messages.append({name: value for name, value in item.items() if name not in _OF_ITEM})
        elif kind == "message":
            messages.append(item)
    return messages


class ResponsesBody(SearchBody):
    """`POST /v1/responses`."""

    harmless: ClassVar[Collection[str]] = set(SearchBody.harmless) - {"store"}
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **SearchBody.neutral,
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
    def history(self) -> list[Message]:
        """The messages before the question, after the instructions."""
        first = [Message(role="system", content=self.instructions)] if self.instructions else []
        return [*first, *super().history]


class ResponsesReply(ChatReply):
    """A response. Its output is an item of reasoning, if there are thoughts, and a message.

    Thoughts are the summary of the reasoning if the client asked for one, otherwise its text. Each item has one part.
    """

    _body: ResponsesBody

    def __init__(self, body: ResponsesBody, about: dict[str, Any]) -> None:
        super().__init__(body, about)
        self._output: list[dict[str, Any]] = []
        self._number = 0

    def _opening(self) -> Events:
        """Return the events before the first item."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def thought(self, text: str) -> Events:
        if not self._thoughts:
            yield from self._opening()
            if self._body.reasoning.summary:
                names = "summary", "summary_text", "reasoning_summary_part", "reasoning_summary_text"
            else:
                names = "content", "reasoning_text", "content_part", "reasoning_text"
            yield from self._begin("reasoning", *names, part={}, summary=[])
        self._thoughts.append(text)
        yield self._text("delta", delta=text)

    def ending(self, result: Result) -> Events:
        stopped, answer = result.solution.stopped or "", result.solution.answer
        cut = result.truncated and (answer is None or stopped.startswith("budget"))  # not by `max_tokens` of a text
        status, text = "incomplete" if cut else "completed", self._answer(result)
        yield from self._end("completed", "".join(self._thoughts)) if self._thoughts else self._opening()
        names = "content", "output_text", "content_part", "output_text"
        yield from self._begin("message", *names, part={"annotations": [], "logprobs": []}, role="assistant")
        yield self._text("delta", delta=text, logprobs=[])
        yield from self._end(status, text)
        usage = result.usage
        final = {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            },
        }
        response = {**self._response(status), **final, "tot": self._about | result.about}
        yield self._event(f"response.{status}", response=response)

    def failed(self, error: ServingError) -> dict[str, Any]:
        body = error.body()["error"]
        return self._event("error", error=body, **{name: body[name] for name in ("code", "message", "param")})

    def whole(self, result: Result) -> dict[str, Any]:
        *_, last = self.ending(result)
        return last["response"] if isinstance(last, dict) else {}

    def _begin(
        self, kind: str, field: str, part_type: str, part_event: str, text_event: str, part: Any, **fields: Any
    ) -> Events:
        """Begin an item with one part. Names: the item's field for it, its type, its events and its text's events."""
        self._field, self._part_event, self._text_event = field, part_event, text_event
        self._item = {"type": kind, "id": f"{self._id}-{kind}", "status": "in_progress", **fields, "content": []}
        self._part = {"type": part_type, "text": "", **part}
        yield self._event("response.output_item.added", output_index=len(self._output), item=self._item)
        yield self._event(f"response.{part_event}.added", **self._place, part=self._part)

    def _end(self, status: str, text: str) -> Events:
        part = {**self._part, "text": text}
        yield self._text("done", **{name: part[name] for name in ("text", "logprobs") if name in part})
        yield self._event(f"response.{self._part_event}.done", **self._place, part=part)
        item = {**self._item, "status": status, self._field: [part]}
        yield self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item["id"], "output_index": len(self._output), f"{self._field}_index": 0}

    def _text(self, what: str, **fields: Any) -> dict[str, Any]:
        return self._event(f"response.{self._text_event}.{what}", **self._place, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": body.model,
            "max_output_tokens": body.max_completion_tokens,
            "store": False,
            "error": None,
            "tools": [],
            "tool_choice": "none",
            "parallel_tool_calls": False,
            "reasoning": {"effort": body.effort, "summary": body.reasoning.summary},
            "output": self._output,
            "tot": self._about,
        }
