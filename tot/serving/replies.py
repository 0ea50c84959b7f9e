"""Replies of searches: chat completions and Responses, whole and as events.

The thoughts are the reasoning, and the answer is the content. The additional field `tot` has the search, its seed and,
at the end, what `Result.about` returns.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from tot.decoders.serving.errors import ServingError
from tot.decoders.serving.replies import usage_of
from tot.decoders.serving.streaming import Event
from tot.search.session import shown_answer
from tot.serving.wire import SearchWanted
from tot.solver import Solution
from tot.task.task import Task
from tot.task.world import HasElection

Events = Iterator[Event]


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a search."""

    task: Task
    solution: Solution
    stop: list[str]

    @property
    def text(self) -> str:
        """The answer, up to the first stop string; empty if there is none."""
        text = "" if self.solution.answer is None else shown_answer(self.solution.answer)
        return text[: min((text.find(one) for one in self.stop if one in text), default=None)]

    @property
    def cut(self) -> bool:
        """Whether a limit ended the search before its answer."""
        return self.solution.answer is None and (self.solution.stopped or "").startswith(
            ("budget", "the text was truncated")
        )

    @property
    def usage(self) -> dict[str, Any]:
        """Usage of the whole search. All new tokens are reasoning: the answer is one of the thoughts."""
        usage = usage_of(self.solution.usage)
        return {**usage, "completion_tokens_details": {"reasoning_tokens": usage["completion_tokens"]}}

    @property
    def about(self) -> dict[str, Any]:
        solution = self.solution
        return {
            "certainty": solution.certainty,
            "solved": solution.solved,
            "chosen": self._chosen,
            "votes": solution.votes,
            "value": solution.value,
            "thoughts": len(solution.tree) - 1,
            "seconds": round(solution.usage.seconds, 3),
            "stopped": solution.stopped,
        }

    @property
    def _chosen(self) -> str | None:
        """How the answer was chosen; None if there is none."""
        solution = self.solution
        if solution.answer is None:
            return None
        if solution.solved:
            return solution.verdict
        if solution.votes is None:
            return "value" if len(solution.tree.leaves()) > 1 else "only sample"
        return "similarity" if solution.votes[0] == 1 and isinstance(self.task, HasElection) else "votes"


class Reply(Protocol):
    """A reply in one protocol. For a stream, `opening`, `thought` and `ending` return its events."""

    def opening(self) -> Events: ...

    def thought(self, text: str) -> Events: ...

    def ending(self, result: Result) -> Events: ...

    def failed(self, error: ServingError) -> dict[str, Any]:
        """Return the last event of a stream that fails."""

    def whole(self, result: Result) -> dict[str, Any]: ...


class ChatReply:
    """A chat completion."""

    def __init__(self, wanted: SearchWanted, about: dict[str, Any]) -> None:
        self._wanted = wanted
        self._about = about
        self._thoughts: list[str] = []
        self._id, self._created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())

    def opening(self) -> Events:
        return iter(())

    def thought(self, text: str) -> Events:
        role = {} if self._thoughts else {"role": "assistant", "content": ""}
        self._thoughts.append(text)
        yield self._chunk({**role, "reasoning_content": text})

    def ending(self, result: Result) -> Events:
        role = {} if self._thoughts else {"role": "assistant"}
        yield self._chunk({**role, "content": result.text})
        yield {**self._chunk({}, _finish(result)), "tot": self._about | result.about}
        if self._wanted.stream_options is not None and self._wanted.stream_options.include_usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": result.usage}
        yield "[DONE]"

    def failed(self, error: ServingError) -> dict[str, Any]:
        return error.body()

    def whole(self, result: Result) -> dict[str, Any]:
        message = {"role": "assistant", "content": result.text, "refusal": None}
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        choice = {"index": 0, "message": message, "finish_reason": _finish(result), "logprobs": None}
        head = self._head("chat.completion") | {"tot": self._about | result.about}
        return {**head, "choices": [choice], "usage": result.usage}

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        about = {"model": self._wanted.model, "tot": self._about}
        return {"id": self._id, "object": kind, "created": self._created, **about}


