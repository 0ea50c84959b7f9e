"""Replies of searches: chat completions and Responses, whole and as events. Thoughts are reasoning."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tot.decoders.request import before_stop
from tot.decoders.serving.errors import ServingError
from tot.decoders.serving.replies import usage_of
from tot.search.session import shown_answer
from tot.serving.wire import SearchWanted
from tot.solver import Solution
from tot.task.task import Task
from tot.task.world import HasElection

Events = Iterator[dict[str, Any] | str]


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a search."""

    task: Task
    solution: Solution

    @property
    def cut(self) -> bool:
        """Whether a limit ended the search before its answer, or the text that is the answer."""
        solution = self.solution
        if solution.answer is None:
            return (solution.stopped or "").startswith(("budget", "the text was truncated"))
        *_, last = (node for node in solution.tree if node.chosen)
        text = solution.tree.state(last).message.strip()
        return last.thought is not None and last.thought.truncated and text == shown_answer(solution.answer).strip()

    @property
    def text(self) -> str:
        """The answer, or the longest text if a limit on tokens truncated all of them."""
        if self.solution.answer is not None:
            return shown_answer(self.solution.answer)
        if not self.cut or (self.solution.stopped or "").startswith("budget"):
            return ""
        calls = (call for calls in self.solution.tree.calls.values() for call in calls if call.purpose != "evaluate")
        return max((call.output.strip() for call in calls), key=len, default="")

    @property
    def usage(self) -> dict[str, Any]:
        """The usage of the whole search. All new tokens are reasoning: the answer is one of the thoughts."""
        usage = usage_of(self.solution.usage)
        return {**usage, "completion_tokens_details": {"reasoning_tokens": usage["completion_tokens"]}}

    @property
    def about(self) -> dict[str, Any]:
        """The facts about the search in the reply, in addition to OpenAI's fields."""
        solution = self.solution
        about = {name: getattr(solution, name) for name in ("certainty", "solved", "votes", "value", "stopped")}
        counts = {"thoughts": len(solution.tree) - 1, "seconds": round(solution.usage.seconds, 3)}
        return {**about, "chosen": self._chosen(), **counts}

    def _chosen(self) -> str | None:
        """Return how the answer was chosen; None without an answer."""
        solution = self.solution
        if solution.answer is None or solution.solved:
            return solution.verdict if solution.solved else None
        if solution.votes is None:
            return "value" if len(solution.tree.leaves()) > 1 else "only sample"
        return "similarity" if solution.votes[0] == 1 and isinstance(self.task, HasElection) else "votes"


class ChatReply:
    """A chat completion. `thought` and `ending` return the events of a stream."""

    def __init__(self, wanted: SearchWanted, about: dict[str, Any]) -> None:
        """`about` is a part of the additional field `tot`."""
        self._wanted = wanted
        self._about = about
        self._thoughts: list[str] = []
        self._id, self._created = uuid.uuid4().hex, int(time.time())

    def opening(self) -> Events:
        """Return the events before the first thought."""
        yield from ()

    def thought(self, text: str) -> Events:
        role = {} if self._thoughts else {"role": "assistant", "content": ""}
        self._thoughts.append(text)
        yield self._chunk([_choice(delta={**role, "reasoning_content": text})])

    def ending(self, result: Result) -> Events:
        role = {} if self._thoughts else {"role": "assistant"}
        yield self._chunk([_choice(delta={**role, "content": self._answer(result)})])
        ended = _choice("length" if result.cut else "stop", delta={})
        yield {**self._chunk([ended]), "tot": self._about | result.about}
        if self._wanted.stream_options is not None and self._wanted.stream_options.include_usage:
            yield {**self._chunk([]), "usage": result.usage}
        yield "[DONE]"

    def failed(self, error: ServingError) -> dict[str, Any]:
        """Return the last event of a stream that fails."""
        return error.body()

    def whole(self, result: Result) -> dict[str, Any]:
        message = {"role": "assistant", "content": self._answer(result), "refusal": None}
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        choice = _choice("length" if result.cut else "stop", message=message)
        about = {"object": "chat.completion", "usage": result.usage, "tot": self._about | result.about}
        return {**self._chunk([choice]), **about}

    def _answer(self, result: Result) -> str:
        """Return the answer or the text so far, up to the first stop string.

        It is empty if `max_completion_tokens` cut it and other samples: accepted drafts decide which one got how far.
        """
        most = self._wanted.max_completion_tokens
        text = "" if result.cut and most is not None and result.solution.usage.new_tokens > most else result.text
        return before_stop(text, self._wanted.stop)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": f"chatcmpl-{self._id}", "object": "chat.completion.chunk", "created": self._created}
        return {**head, "model": self._wanted.model, "choices": choices, "tot": self._about}


