"""SEED: draft for many thoughts at once and verify with one target (SEED, section 4).

`packed` verifies the finished drafts of all branches in one forward, as `sd` does. `rounds` is the paper's Algorithm 1:
a branch is drafting, queued or verifying. It enters the queue when its draft is done. The target verifies the front of
the queue, first come, first served, while other branches draft. The paper has a draft model for each branch; here one
worker drafts one branch at a time. Both policies can adapt drafts to their gain.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from typing import Any

from tot.decoders.drafting.drafters import DraftContext, Drafter
from tot.decoders.drafting.opening import make_drafter
from tot.decoders.drafting.planner import Trial
from tot.decoders.engine.engine import Engine
from tot.decoders.engine.sequence import DecodingSequence
from tot.decoders.machine import use_threads
from tot.decoders.methods.method import OpenedMethod, SpeculativeConfig
from tot.decoders.methods.options import SEEDOptions
from tot.decoders.methods.speculative import Drafted, Speculation, Speculative
from tot.decoders.timeline import Span


class Rounds(Speculation):
    """The queue of drafts to verify. Drafting is sequential, in a worker beside the target or between its forwards."""

    def __init__(
        self, engine: Engine, drafter: Drafter, options: SEEDOptions, executor: Executor | None = None
    ) -> None:
        super().__init__(engine, drafter, SpeculativeConfig(options.k_config, options.rule, options.adapt))
        self._worker = executor or draft_worker()
        self._inline = _Inline()
        self._overlap = True if executor is not None else options.overlap
        self._drafted: Future[Any] | None = None
        """The last draft submitted to the worker, which runs them in order."""
        self._turn_ended = 0.0
        self._queue: queue.SimpleQueue[tuple[int, Future[Drafted]]] = queue.SimpleQueue()
        """Finished drafts in order of completion."""
        self._drafting: set[int] = set()
        """Keys of the texts whose drafts are in progress or queued."""
        self._verifying: tuple[int, float] | None = None
        """Key of the draft in verification, and its start on the timeline."""

    def draft_all(self, sequences: Sequence[DecodingSequence]) -> None:
        """Submit a draft for each branch that has none in progress, and take the front of the queue."""
        self._end_verification()
        executor = self._executor(len(sequences))
        self._count_step(sequences)
        for sequence in sequences:
            if (key := sequence.key) not in self._drafting:
                self._drafting.add(key)
                future = executor.submit(self._draft, key, self.context(sequence))
                future.add_done_callback(partial(self._enqueue, key))
                self._drafted = self._drafted if executor is self._inline else future
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

    def _executor(self, branches: int) -> Executor:
        """Return the executor of the next draft. Without the option `overlap`, a trial picks the faster one."""
        overlap = self._overlap
        if overlap is None:
            trial = self._trials.setdefault((branches.bit_length(), frozenset()), Trial(None))
            if self._gained:
                trial.step(self._gained, self._ended - self._turn_ended)
            self._gained, self._turn_ended = 0, self._ended
            overlap = trial.drafts
        if not overlap and self._drafted is not None:  # one draft at a time
            wait([self._drafted])
            self._drafted = None
        return self._worker if overlap else self._inline

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
        executor = self._inline if self._drafted is None else self._worker  # not while the drafter runs
        try:
            executor.submit(self.drafter.end, key)
        except RuntimeError:  # the executor is shut down
            self.drafter.end(key)

    def close(self) -> None:
        self._worker.shutdown()


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


def open_rounds(engine: Engine, options: SEEDOptions, stack: ExitStack) -> OpenedMethod:
    """Open Algorithm 1: branches draft while the target verifies the front of the queue."""
    rounds = Rounds(engine, make_drafter(options.draft, engine, stack), options)
    stack.callback(rounds.close)
    return OpenedMethod(partial(Speculative, speculation=rounds), rounds.drafter)
