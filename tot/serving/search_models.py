"""Searches as models: each request is one search with its own tree, budget and seed, on the decoder that all share.

`reasoning_effort` limits the whole search, `max_completion_tokens` its new tokens, `max_tokens` each text without its
thinking, and `thinking` and `thinking_budget` the thinking of each text. All limits that are given hold: these, the
search's own, and the server's.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from tot.api import run_search
from tot.config import SearchConfig
from tot.decoders.budget import Budget
from tot.decoders.errors import TaskError
from tot.decoders.request import before_stop
from tot.decoders.serving.completions import check_tokens, thinking_of
from tot.decoders.serving.errors import invalid, unsupported
from tot.decoders.serving.gate import Gate
from tot.decoders.serving.limits import Limits
from tot.decoders.serving.messages_body import MessagesBody
from tot.decoders.serving.metrics import ServerMetrics
from tot.decoders.serving.protocol import ChatBody, DecodingFields, TextBody
from tot.decoders.serving.responses_body import ResponsesBody
from tot.decoders.serving.service import AnyBody, Choice, Emit, Piece, Result
from tot.llm.decoders import FILTERS
from tot.running import in_own_thread
from tot.search.base import SearchState
from tot.serving.live import LiveSearches
from tot.serving.searches import ServedSearch
from tot.solution import Solution
from tot.task.checked import CheckedTask
from tot.task.task import Task, answer_text
from tot.task.world import HasElection
from tot.tree.tree import Node

_EFFORTS: Mapping[str | None, Budget] = {
    "none": Budget(tokens=1_000, seconds=10),
    "minimal": Budget(tokens=1_000, seconds=10),
    "low": Budget(tokens=4_000, seconds=30),
    "medium": Budget(tokens=16_000, seconds=120),
    "high": Budget(tokens=64_000, seconds=480),
    "xhigh": Budget(tokens=256_000),
}


class SearchModels:
    """Serves searches as `name:search`, and a single sample as `name` where no decoder does."""

    failed = None

    def __init__(
        self, name: str, searches: Mapping[str, ServedSearch], limits: Limits, runs: LiveSearches | None = None
    ) -> None:
        """`runs` gets the searches, for the live page."""
        self.gate = Gate(limits.max_searches, limits)
        self.name = name
        self.runs = runs
        self._searches = {f"{name}:{search}".removesuffix(":"): one for search, one in searches.items()}
        self.models: Mapping[str, Mapping[str, Any]] = {model: {} for model in (name, *self._searches)}
        self._limits = limits

    def watch(self, metrics: ServerMetrics) -> None:
        metrics.watch_gate("searches", self.gate)
        self.ended = metrics.counter("tot_searches", "Searches that have ended.", ("model", "outcome"))

    def work(self, body: AnyBody) -> ServedRequest:
        """Prepare a request. Raises ServingError or TotError if it is invalid."""
        if isinstance(body, TextBody):
            raise invalid(f"{body.model} is a search: use /v1/chat/completions or /v1/responses", "model")
        for field, about in DecodingFields.model_fields.items():
            if getattr(body, field, about.default) != about.default:
                raise unsupported(field)
        if body.alternatives is not None:
            raise unsupported("logprobs")
        if body.tools:
            raise unsupported("tools")
        if body.form is not None:
            raise unsupported(body.form_field)
        check_tokens(body, self._limits, "max_tokens")
        *history, last = (message.model_copy(update={"reasoning_content": ""}) for message in body.history)
        if last.role != "user":
            message = f"the last message has the role {last.role}, and a search answers a user: end with the user's"
            raise invalid(message, "messages")
        served_task, served_config = self._searches[body.model]
        task = served_task.with_prompts(history=history)
        try:
            CheckedTask(task).start(last.content)
        except TaskError as error:
            raise invalid(str(error), "messages") from None
        most = (body.max_tokens, body.most_tokens, served_config.max_tokens, self._limits.max_tokens_limit)
        options = body.model_dump(include={"temperature", *FILTERS} & body.model_fields_set)
        options["max_tokens"] = min(tokens for tokens in most if tokens is not None)
        options["seed"] = secrets.randbits(53) if body.seed is None else body.seed
        if body.x_tot.until is not None:
            options["until"] = body.x_tot.until
        if body.model_fields_set & {"thinking", "thinking_budget"}:
            options["thinking"] = thinking_of(body, self._limits, counted=False)
        if body.chat_template_kwargs:
            options["template_options"] = body.chat_template_kwargs
        config = SearchConfig.of(served_config, options)
        config.parts(task)  # raises OptionError, for example if `until` is given and the search has no vote
        return ServedRequest(self, body, task, last.content, config, {"seed": options["seed"]})


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """The search of one request."""

    source: SearchModels
    body: ChatBody | ResponsesBody | MessagesBody
    task: Task
    question: str
    config: SearchConfig
    about: Mapping[str, Any]

    def count(self) -> int:
        raise invalid(f"{self.body.model} is a search, whose prompts depend on its task: name a decoder", "model")

    async def run(self, emit: Emit, seconds: float) -> Result:
        """Search. Thoughts are thinking, and the answer is one piece."""
        source, model, outcome, thoughts = self.source, self.body.model, "failed", list[str]()

        def show(search: SearchState, nodes: list[Node]) -> None:
            for node in nodes:
                thoughts.append(_as_text(search, node))
                emit(Piece(0, thoughts[-1], thinking=True))

        try:
            solution = await self._solved(seconds, None if model == source.name else {"on_expand": show})
            outcome = "unanswered" if solution.answer is None else "answered"
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            source.ended.labels(model, outcome).inc()
        reasoning_tokens = solution.usage.new_tokens  # the answer is one of the thoughts
        if model == source.name:
            calls = (call for calls in solution.tree.calls.values() for call in calls)
            thinking = [part for call in calls for part in call.parts if part.kind == "thinking"]
            thoughts, reasoning_tokens = [part.text for part in thinking], sum(part.tokens for part in thinking)
            for text in thoughts:
                emit(Piece(0, text, thinking=True))
        choice = self._choice(solution, "".join(thoughts))
        emit(Piece(0, choice.text))
        emit(choice)
        return Result([choice], solution.usage, reasoning_tokens)

    async def _solved(self, seconds: float, hooks: Any) -> Solution:
        """Search in a thread: tokenizing, grading and voting must not delay the replies to other clients."""
        body = self.body
        own = Budget(tokens=body.most_tokens, seconds=body.x_tot.seconds)
        given = (own, Budget(seconds=seconds), _EFFORTS.get(body.effort), self.config.budget)
        limits = {name: [getattr(one, name) for one in given if one is not None] for name in Budget.model_fields}
        least = {name: min((one for one in all_ if one is not None), default=None) for name, all_ in limits.items()}
        config = self.config.model_copy(update={"budget": Budget(**least)})
        search = partial(run_search, self.task, self.question, config, hooks=hooks)
        if self.source.runs is None:
            return await in_own_thread(search())
        with self.source.runs.run(body.model, self.question) as run:
            run.solution = await in_own_thread(search(watch=run.watch))
            return run.solution

    def _choice(self, solution: Solution, thoughts: str) -> Choice:
        """Return the answer or the text so far, up to the first stop string.

        It is empty if the limit on all new tokens cut it and other samples: accepted drafts decide which one got how
        far.
        """
        cut, most, stopped = _truncated(solution), self.body.most_tokens, solution.stopped or ""
        if cut and most is not None and solution.usage.new_tokens > most:
            text = ""
        elif solution.answer is None and cut and not stopped.startswith("budget"):
            calls = (call for calls in solution.tree.calls.values() for call in calls if call.purpose != "evaluate")
            text = max((call.output.strip() for call in calls), key=len, default="")
        else:
            text = "" if solution.answer is None else answer_text(solution.answer)
        about = {name: getattr(solution, name) for name in ("certainty", "solved", "votes", "value", "stopped")}
        about |= {"thoughts": len(solution.tree) - 1, "seconds": round(solution.usage.seconds, 3)}
        about["chosen"] = _chosen(solution, self.task)
        incomplete = cut and (solution.answer is None or stopped.startswith("budget"))  # not by `max_tokens` of a text
        return Choice(0, before_stop(text, self.body.stop), thoughts, cut, incomplete, about=about)


def _truncated(solution: Solution) -> bool:
    """Return whether a limit ended the search before its answer, or the text that is the answer."""
    if solution.answer is None:
        return (solution.stopped or "").startswith(("budget", "the text was truncated"))
    *_, last = (node for node in solution.tree if node.chosen)
    text = solution.tree.state(last).message.strip()
    return last.thought is not None and last.thought.truncated and text == answer_text(solution.answer).strip()


def _chosen(solution: Solution, task: Task) -> str | None:
    """Return how the answer was chosen; None without an answer."""
    if solution.answer is None or solution.solved:
        return solution.verdict if solution.solved else None
    if solution.votes is None:
        return "value" if len(solution.tree.leaves()) > 1 else "only sample"
    return "similarity" if solution.votes[0] == 1 and isinstance(task, HasElection) else "votes"


def _as_text(search: SearchState, node: Node) -> str:
    """Return a thought with its place in the tree, such as "[1.2]": the second thought after the first."""
    place = ".".join(str(step.index + 1) for step in search.tree.path(node)[1:])
    thought = node.thought
    text = "" if thought is None else thought.text.strip()
    if thought is not None and thought.observation is not None and thought.observation.text.strip() not in text:
        text += f"\n→ {thought.observation.text.strip()}"
    return f"[{place}] {text}\n\n"