def _choice(finish_reason: str | None = None, **content: Any) -> dict[str, Any]:
    return {"index": 0, **content, "finish_reason": finish_reason, "logprobs": None}


class _Part(NamedTuple):
    """The names of a part of an item: the item's field, its type, and its events."""

    field: str
    type: str
    part_event: str
    text_event: str


_MESSAGE = _Part("content", "output_text", "content_part", "output_text")
_REASONING = _Part("content", "reasoning_text", "content_part", "reasoning_text")
_SUMMARY = _Part("summary", "summary_text", "reasoning_summary_part", "reasoning_summary_text")


class ResponsesReply(ChatReply):
    """A response of the Responses API. Its output is an item of reasoning, if there are thoughts, and a message.

    Thoughts are the summary of the reasoning if the client asked for one, otherwise its text.
    """

    def __init__(self, wanted: SearchWanted, about: dict[str, Any]) -> None:
        super().__init__(wanted, about)
        self._output: list[dict[str, Any]] = []
        self._number = 0

    def opening(self) -> Events:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress", self._about))

    def thought(self, text: str) -> Events:
        if not self._thoughts:
            yield from self._begin("reasoning", _SUMMARY if self._wanted.summary else _REASONING, summary=[])
        self._thoughts.append(text)
        yield self._text("delta", delta=text)

    def ending(self, result: Result) -> Events:
        stopped, answer = result.solution.stopped or "", result.solution.answer
        cut = result.cut and (answer is None or stopped.startswith("budget"))  # not by `max_tokens` of a text
        status, text = "incomplete" if cut else "completed", self._answer(result)
        if self._thoughts:
            yield from self._end("completed", "".join(self._thoughts))
        yield from self._begin("message", _MESSAGE, role="assistant")
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
        yield self._event(f"response.{status}", response=self._response(status, self._about | result.about) | final)

    def failed(self, error: ServingError) -> dict[str, Any]:
        body = error.body()["error"]
        return self._event("error", error=body, **{name: body[name] for name in ("code", "message", "param")})

    def whole(self, result: Result) -> dict[str, Any]:
        *_, last = self.ending(result)
        return last["response"] if isinstance(last, dict) else {}

    def _begin(self, kind: str, part: _Part, **fields: Any) -> Events:
        """Begin an item with one part of text."""
        self._names = part
        self._item = {"type": kind, "id": f"{self._id}-{kind}", "status": "in_progress", **fields, "content": []}
        more: dict[str, Any] = {"annotations": [], "logprobs": []} if part is _MESSAGE else {}
        self._part = {"type": part.type, "text": "", **more}
        yield self._event("response.output_item.added", output_index=len(self._output), item=self._item)
        yield self._event(f"response.{part.part_event}.added", **self._place, part=self._part)

    def _end(self, status: str, text: str) -> Events:
        part = {**self._part, "text": text}
        done = {name: value for name, value in part.items() if name in ("text", "logprobs")}
        yield self._text("done", **done)
        yield self._event(f"response.{self._names.part_event}.done", **self._place, part=part)
        item = {**self._item, "status": status, self._names.field: [part]}
        yield self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)

    @property
    def _place(self) -> dict[str, Any]:
        index = {f"{self._names.field}_index": 0}
        return {"item_id": self._item["id"], "output_index": len(self._output), **index}

    def _text(self, what: str, **fields: Any) -> dict[str, Any]:
        return self._event(f"response.{self._names.text_event}.{what}", **self._place, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _response(self, status: str, about: dict[str, Any]) -> dict[str, Any]:
        wanted = self._wanted
        head = {"id": f"resp_{self._id}", "object": "response", "created_at": self._created, "status": status}
        asked = {"model": wanted.model, "max_output_tokens": wanted.max_completion_tokens, "store": False}
        none: dict[str, Any] = {"error": None, "tools": [], "tool_choice": "none", "parallel_tool_calls": False}
        reasoning = {"effort": wanted.effort, "summary": wanted.summary}
        return {**head, **asked, **none, "reasoning": reasoning, "output": self._output, "tot": about}
