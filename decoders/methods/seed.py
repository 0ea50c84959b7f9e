"""SEED: draft for many thoughts at once and verify with one target (SEED, section 4).

`packed` verifies the finished drafts of all branches in one forward, as `sd` does. `rounds` is the paper's Algorithm 1:
a branch is drafting, queued or verifying. It enters the queue when its draft is done. The target verifies the front of
the queue, first come, first served, while other branches draft. The paper has a draft model for each branch; here one
worker drafts one branch at a time, beside the target or between its forwards. Both policies can adapt drafts to their
gain.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Literal

from pydantic import model_validator

from tot.decoders.drafting.draft_model import make_drafter
from tot.decoders.drafting.drafters import Draft, DraftContext, Drafter
from tot.decoders.engine.engine import Engine
from tot.decoders.engine.sequence import DecodingSequence
from tot.decoders.machine import use_threads
from tot.decoders.methods.method import Method, OpenedMethod
from tot.decoders.methods.speculative import (
    Drafted,
    DraftingOptions,
    KConfig,
    Speculation,
    Speculative,
    SpeculativeConfig,
    speculate,
)
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

    def __init__(self, engine: Engine, drafter: Drafter, options: SEEDOptions) -> None:
        super().__init__(engine, drafter, options.config)
        # One thread leaves the other cores to the target.
        self._worker = ThreadPoolExecutor(1, "tot-draft", partial(use_threads, 1)) if options.overlap else None
        self._queue: dict[int, tuple[DraftContext, Future[Draft] | None]] = {}
        """By text, in the order of its draft: the draft in progress or finished; None if there is no worker."""
        self._verifying: tuple[int, float] | None = None
        """Key of the draft in verification, and its start on the timeline."""

    def draft_all(self, sequences: Sequence[DecodingSequence]) -> None:
        """Queue each branch that is not queued, and take the front of the queue if it is drafted."""
        self._end_verification()
        self._count_step(sequences)
        for sequence in sequences:
            if (key := sequence.key) not in self._queue:
                context, future = self.context(sequence), None
                if self._worker is not None:
                    future = self._worker.submit(self._draft, context)
                self._queue[key] = context, future
                if future is not None:
                    future.add_done_callback(self._finished)
        if not self._queue:
            return
        key, (context, future) = next(iter(self._queue.items()))
        if future is not None and not future.done():
            return  # the next finished draft wakes the engine
        del self._queue[key]
        self._note_length()
        self.drafts[key] = Drafted(context, self._draft(context) if future is None else future.result())
        if self.engine.timeline is not None:
            self._verifying = key, time.perf_counter()

    def _draft(self, context: DraftContext) -> Draft:
        with self.span(f"branch {context.key}", context.key):
            return self.drafter.draft([context], self.planner([context]))[0]

    def _finished(self, future: Future[Draft]) -> None:
        self._note_length()
        self.engine.wake()

    def _note_length(self) -> None:
        """Record the number of finished drafts."""
        if (timeline := self.engine.timeline) is not None:
            finished = [future is None or future.done() for _, future in list(self._queue.values())]
            timeline.queue.append((time.perf_counter(), sum(finished)))

    def _end_verification(self) -> None:
        """Record the end of the verification that was in progress."""
        if self._verifying is not None and (timeline := self.engine.timeline) is not None:
            key, began = self._verifying
            timeline.spans.append(Span(f"branch {key}", "verify", began, time.perf_counter(), key))
        self._verifying = None

    def _end_drafting(self, key: int) -> None:
        self._queue.pop(key, None)
        if self._verifying is not None and self._verifying[0] == key:
            self._end_verification()
        if self._worker is not None:
            with suppress(RuntimeError):  # the worker is shut down
                self._worker.submit(self.drafter.end, key)  # not while the drafter runs
                return
        self.drafter.end(key)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()


def _open(engine: Engine, options: SEEDOptions, stack: ExitStack) -> OpenedMethod:
    drafter = make_drafter(options.draft, engine, stack)
    if options.policy == "packed":
        return speculate(engine, drafter, options.config)
    rounds = Rounds(engine, drafter, options)
    stack.callback(rounds.close)
    return OpenedMethod(partial(Speculative, speculation=rounds), drafter, draft_rows=rounds.rows)


METHOD = Method(_open, SEEDOptions)
