"""Searches as models: each request is one search with its own tree, budget and seed, on the decoder that all share."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from tot.api import run_search
from tot.config import SearchConfig
from tot.decoders.budget import Budget
from tot.decoders.errors import TaskError
from tot.decoders.serving.errors import ServingError
from tot.decoders.serving.gate import Gate
from tot.decoders.serving.limits import Limits
from tot.decoders.serving.metrics import ServerMetrics
from tot.decoders.serving.protocol import check_tokens
from tot.decoders.serving.service import Emit
from tot.running import in_own_thread
from tot.search.base import SearchState
from tot.serving.chat import ChatReply, Events, Result, SearchBody
from tot.serving.live import LiveSearches
from tot.serving.responses import ResponsesBody, ResponsesReply
from tot.serving.searches import ServedSearch
from tot.solution import Solution
from tot.task.checked import CheckedTask
from tot.task.task import Task
from tot.tree.tree import Node

_PATHS: Mapping[str, tuple[type[SearchBody], type[ChatReply], str]] = {
    "/v1/chat/completions": (SearchBody, ChatReply, "messages"),
    "/v1/responses": (ResponsesBody, ResponsesReply, "input"),
}
"""For each route: the body, the reply, and the field with the question."""


class SearchModels:
    """Serves searches as `name:search`, and a single sample as `name` where no decoder does."""

    paths: Collection[str] = tuple(_PATHS)
    failed = None

    def __init__(
        self,
        name: str,
        searches: Mapping[str, ServedSearch],
        limits: Limits,
        runs: LiveSearches | None = None,
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

    def work(self, path: str, body: bytes, client: str) -> ServedRequest:
        """Read a request. Raises ServingError, TotError or pydantic's ValidationError if it is invalid."""
        kind, reply, field = _PATHS[path]
        read = kind.model_validate_json(body)
        check_tokens(read, self._limits, "max_tokens")
        served_task, served_config = self._searches[read.model]
        task = served_task.with_prompts(history=read.history)
        try:
            CheckedTask(task).start(read.question)
        except TaskError as error:
            raise ServingError(400, str(error), field) from None
        seed = secrets.randbits(53) if read.seed is None else read.seed
        most = (read.max_tokens, read.max_completion_tokens, served_config.max_tokens, self._limits.max_tokens)
        limits = {"max_tokens": min(tokens for tokens in most if tokens is not None)}
        config = SearchConfig.of(served_config, read.options | {"seed": seed} | limits)
        config.parts(task)  # raises OptionError, for example if `until` is given and the search has no vote
        return ServedRequest(self, read, task, config, reply(read, {"seed": seed}), client)


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """The search of one request."""

    source: SearchModels
    body: SearchBody
    task: Task
    config: SearchConfig
    reply: ChatReply
    client: str

    @property
    def stream(self) -> bool:
        return self.body.stream

    def failed(self, error: ServingError) -> dict[str, Any]:
        """Return the last event of a stream that fails."""
        return self.reply.failed(error)

    async def run(self, emit: Emit, metrics: ServerMetrics) -> None:
        """Search once the gate admits it."""
        model, outcome = self.body.model, "failed"

        def send(events: Events) -> None:
            for event in events:
                if self.stream:
                    emit(event)

        def show(search: SearchState, nodes: list[Node]) -> None:
            for node in nodes:
                send(self.reply.thought(_as_text(search, node)))

        async with self.source.gate.passed(self.client) as seconds:
            budget = self.body.budget(self.config.budget, Budget(seconds=seconds))
            config = self.config.model_copy(update={"budget": budget})
            try:
                solution = await self._solved(config, None if model == self.source.name else {"on_expand": show})
                outcome = "unanswered" if solution.answer is None else "answered"
            except asyncio.CancelledError:
                outcome = "cancelled"
                raise
            finally:
                metrics.searched(model, outcome)
        metrics.spent([solution.usage], len(solution.tree) - 1)
        result = Result(self.task, solution)
        if self.stream:
            send(self.reply.ending(result))
        else:
            emit(self.reply.whole(result))

    async def _solved(self, config: SearchConfig, hooks: Any) -> Solution:
        """Search in a thread: tokenizing, grading and voting must not delay the replies to other clients."""
        search = partial(run_search, self.task, self.body.question, config, hooks=hooks)
        if self.source.runs is None:
            return await in_own_thread(search())
        with self.source.runs.run(self.body.model, self.body.question) as run:
            run.solution = await in_own_thread(search(watch=run.watch))
            return run.solution


def _as_text(search: SearchState, node: Node) -> str:
    """Return a thought with its place in the tree, such as "[1.2]": the second thought after the first."""
    place = ".".join(str(step.index + 1) for step in search.tree.path(node)[1:])
    thought = node.thought
    text = "" if thought is None else thought.text.strip()
    if thought is not None and thought.observation is not None and thought.observation.text.strip() not in text:
        text += f"\n→ {thought.observation.text.strip()}"
    return f"[{place}] {text}\n\n"
