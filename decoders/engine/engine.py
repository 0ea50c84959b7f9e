"""Engine: one model, one RadixCache, and the only step loop.

Each step schedules prompts in chunks and what every running policy proposes, computes all of it in one packed forward,
samples from the logits, and lets the policies commit. It knows no decoding method: a policy is an object with `propose`
and `commit`, one for each running request.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from tot.decoders.budget import Meter, Metrics
from tot.decoders.engine.last_open import LastOpen
from tot.decoders.engine.output import Output
from tot.decoders.engine.runner import Forward, Runner
from tot.decoders.engine.sampling import Sampled
from tot.decoders.engine.scheduler import Scheduler, Step
from tot.decoders.engine.sequence import BatchDrafter, Handle, Job, PolicyFactory
from tot.decoders.engine.text import TextCodec
from tot.decoders.errors import ModelError, RequestError, TotError
from tot.decoders.kernels.native.forward import Quantization
from tot.decoders.machine import fit_threads
from tot.decoders.models.loaded import LoadedModel
from tot.decoders.request import FinishReason, Purpose, Request
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
    `quantize` as for `load_decoder`; with `owned` the model is the engine's alone, and ends with it."""

    def __init__(
        self,
        loaded: LoadedModel,
        kv_budget: int | str | None = None,
        chunk: int = 512,
        quantize: Quantization | None = None,
        owned: bool = False,
    ) -> None:
        fit_threads()
        self._loaded: LoadedModel | None = loaded
        self._owned = owned
        self.runner = Runner(loaded, kv_budget, quantize)
        self.cache = self.runner.cache
        self.codec = TextCodec(loaded.tokenizer, loaded.generation_config, int(loaded.config.vocab_size))
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
        self._scheduler = Scheduler(self.cache, chunk)
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
            self._loaded = None
            del self.runner.loaded
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
        layers = self.runner.loaded.config.num_hidden_layers
        if (most := max(request.states, default=0)) > layers:
            raise RequestError(f"there is no layer {most}: this model's states are numbered from 0 to {layers}")
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
                for job in [*self._scheduler.running, *self._scheduler.waiting, *self._inbox]:
                    job.handle.finish(self._broken)
                for future, _ in self._calls:
                    future.set_exception(self._broken)

    @torch.inference_mode()
    def _loop(self) -> None:
        while self._take_in():
            self._scheduler.admit()
            if self._scheduler.running:
                with recorded(self.timeline):
                    ran = self._step()
                with self._condition:
                    if not (ran or self._woken):
                        self._condition.wait(_LOOK_SECONDS)

    def _take_in(self) -> bool:
        """Take in new requests, calls and cancellations, waiting where there is nothing to do. False ends the loop."""
        scheduler = self._scheduler
        with self._condition:
            while not (self._inbox or self._calls or self._closed or scheduler.waiting or scheduler.running):
                if not self._condition.wait(_IDLE_SECONDS) and not (self._inbox or self._calls or self._closed):
                    self._thread = None  # the next request starts another; an engine nobody holds is collected
                    return False
            self._woken = False
            scheduler.waiting += self._inbox
            self._inbox = []
            calls, self._calls = self._calls, []
            closed = self._closed
        for future, function in calls:
            try:
                future.set_result(function())
            except Exception as error:  # the caller's  # noqa: BLE001
                future.set_exception(error)
        for job in [*scheduler.running, *scheduler.waiting]:
            if closed or job.handle.cancelled:
                self._finish(job, "cancelled")
            elif job.meter.overspent():
                self._finish(job, "budget")
        return not closed

    def _step(self) -> bool:
        """Schedule, draft, run, sample, commit. False where there was nothing to run: all wait for drafts."""
        times = [time.perf_counter()]
        step = self._scheduler.schedule()
        drafting = self._draft(step)
        self._scheduler.propose(step)
        if step.chunks:
            times.append(time.perf_counter())
            try:
                with span("forward"):
                    forward = self.runner.forward(step.chunks, step.layers)
                times.append(time.perf_counter())
                with span("sampling"):
                    reads = forward.sample(step.chunks, [job.request.states for job in step.jobs])
                times.append(time.perf_counter())
            except Exception as error:  # out of memory, say: the requests of this step are lost, the engine is not
                log.exception("a forward pass failed")
                step.failed.update(dict.fromkeys(step.jobs, error))
            else:
                load = step.load(forward) if self.timeline is not None and self.timeline.detailed else None
                self._count_forward(step, forward)
                with span("commit"):
                    self._commit(step, reads)
                self._share_seconds(step, load, drafting, *times, time.perf_counter())
        for job, reason in step.failed.items():
            self._fail(job, reason)
        return bool(step.chunks or step.failed)

    def _draft(self, step: Step) -> float:
        """Have drafted what is drafted for all requests of a decoder at once. Returns the seconds it took."""
        began = time.perf_counter()
        sharing: dict[BatchDrafter, list[Job]] = {}
        for job in step.ready:
            if job.policy.batch_drafter is not None:
                sharing.setdefault(job.policy.batch_drafter, []).append(job)
        for drafter, jobs in sharing.items():
            try:
                with span("draft"):
                    drafter.draft_all([sequence for job in jobs for sequence in job.policy.decoding()])
            except Exception as error:
                log.exception("%s has failed", type(drafter).__name__)
                step.failed.update(dict.fromkeys(jobs, error))
        return time.perf_counter() - began

    def _commit(self, step: Step, reads: list[list[Sampled]]) -> None:
        """Let the policies take what was drawn for their chunks, and pass new text on."""
        for job, chunks in step.proposed.items():
            before = sum(len(output.tokens) for output in job.outputs)
            try:
                _check_finite(reads[chunks])
                job.policy.commit(reads[chunks])
            except Exception as error:  # noqa: BLE001
                step.failed[job] = error
                continue
            new = sum(len(output.tokens) for output in job.outputs) - before
            job.meter.count(new_tokens=new)
            job.account.tokens += new
            job.handle.emit(job.outputs)
            if not job.running:
                self._finish(job, None)

    def _count_forward(self, step: Step, forward: Forward) -> None:
        """Count the forward for all who had a part in it, and the rows of prompts that it computed."""
        self.forwards += 1
        for chunk, own, job in zip(step.chunks, forward.own_from, step.jobs, strict=True):
            job.computed += max(0, min(chunk.stop, len(job.prompt)) - own)
        for meter in {id(job.meter): job.meter for job in step.jobs}.values():
            meter.count(forwards=1)

    def _share_seconds(self, step: Step, load: Load | None, drafting: float, *times: float) -> None:
        """Split the step's seconds among the purposes that its rows were computed for. Who drafts counts that."""
        began, ready, computed, sampled, ended = times
        rows: Counter[Purpose] = Counter()
        for chunk, job in zip(step.chunks, step.jobs, strict=True):
            rows[job.request.purpose] += chunk.stop - chunk.start
        spent = {"verify": computed - ready, "sampling": sampled - computed}
        spent["scheduling"] = ended - began - drafting - sum(spent.values())
        for purpose, share in rows.items():
            for what, seconds in spent.items():
                self.accounts[purpose].seconds[what] += seconds * share / rows.total()
        if (timeline := self.timeline) is not None:
            timeline.spans += [Span("target", "verify", ready, computed), Span("target", "sampling", computed, sampled)]
            if load is not None:
                timeline.spans.append(Span(LANE, "step", began, ended, load=load))

    def _finish(self, job: Job, reason: FinishReason | None) -> None:
        """`reason` ends what has not ended by itself."""
        for output in job.running:
            output.end(reason or "cancelled")
        job.handle.emit(job.outputs)
        self._scheduler.remove(job)
        job.handle.finish(job.completions())

    def _fail(self, job: Job, error: BaseException) -> None:
        self._scheduler.remove(job)
        if isinstance(error, _NotFiniteError):  # what such a forward computed is not to be found by later requests
            self.cache.clear()
        if not isinstance(error, TotError):
            error = ModelError(f"decoding failed: {type(error).__name__}: {error}")
        job.handle.finish(error)


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
