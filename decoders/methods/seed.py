"""SEED: draft for many thoughts at once and verify with one target (SEED, section 4).

`packed` verifies the finished drafts of all branches in one forward, as `sd` does. `rounds` is the paper's Algorithm 1:
a branch is drafting, queued or verifying. It enters the queue when its draft is done. The target verifies the front of
the queue, first come, first served, while other branches draft. The paper has a draft model for each branch; here one
worker drafts one branch at a time, beside the target or between its forwards. Both policies can adapt drafts to their
gain.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

from pydantic import model_validator

from tot.decoders.drafting.draft_model import make_drafter
from tot.decoders.drafting.drafters import DraftContext, Drafter
from tot.decoders.engine.engine import Engine
from tot.decoders.engine.sequence import DecodingSequence
from tot.decoders.machine import use_threads
from tot.decoders.methods.method import Method, OpenedMethod
from tot.decoders.methods.sd import DraftingOptions, KConfig
from tot.decoders.methods.speculative import Drafted, Speculation, Speculative, SpeculativeConfig, speculate
from tot.decoders.timeline import Span


class SEEDOptions(DraftingOptions):
    """SEED, scheduled speculation (arXiv 2406.18200): draft only what pays, or the paper's queue of drafts."""

    policy: Literal["packed", "rounds"] = "packed"
    """packed verifies all finished drafts in one forward; rounds verifies one after another."""
    overlap: bool = False
    """For rounds: draft in a second thread while the target verifies, which needs a core of its own."""
    adapt: bool = True
    """Adapt drafts to the measured latency and acceptance. False always drafts all of k_config."""
    k_config: KConfig = (2, 1, 1, 1, 1, 1)
    """Maximum number of candidates at each drafted position."""
    rule: Literal["coupled", "leviathan", "mcsd"] = "coupled"
    """coupled gives the output of `ar`, token for token; the rejection rules keep only its distribution."""

    @model_validator(mode="after")
    def _fitting(self) -> SEEDOptions:
        if self.rule == "leviathan" and max(self.k_config) > 1:
            raise ValueError("rule leviathan takes one candidate per position: give k_config=1,1,1, or rule=mcsd")
        if self.policy == "packed" and self.overlap:
            raise ValueError("overlap is for policy=rounds: leave it out")
        return self

    @property
    def config(self) -> SpeculativeConfig:
        return SpeculativeConfig(self.k_config, self.rule, self.adapt)


class Rounds(Speculation):
    """The queue of drafts to verify. Drafting is sequential, in a worker beside the target or between its forwards."""

    def __init__(
        self, engine: Engine, drafter: Drafter, options: SEEDOptions, executor: Executor | None = None
    ) -> None:
        super().__init__(engine, drafter, options.config)
        self._executor = executor or (draft_worker() if options.overlap else _Inline())
        """Runs drafts in order."""
        self._queue: queue.SimpleQueue[tuple[int, Future[Drafted]]] = queue.SimpleQueue()
        """Finished drafts in order of completion."""
        self._drafting: set[int] = set()
        """Keys of the texts whose drafts are in progress or queued."""
        self._verifying: tuple[int, float] | None = None
        """Key of the draft in verification, and its start on the timeline."""

    def draft_all(self, sequences: Sequence[DecodingSequence]) -> None:
        """Submit a draft for each branch that has none in progress, and take the front of the queue."""
        self._end_verification()
        self._count_step(sequences)
        for sequence in sequences:
            if (key := sequence.key) not in self._drafting:
                self._drafting.add(key)
                future = self._executor.submit(self._draft, key, self.context(sequence))
                future.add_done_callback(partial(self._enqueue, key))
        while not self._queue.empty():  # if empty, the next finished draft wakes the engine
            key, future = self._queue.get()
            self._note_length()
            if key not in self._drafting:  # cancelled
                continue
            self._drafting.remove(key)
            self.drafts[key] = future.result()
            if self.engine.timeline is not None:
                self._verifying = key, self.engine.timeline.clock()
            return

    def _draft(self, key: int, context: DraftContext) -> Drafted:
        """Draft for a branch. Runs in the executor."""
        with self.span(f"branch {key}", key):
            (draft,) = self.drafter.draft([context], self.planner([context]))
        return Drafted(context, draft)

    def _enqueue(self, key: int, future: Future[Drafted]) -> None:
        self._queue.put((key, future))
        self._note_length()
        self.engine.wake()

    def _note_length(self) -> None:
        if (timeline := self.engine.timeline) is not None:
            timeline.queue.append((timeline.clock(), self._queue.qsize()))

    def _end_verification(self) -> None:
        """Record the end of the verification that was in progress."""
        if self._verifying is not None and (timeline := self.engine.timeline) is not None:
            key, began = self._verifying
            timeline.spans.append(Span(f"branch {key}", "verify", began, timeline.clock(), key))
        self._verifying = None

    def _end_drafting(self, key: int) -> None:
        self._drafting.discard(key)
        if self._verifying is not None and self._verifying[0] == key:
            self._end_verification()
        try:
            self._executor.submit(self.drafter.end, key)  # not while the drafter runs
        except RuntimeError:  # the executor is shut down
            self.drafter.end(key)

    def close(self) -> None:
        self._executor.shutdown()


class _Inline(Executor):
    """Runs functions immediately, in the caller's thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # like other executors  # noqa: BLE001
            future.set_exception(error)
        return future


def draft_worker() -> Executor:
    """Return an executor with one thread, which leaves the other cores to the target."""
    return ThreadPoolExecutor(1, "tot-draft", partial(use_threads, 1))


def _open(engine: Engine, options: SEEDOptions, stack: ExitStack) -> OpenedMethod:
    drafter = make_drafter(options.draft, engine, stack)
    if options.policy == "packed":
        return speculate(engine, drafter, options.config)
    rounds = Rounds(engine, drafter, options)
    stack.callback(rounds.close)
    return OpenedMethod(partial(Speculative, speculation=rounds), drafter, draft_rows=rounds.rows)


METHOD = Method(_open, SEEDOptions)
