"""Engine: one model, one RadixCache, and the only step loop.

Each step schedules chunks of prompts and the chunks that the running policies propose. It computes all of them in one
packed forward, samples from the logits, and lets the policies commit. The engine knows no decoding method: a policy is
an object with `propose` and `commit`, one per running request.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from tot.decoders.budget import Meter
from tot.decoders.engine.grammar import Grammars
from tot.decoders.engine.output import LONGEST_CHARACTER, Output
from tot.decoders.engine.prefix_cache import PrefixCache
from tot.decoders.engine.runner import Runner
from tot.decoders.engine.sampling import Sampled
from tot.decoders.engine.scheduler import Scheduler, Step
from tot.decoders.engine.sequence import BatchDrafter, Call, Job
from tot.decoders.engine.text import TextCodec
from tot.decoders.errors import ContextError, ModelError, RequestError, TotError, describe
from tot.decoders.machine import use_threads
from tot.decoders.models.loaded import LoadedModel
from tot.decoders.request import FinishReason, Request
from tot.decoders.thinking import end_of
from tot.decoders.timeline import Span, Timeline

log = logging.getLogger(__name__)
_T = TypeVar("_T")

_IDLE_SECONDS = 1.0
"""How long the loop's thread stays alive after its last request."""
_BUDGET_CHECK_SECONDS = 0.05
"""Interval between budget checks while all requests wait for drafts."""
_SPARE = 64
"""Slots for the drafts of a request whose thinking may fill the cache."""
_ANSWER = 256
"""Most tokens of `max_tokens` that are reserved for the answer, if thinking counts towards it."""
_open: weakref.WeakSet[Engine] = weakref.WeakSet()
"""Engines to close at exit: a thread inside a forward would crash the process."""


class Limits(NamedTuple):
    """Maximum numbers of tokens of a sample."""

    text: int
    """The text without its thinking."""
    thinking: int
    total: int