def _finish(result: Result) -> str:
    return "length" if result.cut else "stop"


@dataclass
class _Item:
    """An item of a response's output with one part of text."""

    kind: str
    """reasoning or message."""
    index: int
    text: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    texts: ClassVar = {"reasoning": "reasoning_text", "message": "output_text"}

    @property
    def part(self) -> dict[str, Any]:
        more = {} if self.kind == "reasoning" else {"annotations": [], "logprobs": []}
        return {"type": self.texts[self.kind], "text": self.text, **more}

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}

    def json(self, status: str) -> dict[str, Any]:
        more = {"summary": []} if self.kind == "reasoning" else {"role": "assistant"}
        content = [] if status == "in_progress" else [self.part]
        return {"type": self.kind, "id": self.id, "status": status, **more, "content": content}


class ResponsesReply:
    """A response of the Responses API: an item of reasoning, if there is any, and a message."""

    def __init__(self, wanted: SearchWanted, about: dict[str, Any]) -> None:
        self._wanted = wanted
        self._about = about
        self._items: list[_Item] = []
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._events = 0

    def opening(self) -> Events:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def thought(self, text: str) -> Events:
        if not self._items:
            yield from self._open("reasoning")
        yield from self._add(text)

    def ending(self, result: Result) -> Events:
        if self._items:
            yield from self._close("completed")
        status = "incomplete" if result.cut else "completed"
        yield from self._open("message")
        yield from self._add(result.text)
        yield from self._close(status)
        yield self._event(f"response.{status}", response=self._response(status, result))

    def failed(self, error: ServingError) -> dict[str, Any]:
        body = error.body()["error"]
        return self._event("error", error=body, **{name: body[name] for name in ("code", "message", "param")})

    def whole(self, result: Result) -> dict[str, Any]:
        *_, last = self.ending(result)
        return dict(last["response"])  # type: ignore[index]

    def _open(self, kind: str) -> Events:
        item = _Item(kind, len(self._items))
        self._items.append(item)
        yield self._event("response.output_item.added", output_index=item.index, item=item.json("in_progress"))
        yield self._event("response.content_part.added", **item.place, part=item.part)

    def _add(self, text: str) -> Events:
        item = self._items[-1]
        item.text += text
        yield self._of_text("delta", delta=text)

    def _close(self, status: str) -> Events:
        item = self._items[-1]
        yield self._of_text("done", text=item.text)
        yield self._event("response.content_part.done", **item.place, part=item.part)
        yield self._event("response.output_item.done", output_index=item.index, item=item.json(status))

    def _of_text(self, kind: str, **fields: Any) -> dict[str, Any]:
        item = self._items[-1]
        more = {} if item.kind == "reasoning" else {"logprobs": []}
        return self._event(f"response.{item.texts[item.kind]}.{kind}", **item.place, **fields, **more)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **fields}

    def _response(self, status: str, result: Result | None = None) -> dict[str, Any]:
        wanted = self._wanted
        response: dict[str, Any] = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": wanted.model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": getattr(wanted, "instructions", "") or None,
            "max_output_tokens": wanted.max_completion_tokens,
            "metadata": {},
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": {"effort": wanted.effort, "summary": None},
            "store": False,
            "temperature": wanted.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": wanted.top_p,
            "truncation": "disabled",
            "usage": None,
            "tot": self._about,
        }
        if result is None:
            return response
        usage = result.usage
        final = {
            "output": [item.json("completed") for item in self._items[:-1]] + [self._items[-1].json(status)],
            "incomplete_details": {"reason": "max_output_tokens"} if result.cut else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            },
            "tot": self._about | result.about,
        }
        return response | final
