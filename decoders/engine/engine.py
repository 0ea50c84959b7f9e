"""Engine: one model, one RadixCache, and the only step loop.

Each step admits what fits, asks every running policy what to run, computes all of it in one packed forward (prompts in
chunks beside running branches), reads the logits, and lets the policies commit. It knows no decoding method: a policy
is an object with `propose` and `commit`, one for each running request.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from tot.decoders.budget import Meter
from tot.decoders.engine.job import Handle, Job, PolicyFactory
from tot.decoders.engine.output import Output
from tot.decoders.engine.recording import load_of
from tot.decoders.engine.runner import Chunk, Runner
from tot.decoders.engine.sampling import Sampled, read
from tot.decoders.engine.text import TextCodec
from tot.decoders.errors import ModelError, RequestError, TotError
from tot.decoders.kernels.forward import Quantization
from tot.decoders.last_open import LastOpen
from tot.decoders.metrics import Metrics
from tot.decoders.models.loading import LoadedModel
from tot.decoders.request import Purpose, Request
from tot.decoders.timeline import LANE, Load, Span, Timeline, recorded, span

log = logging.getLogger(__name__)
_T = TypeVar("_T")

_IDLE_SECONDS = 1.0
"""How long the loop's thread outlives its last request."""
_LOOK_SECONDS = 0.05
"""How often budgets are looked at while all requests wait for drafts."""
_open: weakref.WeakSet[Engine] = weakref.WeakSet()
"""Engines to be closed at exit: a thread in the middle of a forward would bring the process down."""


