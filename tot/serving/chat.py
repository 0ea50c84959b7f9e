"""Chat completions by searches: the request, how it limits the search, and the reply. Thoughts are reasoning.

`reasoning_effort` limits the whole search, `max_completion_tokens` its new tokens, and `max_tokens` each text. All
limits that are given hold: these, the search's own, and the server's.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from tot.decoders.budget import Budget
from tot.decoders.request import Message, before_stop
from tot.decoders.serving.errors import ServingError
from tot.decoders.serving.protocol import Body, ChatMessage, Effort, GenerationBody
from tot.decoders.serving.replies import usage_of
from tot.llm.decoders import FILTERS
from tot.solution import Solution
from tot.task.task import Task, answer_text
from tot.task.world import HasElection

EFFORTS: Mapping[str, Budget] = {
    "none": Budget(tokens=1_000, seconds=10),
    "minimal": Budget(tokens=1_000, seconds=10),
    "low": Budget(tokens=4_000, seconds=30),
    "medium": Budget(tokens=16_000, seconds=120),
    "high": Budget(tokens=64_000, seconds=480),
    "xhigh": Budget(tokens=256_000),
}
Events = Iterator[dict[str, Any] | str]


class SearchLimits(Body):
    """The field `x_tot`: limits of a search that OpenAI's API does not have."""

    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    until: Annotated[float, Field(gt=0, le=1)] | None = None
    """As `SearchConfig.until`: stop a vote when it is this sure."""


class SearchBody(GenerationBody):
    """`POST /v1/chat/completions` for a search. Sampling options that are missing are the search's own."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationBody.neutral,
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


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a search."""

    task: Task
    solution: Solution

    @property
    def truncated(self) -> bool:
        """Whether a limit ended the search before its answer, or the text that is the answer."""
        solution = self.solution
        if solution.answer is None:
            return (solution.stopped or "").startswith(("budget", "the text was truncated"))
        *_, last = (node for node in solution.tree if node.chosen)
        text = solution.tree.state(last).message.strip()
        return last.thought is not None and last.thought.truncated and text == answer_text(solution.answer).strip()

    @property
    def text(self) -> str:
        """The answer, or the longest text if a limit on tokens truncated all of them."""
        if self.solution.answer is not None:
            return answer_text(self.solution.answer)
        if not self.truncated or (self.solution.stopped or "").startswith("budget"):
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

    def __init__(self, body: SearchBody, about: dict[str, Any]) -> None:
        """`about` is a part of the additional field `tot`."""
        self._body = body
        self._about = about
        self._thoughts: list[str] = []
        self._id, self._created = uuid.uuid4().hex, int(time.time())

    def thought(self, text: str) -> Events:
        role = {} if self._thoughts else {"role": "assistant", "content": ""}
        self._thoughts.append(text)
        yield self._chunk([_choice(delta={**role, "reasoning_content": text})])

    def ending(self, result: Result) -> Events:
        role = {} if self._thoughts else {"role": "assistant"}
        yield self._chunk([_choice(delta={**role, "content": self._answer(result)})])
        ended = _choice("length" if result.truncated else "stop", delta={})
        yield {**self._chunk([ended]), "tot": self._about | result.about}
        if self._body.includes_usage:
            yield {**self._chunk([]), "usage": result.usage}
        yield "[DONE]"

    def failed(self, error: ServingError) -> dict[str, Any]:
        """Return the last event of a stream that fails."""
        return error.body()

    def whole(self, result: Result) -> dict[str, Any]:
        message = {"role": "assistant", "content": self._answer(result), "refusal": None}
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        choice = _choice("length" if result.truncated else "stop", message=message)
        about = {"object": "chat.completion", "usage": result.usage, "tot": self._about | result.about}
        return {**self._chunk([choice]), **about}

    def _answer(self, result: Result) -> str:
        """Return the answer or the text so far, up to the first stop string.

        It is empty if `max_completion_tokens` cut it and other samples: accepted drafts decide which one got how far.
        """
        most, spent = self._body.max_completion_tokens, result.solution.usage.new_tokens
        text = "" if result.truncated and most is not None and spent > most else result.text
        return before_stop(text, self._body.stop)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": f"chatcmpl-{self._id}", "object": "chat.completion.chunk", "created": self._created}
        return {**head, "model": self._body.model, "choices": choices, "tot": self._about}


def _choice(finish_reason: str | None = None, **content: Any) -> dict[str, Any]:
    return {"index": 0, **content, "finish_reason": finish_reason, "logprobs": None}
