"""Serve searches: each request is one search with its own tree, budget and seed, on the decoder that all share."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tot.config import SearchConfig
from tot.decoders.budget import Budget
from tot.decoders.errors import TaskError, unknown
from tot.decoders.remote.abilities import EFFECTS
from tot.decoders.serving.errors import ServingError
from tot.decoders.serving.gate import Gate, closing
from tot.decoders.serving.guard import client_of
from tot.decoders.serving.options import Limits
from tot.decoders.serving.prometheus import PrometheusMetrics
from tot.decoders.serving.streaming import EventStream, SendEvent, while_connected
from tot.decoders.serving.wire import check_tokens
from tot.running import in_own_thread
from tot.search.base import SearchState
from tot.serving.live import Runs
from tot.serving.replies import ChatReply, Events, ResponsesReply, Result
from tot.serving.searches import ServedSearch
from tot.serving.wire import ResponsesWanted, SearchWanted
from tot.solver import Solution, asolve
from tot.task.checked import CheckedTask
from tot.task.task import Task
from tot.tree.tree import Node


@dataclass(frozen=True, slots=True)
class _Work:
    """The search of one request."""

    wanted: SearchWanted
    task: Task
    config: SearchConfig
    reply: ChatReply
    client: str


class Searches:
    """Serves searches as `name:search`, and a single sample as `name` where no decoder does."""

    def __init__(
        self,
        name: str,
        searches: Mapping[str, ServedSearch],
        limits: Limits,
        runs: Runs | None = None,
        seeded: bool = True,
    ) -> None:
        """`runs` gets the searches, for the live page. `seeded`: whether seeds make samples repeatable."""
        self.gate = Gate(limits.max_searches, limits)
        self.models = {f"{name}:{search}".removesuffix(":"): one for search, one in searches.items()}
        self._name = name
        self._limits = limits
        self._runs = runs
        self._seeded = seeded
        self._running: set[asyncio.Future[Solution]] = set()

    async def reply(self, request: Request, body: bytes, metrics: PrometheusMetrics) -> Response:
        """Answer a chat, or a request of the Responses API."""
        work = self._work(request, body)
        if work.wanted.stream:
            write = partial(self._stream, work, metrics)
            return EventStream(write, self._limits, metrics, work.reply.failed)
        solving = self._solve(work, metrics, list)
        return JSONResponse(work.reply.whole(await while_connected(request.receive, solving)))

    def cancel_all(self) -> None:
        """Cancel all running searches. Their clients get an error."""
        for search in [*self._running]:
            search.cancel()

    def _work(self, request: Request, body: bytes) -> _Work:
        """Read a request. Raises ServingError, TotError or pydantic's ValidationError if it is invalid."""
        responses = request.url.path == "/v1/responses"
        wanted = (ResponsesWanted if responses else SearchWanted).model_validate_json(body)
        if (search := self.models.get(wanted.model)) is None:
            raise ServingError(404, unknown("search", wanted.model, self.models), "model", "model_not_found")
        check_tokens(wanted, self._limits, "max_tokens")
        task = search[0].after(wanted.history)
        try:
            CheckedTask(task).start(wanted.question)
        except TaskError as error:
            raise ServingError(400, str(error), "input" if responses else "messages") from None
        seed = secrets.randbits(53) if wanted.seed is None else wanted.seed
        most = (wanted.max_tokens, wanted.max_completion_tokens, search[1].max_tokens, self._limits.max_tokens)
        limits = {"max_tokens": min(tokens for tokens in most if tokens is not None)}
        config = SearchConfig.of(search[1], wanted.options | {"seed": seed} | limits)
        config.parts(task)  # raises OptionError, for example if `until` is given and the search has no vote
        about: dict[str, Any] = {"seed": seed if self._seeded else None}
        if not self._seeded and wanted.seed is not None:
            about["warning"] = f"the server behind {self._name} ignores seed: {EFFECTS['seed'][2]}"
        reply = (ResponsesReply if responses else ChatReply)(wanted, about)
        return _Work(wanted, task, config, reply, client_of(request))

    async def _stream(self, work: _Work, metrics: PrometheusMetrics, send: SendEvent) -> None:
        queue: asyncio.Queue[Events | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(events: Events) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, events)

        solving = asyncio.ensure_future(self._solve(work, metrics, put))
        solving.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (events := await queue.get()) is not None:
                for event in events:
                    await send(event)
        finally:
            if not solving.done():
                solving.cancel()
                with suppress(asyncio.CancelledError):
                    await solving
        for event in work.reply.ending(await solving):
            await send(event)

    async def _solve(self, work: _Work, metrics: PrometheusMetrics, emit: Callable[[Events], object]) -> Result:
        """Search once the gate admits it. `emit` gets the events up to the end of the search, from any thread."""
        wanted, outcome = work.wanted, "failed"
        with metrics.timed() as on_text:

            def show(search: SearchState, nodes: list[Node]) -> None:
                if wanted.stream:
                    on_text()
                for node in nodes:
                    emit(work.reply.thought(_as_text(search, node)))

            async with self.gate.passed(work.client) as seconds:
                emit(work.reply.opening())
                budget = wanted.budget(work.config.budget, Budget(seconds=max(0.0, seconds)))
                config = work.config.model_copy(update={"budget": budget})
                hooks = {"on_expand": show} if wanted.model != self._name else None
                solving = asyncio.ensure_future(self._solved(work, config, hooks))
                self._running.add(solving)
                try:
                    solution = await solving
                    outcome = "unanswered" if solution.answer is None else "answered"
                except asyncio.CancelledError:
                    outcome = "cancelled"
                    if (task := asyncio.current_task()) is None or not task.cancelling():  # by `cancel_all`
                        raise closing() from None
                    raise
                finally:
                    self._running.discard(solving)
                    metrics.searched(wanted.model, outcome)
        metrics.spent([solution.usage], len(solution.tree) - 1)
        return Result(work.task, solution)

    async def _solved(self, work: _Work, config: SearchConfig, hooks: Any) -> Solution:
        """Search in a thread: tokenizing, grading and voting must not delay the replies to other clients."""
        wanted = work.wanted
        search = partial(asolve, work.task, wanted.question, config, hooks=hooks)
        if self._runs is None:
            return await in_own_thread(search())
        with self._runs.run(wanted.model, wanted.question) as run:
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