class Engine:
    """Run requests on one local model.

    `kv_budget` is in tokens, or in bytes ("1.5GiB"). `chunk` is the number of prompt tokens that a step computes: by
    default few on a CPU, where large steps are no faster and delay other requests.
    `threads`, `prefix_cache` and `think_tags` are as in `EngineOptions`. With `owned`, closing the engine frees the
    model.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        kv_budget: int | str | None = None,
        chunk: int | None = None,
        owned: bool = False,
        threads: int | None = None,
        prefix_cache: bool = False,
        think_tags: tuple[str, str] | None = None,
    ) -> None:
        self._loaded: LoadedModel | None = loaded
        self._owned = owned
        self._threads = threads
        self.runner = Runner(loaded, kv_budget)
        self.cache = self.runner.cache
        self._prefixes = PrefixCache.open(self.runner, self.call) if prefix_cache else None
        self.codec = TextCodec(loaded.tokenizer, loaded.end_ids, int(loaded.config.vocab_size), think_tags)
        self.grammars = Grammars(self.codec, int(loaded.config.vocab_size))
        """Compiles constraints."""
        self.chunk = chunk or (128 if loaded.device == "cpu" else 512)
        self.forwards = 0
        self.timeline: Timeline | None = None
        """Set a timeline to record spans on it."""
        self.drafters: dict[Hashable, Any] = {}
        """The draft models of this model by name, which are closed with the engine."""
        self._inbox: list[Job] = []
        self._calls: list[tuple[Future[Any], Callable[[], Any]]] = []
        self._scheduler = Scheduler(self.cache, self.chunk)
        self._condition = threading.Condition()
        self._woken = False
        """Whether an event occurred that the loop may be waiting for."""
        self._closed = False
        self.failed: ModelError | None = None
        """The error that ended the loop."""
        self._thread: threading.Thread | None = None
        _open.add(self)

    # -- for callers --------------------------------------------------------------------------------------------

    def submit(self, calls: Sequence[Call], meter: Meter | None = None) -> None:
        """Queue requests that start in the same step. Raises RequestError, and queues none, if one can never run."""
        meter = meter or Meter()
        jobs = [self._job(call, meter) for call in calls]
        with self._queueing():
            self._inbox += jobs
        meter.count(new_tokens=sum(output.forced for job in jobs for output in job.outputs))

    def call(self, function: Callable[[], _T]) -> _T:
        """Run a function in the loop's thread between two steps, because only one thread may use the runner."""
        future: Future[_T] = Future()
        with self._queueing():
            self._calls.append((future, function))
        return future.result()

    @contextmanager
    def _queueing(self) -> Iterator[None]:
        """Hold the lock while the body queues work, with the loop's thread running; then wake the loop."""
        with self._condition:
            if self._closed:
                raise RequestError("this engine is closed: make a new one")
            if self.failed is not None:
                raise self.failed
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tot-engine", daemon=True)
                self._thread.start()
            yield
            self.wake()

    def close(self) -> None:
        """Stop the loop, cancel the requests in flight, and restore the model's own attention."""
        with self._condition:
            if self._closed:
                return
            self._closed = True
            self.wake()
            thread = self._thread
        if thread is not None:
            thread.join()
        for drafter in self.drafters.values():
            drafter.close()
        if self._prefixes is not None:
            self._prefixes.close()
        self.runner.close()
        if self._owned:
            self._loaded = None
            del self.runner.loaded
        _open.discard(self)

    def reset(self) -> None:
        """Clear the cache and the counters. No request may be running."""
        self.call(self.cache.clear)
        self.forwards, self.timeline = 0, None

    @property
    def loaded(self) -> LoadedModel:
        """The model. Raises RequestError if closing the engine freed it."""
        if self._loaded is None:
            raise RequestError("this engine is closed and its model is freed: make a new one")
        return self._loaded

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _job(self, call: Call, meter: Meter) -> Job:
        request, policy, handle = call
        options = self.codec.options_of(request)
        prompt = self.codec.encode_prompt(request.prompt, options)
        limits = self.limits(request, prompt)
        sampling = request.sampling
        awaits = self.codec.awaits(request.prompt, options)
        if awaits and request.choices:  # a choice is an answer
            prompt += self.codec.encode_control(end_of(awaits, "\n"))
        matcher = None if request.constraint is None else self.grammars.matcher(request.constraint)
        own = limits.text, awaits, limits.thinking, limits.total
        outputs = [Output(self.codec, sampling, i, *own, matcher=matcher and matcher.fork()) for i in range(sampling.n)]
        for output in outputs:
            output.force()
        job = Job(request, prompt, outputs, self.cache, self.codec, meter, handle)
        job.policy = policy(job)
        self.check_slots(request, len(prompt), job.policy.need(sys.maxsize) - 1)
        return job

    def limits(self, request: Request, prompt: Sequence[int]) -> Limits:
        """Return how many tokens a text and its thinking may have in the model's context. Raises RequestError."""
        context, capacity, sampling = self.runner.context, self.cache.capacity, request.sampling
        if not prompt:
            raise RequestError("the prompt has no tokens: give some text")
        after = self.codec.after_rationale(request)
        room = context - len(prompt) - after
        if room < 1:
            raise ContextError(
                f"the prompt has {len(prompt)} tokens, the model's context holds {context}, "
                f"and this request needs at least {context + 1 - room}: shorten the prompt"
            )
        limit = min(sampling.max_tokens, room)
        if sampling.keep_stop:  # a piece may need several tokens for its first character
            limit = min(max(limit, LONGEST_CHARACTER), room)
            left = max(1, sampling.thinking.tokens - sampling.drawn)
            return Limits(limit, min(limit, left) if self.codec.thinks else 0, limit)
        if self.codec.thinks and sampling.thinking.counted:
            return Limits(limit, max(1, min(sampling.thinking.tokens, limit - min(_ANSWER, limit // 2))), limit)
        if self.codec.thinks:
            space = min(room, capacity // sampling.n - len(prompt) - after) - _SPARE - limit
            thinking = max(1, min(sampling.thinking.tokens, space))
            return Limits(limit, thinking, limit + thinking)
        return Limits(limit, 0, limit)

    def check_slots(self, request: Request, prompt: int, growth: int) -> None:
        """Raise RequestError if a request with this number of prompt tokens, and of further ones, can never run."""
        needed, capacity = prompt + growth, self.cache.capacity
        if needed > capacity:
            raise RequestError(
                f"this request may need {needed} tokens of keys and values ({prompt} for the prompt, the rest for "
                f"n={request.sampling.n} samples) and the budget holds {capacity}: raise kv_budget, or lower n, "
                "max_tokens or the prompt's length"
            )

    def wake(self) -> None:
        """Wake the loop if it waits: a request was cancelled, or a draft is ready."""
        with self._condition:
            self._woken = True
            self._condition.notify()

    # -- the loop -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        use_threads(self._threads)
        try:
            self._loop()
        except BaseException as error:  # for example in a policy's need() or release(): no caller may wait for ever
            log.exception("the engine has failed")
            with self._condition:
                self.failed = ModelError(f"the engine has failed ({describe(error)}): make a new one")
                for job in [*self._scheduler.running, *self._scheduler.waiting, *self._inbox]:
                    job.handle.finish(self.failed)
                for future, _ in self._calls:
                    future.set_exception(self.failed)

    def _loop(self) -> None:
        while self._receive():
            for job in self._scheduler.admit():
                if self._prefixes is not None:
                    self._prefixes.load(job.branch)
            progressed = False
            if self._scheduler.running:
                progressed = self._step()
            with self._condition:
                if not (progressed or self._woken):
                    self._condition.wait(_BUDGET_CHECK_SECONDS)

    def _receive(self) -> bool:
        """Take new requests, calls and cancellations; wait if the engine is idle. Return False to end the loop."""
        scheduler = self._scheduler
        with self._condition:
            while not (self._inbox or self._calls or self._closed or scheduler.waiting or scheduler.running):
                if not self._condition.wait(_IDLE_SECONDS) and not (self._inbox or self._calls or self._closed):
                    self._thread = None  # the next request starts another; an unreferenced engine is collected
                    return False
            self._woken = False
            scheduler.waiting += self._inbox
            self._inbox = []
            calls, self._calls = self._calls, []
            closed = self._closed
        for future, function in calls:
            try:
                future.set_result(function())
            except BaseException as error:  # the caller handles it  # noqa: BLE001
                future.set_exception(error)
        for job in [*scheduler.running, *scheduler.waiting]:
            if closed or job.handle.cancelled:
                self._finish(job, "cancelled")
            elif job.meter.overspent():
                self._finish(job, "budget")
            elif not job.running:  # all texts were forced
                self._finish(job, None)
        return not closed

    def _step(self) -> bool:
        """Schedule, draft, run, sample, commit. Return False if all requests wait for drafts, so nothing ran."""
        step = self._scheduler.schedule()
        self._draft(step)
        self._scheduler.propose(step)
        if step.chunks:
            began = time.perf_counter()
            try:
                forward = self.runner.forward(step.chunks)
                computed = time.perf_counter()
                reads = forward.sample(step.chunks)
            except Exception as error:  # for example out of memory: only the requests of this step fail
                log.exception("a forward pass failed")
                step.failed.update(dict.fromkeys(step.jobs, error))
            else:
                ended = time.perf_counter()
                self.runner.observe(forward, ended - began)
                if self.timeline is not None:
                    spans = Span("target", "verify", began, computed), Span("target", "sampling", computed, ended)
                    self.timeline.spans += spans
                self.forwards += 1
                for chunk, own, job in zip(step.chunks, forward.own_from, step.jobs, strict=True):
                    job.computed += max(0, min(chunk.stop, len(job.prompt)) - own)
                for meter in {id(job.meter): job.meter for job in step.jobs}.values():
                    meter.count(forwards=1)
                self._commit(step, reads)
        for job, reason in step.failed.items():
            self._fail(job, reason)
        return bool(step.chunks or step.failed)

    def _draft(self, step: Step) -> None:
        """Run each batch drafter once for all of its requests."""
        jobs_by_drafter: dict[BatchDrafter, list[Job]] = {}
        for job in step.ready:
            if job.policy.batch_drafter is not None:
                jobs_by_drafter.setdefault(job.policy.batch_drafter, []).append(job)
        for drafter, jobs in jobs_by_drafter.items():
            try:
                drafter.draft_all([sequence for job in jobs for sequence in job.policy.decoding()])
            except Exception as error:
                log.exception("%s has failed", type(drafter).__name__)
                step.failed.update(dict.fromkeys(jobs, error))

    def _commit(self, step: Step, reads: list[list[Sampled]]) -> None:
        """Pass the samples of their chunks to the policies, and emit new text."""
        for job, chunks in step.proposed.items():
            before = sum(len(output.tokens) for output in job.outputs)
            try:
                if any(one.logprob != one.logprob for row in reads[chunks] for one in row):
                    raise _NotFiniteError(
                        "the model's logits are not finite (NaN or infinity): its weights may be damaged, or the dtype "
                        "too narrow; try dtype=fp32"
                    )
                job.policy.commit(reads[chunks])
                job.handle.emit(job.outputs)
            except Exception as error:  # noqa: BLE001
                step.failed[job] = error
                continue
            new = sum(len(output.tokens) for output in job.outputs) - before
            job.meter.count(new_tokens=new)
            if self._prefixes is not None and not job.kept:
                self._prefixes.save(job.branch, job.computed)
            job.kept = True
            if not job.running:
                self._finish(job, None)

    def _finish(self, job: Job, reason: FinishReason | None) -> None:
        """Finish a job; `reason` ends the outputs that are still running."""
        try:
            for output in job.running:
                output.end(reason or "cancelled")
            job.handle.emit(job.outputs)
            completions = job.completions()
        except Exception as error:  # noqa: BLE001
            self._fail(job, error)
            return
        self._scheduler.remove(job)
        job.handle.finish(completions)

    def _fail(self, job: Job, error: BaseException) -> None:
        self._scheduler.remove(job)
        if isinstance(error, _NotFiniteError):  # later requests must not reuse these keys and values
            self.cache.clear()
        if not isinstance(error, TotError):
            error = ModelError(f"decoding failed: {describe(error)}")
        job.handle.finish(error)


class _NotFiniteError(ModelError):
    """The logits are not finite, so cached keys and values may be damaged."""


@atexit.register
def _close_all() -> None:
    for engine in list(_open):
        engine.close()
