"""SEED: many thoughts drafted at once, one target that verifies (SEED, section 4).

`packed` verifies the finished drafts of all branches in one forward, as `sd` does. `rounds` is the paper's Algorithm 2:
a branch is drafting, queued or verifying; it enters the queue when its draft is done, and the target verifies the front
of the queue, first come, first served, while the others draft. Either adapts the drafts to what they bring.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import model_validator

from tot.decoders.drafting.drafters import Context, Draft, Drafter
from tot.decoders.drafting.latency_model import engine_costs, latency_model
from tot.decoders.drafting.opening import make_drafter
from tot.decoders.drafting.planner import LatencyModel
from tot.decoders.engine.engine import Engine
from tot.decoders.engine.job import Job
from tot.decoders.methods.acceptance import Coupled, Rejection, Rule
from tot.decoders.methods.autoregressive import DecodingSequence
from tot.decoders.methods.method import Method, OpenedMethod
from tot.decoders.methods.speculative import DraftingOptions, KConfig, Speculation, Speculative
from tot.decoders.request import Purpose
from tot.decoders.timeline import Span

if TYPE_CHECKING:
    from tot.decoders.engine.engine import Engine


class SEEDOptions(DraftingOptions):
    """Options of `seed`."""

    policy: Literal["packed", "rounds"] = "packed"
    """packed verifies all finished drafts in one forward; rounds one after another, while others draft."""
    overlap: bool = True
    """rounds: draft in a thread of its own while the target verifies; False drafts in between, to compare with."""
    adapt: bool = True
    """Measure what forwards cost and drafts bring, and draft as much as pays; False drafts all of k_config, always."""
    k_config: KConfig = (2, 1, 1, 1, 1, 1)
    """Candidates at each position drafted, at most."""
    rule: Literal["coupled", "leviathan", "mcsd"] = "coupled"
    """coupled gives what `ar` gives, token for token; the others, rejection rules, only its distribution."""
    replacement: bool = False
    """mcsd: candidates are drawn independently of each other, rather than each from what the others left."""

    @model_validator(mode="after")
    def _fitting(self) -> SEEDOptions:
        if self.rule == "leviathan" and (max(self.k_config) > 1 or self.replacement):
            raise ValueError("rule leviathan knows one candidate a position: give k_config=1,1,1, or rule=mcsd")
        if self.policy == "packed" and not self.overlap:
            raise ValueError("overlap is for policy=rounds: leave it out")
        return self

    def acceptance(self) -> Rule:
        return Coupled() if self.rule == "coupled" else Rejection(self.replacement)


class Rounds(Speculation):
    """The queue of drafts to be verified. Drafting is done by an executor, one draft after another."""

    def __init__(
        self,
        drafter: Drafter,
        options: SEEDOptions,
        engine: Engine,
        costs: tuple[LatencyModel, LatencyModel | None] | None = None,
        executor: Executor | None = None,
    ) -> None:
        super().__init__(drafter, options, engine, costs)
        self._executor = executor or (_worker(engine.runner.device) if options.overlap else _Inline())
        self._queue: queue.SimpleQueue[tuple[int, Future[tuple[Draft, float]]]] = queue.SimpleQueue()
        """Finished drafts, in the order in which they were finished."""
        self._drafting: dict[int, tuple[Scheduled, DecodingSequence]] = {}
        """By key: whose draft is being made or queued."""
        self._verifying: tuple[int, float] | None = None
        """Whose draft is being verified, and since when on the timeline."""
        device = engine.runner.device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def prepare(self, policies: Sequence[Any]) -> None:
        """Let every branch draft that is not queued, and give the front of the queue its turn."""
        self._verified()
        for purpose in {policy.purpose for policy in policies}:
            self.experience[purpose].step += 1
        for policy in policies:
            policy.turns = set()
            for sequence in policy.decoding():
                key = policy.keys[sequence.output.index]
                if key not in self._drafting:
                    self._drafting[key] = policy, sequence
                    future = self._executor.submit(partial(self._draft, policy.purpose), key, policy.context(sequence))
                    future.add_done_callback(partial(self._enqueue, key))
        while not self._queue.empty():  # else others run meanwhile, and the next draft that is done wakes the engine
            key, future = self._queue.get()
            self._note_length()
            if key not in self._drafting:  # it was cancelled meanwhile
                continue
            policy, sequence = self._drafting.pop(key)
            draft, seconds = future.result()
            policy.account.seconds["draft"] += seconds
            policy.drafts[sequence.output.index] = draft
            policy.turns = {sequence.output.index}
            if self.engine.timeline is not None:
                self._verifying = key, self.engine.timeline.clock()
            return

    def _draft(self, purpose: Purpose, key: int, context: Context) -> tuple[Draft, float]:
        """A branch's next draft, and the seconds it took. Runs in the executor."""
        began = time.perf_counter()
        with torch.inference_mode(), torch.cuda.stream(self._stream), self.span(f"branch {key}", key):
            (draft,) = self.drafter.draft([context], self.outlook(1, len(context.tokens), purpose))
            if self._stream is not None:
                self._stream.synchronize()
        return draft, time.perf_counter() - began

    def _enqueue(self, key: int, future: Future[tuple[Draft, float]]) -> None:
        self._queue.put((key, future))
        self._note_length()
        self.engine.wake()

    def _note_length(self) -> None:
        if (timeline := self.engine.timeline) is not None:
            timeline.queue.append((timeline.clock(), self._queue.qsize()))

    def _verified(self) -> None:
        """The step is over whose turn was given last."""
        if self._verifying is not None and (timeline := self.engine.timeline) is not None:
            key, began = self._verifying
            timeline.spans.append(Span(f"branch {key}", "verify", began, timeline.clock(), key))
        self._verifying = None

    def end(self, key: int) -> None:
        self._drafting.pop(key, None)
        if self._verifying is not None and self._verifying[0] == key:
            self._verified()
        try:
            self._executor.submit(self.drafter.end, key)  # not while it is drafting
        except RuntimeError:  # it was shut down
            self.drafter.end(key)

    def close(self) -> None:
        self._executor.shutdown()


class Scheduled(Speculative):
    """Decodes as `Speculative` does, a sample only when it is its turn."""

    def __init__(self, job: Job, companion: Speculation) -> None:
        super().__init__(job, companion)
        self.turns: set[int] = set()
        """Samples whose drafts are verified in this step."""

    def turn(self) -> list[DecodingSequence]:
        return [
            sequence
            for sequence in super().turn()
            if sequence.scorer is not None or sequence.output.index in self.turns
        ]


class _Inline(Executor):
    """Does what it is given at once, in the caller's thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # as executors do  # noqa: BLE001
            future.set_exception(error)
        return future


def _worker(device: torch.device) -> Executor:
    """One thread, which leaves the other cores to the target."""
    alone = partial(torch.set_num_threads, 1) if device.type == "cpu" else None
    return ThreadPoolExecutor(1, "tot-draft", alone)


def _open(engine: Engine, options: SEEDOptions, stack: ExitStack) -> OpenedMethod:
    drafter = make_drafter(options.draft, engine, stack)
    costs = None
    if options.adapt:
        costs = engine_costs(engine), None if drafter.runner is None else latency_model(drafter.runner)
    if options.policy == "packed":
        packed = Speculation(drafter, options, engine, costs)
        return OpenedMethod(partial(Speculative, companion=packed), drafter)
    rounds = Rounds(drafter, options, engine, costs)
    stack.callback(rounds.close)
    return OpenedMethod(partial(Scheduled, companion=rounds), drafter)


METHOD = Method(_open, SEEDOptions)