class Engine:
    """Runs requests on one local model. `kv_budget` is in tokens or bytes ("1.5GiB"); `chunk` rows of prompt a step;
    `quantize` as for `load_decoder`; with `owned` the model is the engine's alone, and ends with it: its weights may be
    held only as they are packed."""

    def __init__(
        self,
        loaded: LoadedModel,
        kv_budget: int | str | None = None,
        chunk: int = 512,
        quantize: Quantization | None = None,
        owned: bool = False,
    ) -> None:
        self._loaded: LoadedModel | None = loaded
        self._owned = owned
        self.runner = Runner(loaded.model, kv_budget, quantize, owned)
        self.cache = self.runner.cache
        rows = int(loaded.model.get_input_embeddings().num_embeddings)
        self.codec = TextCodec(loaded.tokenizer, getattr(loaded.model, "generation_config", None), rows)
        self.chunk = chunk
        self.forwards = 0
        self.accounts: defaultdict[Purpose, Metrics] = defaultdict(Metrics)
        """What requests cost so far, by purpose."""
        self.timeline: Timeline | None = None
        """Set it to have what is done when recorded."""
        self.drafters: LastOpen[Any] = LastOpen(lambda drafter: drafter.close(), lambda drafter: not self._closed)
        """The draft models beside this one, by name."""
        self._inbox: list[Job] = []
        self._calls: list[tuple[Future[Any], Callable[[], Any]]] = []
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._condition = threading.Condition()
        self._woken = False
        """Something happened that the loop may wait for."""
        self._closed = False
        self._broken: ModelError | None = None
        self._thread: threading.Thread | None = None
        _open.add(self)

    # -- for callers --------------------------------------------------------------------------------------------

    def submit(
        self, request: Request, policy: PolicyFactory, meter: Meter | None = None, stream: bool = False
    ) -> Handle:
        """Queue one request. Raises RequestError at once for what can never run."""
        return self.submit_all([request], [policy], meter, stream)[0]

    def submit_all(
        self,
        requests: Sequence[Request],
        policies: Sequence[PolicyFactory],
        meter: Meter | None = None,
        stream: bool = False,
    ) -> list[Handle]:
        """Queue requests that are to start in the same step. None is queued if one is refused."""
        jobs = [
            self._job(request, policy, meter or Meter(), stream)
            for request, policy in zip(requests, policies, strict=True)
        ]
        with self._at_work():
            self._inbox += jobs
        return [job.handle for job in jobs]

    def call(self, function: Callable[[], _T]) -> _T:
        """Run a function in the loop's thread, between two steps: what uses the runner may not run beside one."""
        future: Future[_T] = Future()
        with self._at_work():
            self._calls.append((future, function))
        return future.result()

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Holds the lock while the loop is given something to do, and sees to it that it runs."""
        with self._condition:
            if self._closed:
                raise RequestError("this engine is closed: make a new one")
            if self._broken is not None:
                raise self._broken
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tot-engine", daemon=True)
                self._thread.start()
            yield
            self._woken = True
            self._condition.notify()

    def close(self) -> None:
        """Stop the loop; requests in flight end as cancelled. The model gets its own attention back."""
        with self._condition:
            if self._closed:
                return
            self._closed = self._woken = True
            self._condition.notify()
            thread = self._thread
        if thread is not None:
            thread.join()
        self.drafters.close_idle()
        self.runner.close()
        if self._owned:
            self._loaded = self.runner.model = None
        _open.discard(self)

    def reset(self) -> None:
        """As after it was made: nothing cached, nothing counted. For when no request is under way."""

        def forget() -> None:
            self.cache.clear()
            self.accounts.clear()
            self.forwards, self.timeline = 0, None

        self.call(forget)

    @property
    def loaded(self) -> LoadedModel:
        """The model. Raises RequestError where it went with the engine."""
        if self._loaded is None:
            raise RequestError("this engine is closed, and its model went with it: make a new one")
        return self._loaded

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _job(self, request: Request, policy: PolicyFactory, meter: Meter, stream: bool) -> Job:
        prompt = self.codec.encode_prompt(request.prompt)
        context, capacity = self.runner.context, self.cache.capacity
        if not prompt:
            raise RequestError("the prompt has no tokens: give some text")
        room = context - len(prompt) - self.codec.after_rationale(request)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and the model's context holds {context}, "
                f"{context + 1 - room} being the least this request needs: shorten the prompt"
            )
        limit = min(request.sampling.max_tokens, room)
        outputs = [Output(self.codec, request.sampling, i, limit) for i in range(request.sampling.n)]
        job = Job(request, prompt, outputs, self.cache, self.codec, meter, Handle(self.wake, stream))
        job.account = self.accounts[request.purpose]
        job.policy = policy(job)
        needed = len(prompt) - 1 + job.policy.growth()
        if needed > capacity:
            raise RequestError(
                f"this request may need {needed} tokens of keys and values ({len(prompt)} of prompt, the rest for "
                f"n={request.sampling.n} samples) and the budget holds {capacity}: raise kv_budget, or lower n, "
                "max_tokens or the prompt's length"
            )
        return job

    def wake(self) -> None:
        """Have the loop look again, where it waits: a request was cancelled, or a draft is done."""
        with self._condition:
            self._woken = True
            self._condition.notify()

    # -- the loop -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:  # a policy's growth() or release(), say: nobody may wait for ever
            log.exception("the engine has failed")
            with self._condition:
                self._broken = ModelError(f"the engine has failed ({type(error).__name__}: {error}): make a new one")
                for job in [*self._running, *self._waiting, *self._inbox]:
                    job.handle.finish(self._broken)
                for future, _ in self._calls:
                    future.set_exception(self._broken)

    @torch.inference_mode()
    def _loop(self) -> None:
        while True:
            with self._condition:
                while not (self._inbox or self._waiting or self._running or self._calls or self._closed):
                    if not self._condition.wait(_IDLE_SECONDS) and not (self._inbox or self._calls or self._closed):
                        self._thread = None  # the next request starts another; an engine nobody holds is collected
                        return
                self._woken = False
                self._waiting += self._inbox
                self._inbox = []
                calls, self._calls = self._calls, []
                closed = self._closed
            for future, function in calls:
                try:
                    future.set_result(function())
                except Exception as error:  # the caller's  # noqa: BLE001
                    future.set_exception(error)
            for job in [*self._running, *self._waiting]:
                if closed or job.handle.cancelled:
                    self._finish(job, "cancelled")
                elif job.meter.overspent():
                    self._finish(job, "budget")
            if closed:
                return
            self._admit()
            if self._running:
                with recorded(self.timeline):
                    ran = self._step()
                with self._condition:
                    if not (ran or self._woken):
                        self._condition.wait(_LOOK_SECONDS)

    def _admit(self) -> None:
        """First come, first served: let requests in while the most they may all need fits."""
        promised = sum(job.policy.growth() for job in self._running)
        while self._waiting:
            job = self._waiting[0]
            head = job.prompt[:-1]
            growth = job.policy.growth()
            if self.cache.live + self.cache.new_slots(head) + promised + growth > self.cache.capacity:
                return
            job.branch = self.cache.open(head)
            promised += growth
            self._running.append(self._waiting.popleft())

    def _step(self) -> bool:
        """False where no request had anything to run: all wait for what their companions do meanwhile."""
        began = time.perf_counter()
        feeds: list[Chunk] = []
        owners: list[Job] = []
        proposals: list[tuple[Job, int, int]] = []
        failed: dict[Job, BaseException] = {}
        scheduled: set[int] = set()
        room = self.chunk
        ready: list[Job] = []
        for job in self._running:
            slots, end = job.branch.slots, len(job.branch)
            at = job.head = self.cache.computed_length(job.branch, job.head)
            while at < end and slots[at] in scheduled:
                at += 1
            if at < end and room:
                stop = min(end, at + room)
                feeds.append(Chunk(job.branch, at, stop))
                owners.append(job)
                scheduled.update(slots[at:stop])
                room -= stop - at
                at = stop
            if at == end:
                ready.append(job)
        prepared = time.perf_counter()
        self._prepare(ready, failed)
        drafting = time.perf_counter() - prepared
        for job in ready:
            if job in failed:
                continue
            try:
                proposed = job.policy.propose()
            except Exception as error:  # one policy's fault is one request's fault  # noqa: BLE001
                failed[job] = error
                continue
            if not proposed and job.policy.companion is None:  # it would be asked again for ever
                failed[job] = ModelError(f"{type(job.policy).__name__} has nothing to run and has not ended")
            if not proposed:
                continue
            proposals.append((job, len(feeds), len(proposed)))
            feeds += proposed
            owners += [job] * len(proposed)
        if feeds:
            self._forward(feeds, owners, proposals, failed, began, drafting)
        for job, reason in failed.items():
            self._fail(job, reason)
        return bool(feeds or failed)

    def _prepare(self, ready: Sequence[Job], failed: dict[Job, BaseException]) -> None:
        """Let companions do what they do for all of their policies at once."""
        companions = {id(job.policy.companion): job.policy.companion for job in ready}
        for companion in filter(None, companions.values()):
            jobs = [job for job in ready if job.policy.companion is companion]
            try:
                with span("draft"):
                    companion.prepare([job.policy for job in jobs])
            except Exception as error:
                log.exception("%s has failed", type(companion).__name__)
                failed.update(dict.fromkeys(jobs, error))

    def _forward(
        self,
        feeds: list[Chunk],
        owners: list[Job],
        proposals: list[tuple[Job, int, int]],
        failed: dict[Job, BaseException],
        began: float,
        drafting: float,
    ) -> None:
        """Run the feeds, read the logits, let the policies commit and count what was spent."""
        times = [began, time.perf_counter()]
        try:
            with span("forward"):
                forward = self.runner.forward(feeds)
            times.append(time.perf_counter())
            wanted = [
                (row, want)
                for feed, rows in zip(feeds, forward.rows, strict=True)
                for row, want in zip(rows, feed.reads, strict=True)
            ]
            rows = [row for row, _ in wanted]
            logits = forward.logits if rows == list(range(len(forward.logits))) else forward.logits[rows]
            with span("sampling"):
                sampled = iter(read(logits, [want for _, want in wanted]) if wanted else ())
        except Exception as error:  # out of memory, say: the requests of this step are lost, the engine is not
            log.exception("a forward pass failed")
            failed.update(dict.fromkeys(owners, error))
            return
        reads = [[next(sampled) for _ in feed.reads] for feed in feeds]
        times.append(time.perf_counter())
        timeline = self.timeline
        load = load_of(feeds, owners, forward) if timeline is not None and timeline.detailed else None
        self.forwards += 1
        for feed, own, job in zip(feeds, forward.own_from, owners, strict=True):
            job.computed += max(0, min(feed.stop, len(job.prompt)) - own)
        for meter in {id(job.meter): job.meter for job in owners}.values():
            meter.count(forwards=1)
        with span("commit"):
            self._commit(reads, proposals, failed)
        self._book(feeds, owners, load, drafting, *times)

    def _commit(
        self, reads: list[list[Sampled]], proposals: list[tuple[Job, int, int]], failed: dict[Job, BaseException]
    ) -> None:
        """Let the policies take what was drawn for their feeds."""
        for job, first, count in proposals:
            before = sum(len(output.tokens) for output in job.outputs)
            try:
                _check_finite(reads[first : first + count])
                job.policy.commit(reads[first : first + count])
            except Exception as error:  # noqa: BLE001
                failed[job] = error
                continue
            new = sum(len(output.tokens) for output in job.outputs) - before
            job.meter.count(new_tokens=new)
            job.account.tokens += new
            job.handle.tell(job.outputs)
            if not job.running:
                self._finish(job, None)

    def _book(self, feeds: list[Chunk], owners: list[Job], load: Load | None, drafting: float, *times: float) -> None:
        """Split the step's seconds among the purposes that its rows were computed for. Companions book drafting."""
        began, ready, computed, sampled, ended = *times, time.perf_counter()
        rows: Counter[Purpose] = Counter()
        for feed, job in zip(feeds, owners, strict=True):
            rows[job.request.purpose] += feed.stop - feed.start
        spent = {"verify": computed - ready, "sampling": sampled - computed}
        spent["scheduling"] = ended - began - drafting - sum(spent.values())
        for purpose, share in rows.items():
            for what, seconds in spent.items():
                self.accounts[purpose].seconds[what] += seconds * share / rows.total()
        if (timeline := self.timeline) is not None:
            timeline.spans += [
                Span("target", "verify", ready, computed),
                Span("target", "sampling", computed, sampled),
            ]
            if load is not None:
                timeline.spans.append(Span(LANE, "step", began, ended, load=load))

    def _finish(self, job: Job, reason: Any) -> None:
        for output in job.running:
            output.end(reason)
        job.handle.tell(job.outputs)
        self._remove(job)
        job.handle.finish(job.completions())

    def _fail(self, job: Job, error: BaseException) -> None:
        self._remove(job)
        if isinstance(error, _NotFiniteError):  # what such a forward computed is not to be found by later requests
            self.cache.clear()
        if not isinstance(error, TotError):
            error = ModelError(f"decoding failed: {type(error).__name__}: {error}")
        job.handle.finish(error)

    def _remove(self, job: Job) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
            return
        job.policy.release()
        self.cache.release(job.branch)
        self._running.remove(job)


class _NotFiniteError(ModelError):
    """After this one, what is cached is suspect."""


def _check_finite(reads: list[list[Sampled]]) -> None:
    if any(sampled.logprob != sampled.logprob for row in reads for sampled in row):
        raise _NotFiniteError(
            "the model's logits are not finite (NaN or infinity): its weights may be damaged, or the dtype too narrow; "
            "try dtype=fp32"
        )


@atexit.register
def _close_all() -> None:
    for engine in list(_open):
        engine.close()
