"""Requests in the engine: jobs and their handles, policies, and samples during decoding."""

from __future__ import annotations

import asyncio
import itertools
import queue
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from tot.decoders.budget import Meter
from tot.decoders.engine.output import Output
from tot.decoders.engine.radix_cache import Branch, RadixCache
from tot.decoders.engine.runner import Chunk
from tot.decoders.engine.sampling import Sampled
from tot.decoders.engine.text import TextCodec
from tot.decoders.errors import RequestError
from tot.decoders.request import Completion, Request

_keys = itertools.count()


class DecodingSequence:
    """One sample: its branch, and the tokens that were drawn or given but not yet fed to the model."""

    def __init__(self, job: Job, output: Output, branch: Branch, pending: list[int]) -> None:
        self.key = next(_keys)
        """Identifies the text to drafters."""
        self.job = job
        self.output = output
        self.branch = branch
        self.pending = pending


class BatchDrafter(Protocol):
    """A drafter that several requests share; it drafts for all of their sequences at once."""

    def draft_all(self, sequences: Sequence[DecodingSequence]) -> None:
        """Draft for the sequences of a step, before their policies propose."""


class Policy(ABC):
    """A decoding method applied to one request. It owns the branches that it forks from `job.branch`."""

    batch_drafter: BatchDrafter | None = None

    def decoding(self) -> list[DecodingSequence]:
        """Return the samples that are about to draw tokens, for the batch drafter."""
        return []

    @abstractmethod
    def propose(self) -> list[Chunk]:
        """Return the next chunks: branches extended by the tokens to feed. Called once the prompt's head is computed.

        Counts a forward in `Output.forwards` for each output that takes part. Returns no chunks while it waits for
        drafts.
        """

    @abstractmethod
    def commit(self, reads: list[list[Sampled]]) -> None:
        """Take the reads of each proposed chunk, and end the job's outputs when they are complete."""

    @abstractmethod
    def need(self, tokens: int) -> int:
        """Return the most slots beyond the prompt's that the job takes until each of its samples drew `tokens` more.

        A job that cannot be paused returns all that it may still take.
        """

    @abstractmethod
    def release(self) -> None:
        """Release all branches. If the job is pausable, the next `propose` resumes from `job.resumed`."""

    @property
    def pausable(self) -> bool:
        """Whether the job can continue after `release` between two steps."""
        return False


@dataclass(eq=False)
class Job:
    """A request in the engine."""

    request: Request
    prompt: list[int]
    outputs: list[Output]
    cache: RadixCache
    codec: TextCodec
    meter: Meter
    handle: Handle
    branch: Branch = field(init=False)
    """Holds the prompt without its last token, which the policy feeds and reads first."""
    resumed: dict[int, Branch] = field(default_factory=dict)
    """After a pause, by sample: a branch that holds its text without the last token, for the policy to take."""
    policy: Policy = field(init=False)
    head: int = 0
    """Number of leading positions of `branch` that are known to be computed."""
    computed: int = 0
    """Prompt tokens computed for this job, including those computed again after a pause."""
    kept: bool = False
    """Whether its prompt was computed and given to the prefix cache."""
    pauses: int = 0
    """Number of times that it was paused."""
    started: float = field(default_factory=time.monotonic)

    @property
    def running(self) -> list[Output]:
        return [output for output in self.outputs if output.finish_reason is None]

    def text(self, output: Output) -> list[int]:
        """Return the tokens of a sample, prompt included."""
        return [*self.prompt, *output.tokens]

    def completions(self) -> list[Completion]:
        """Return one completion per sample; the first one counts the prompt."""
        seconds = time.monotonic() - self.started
        reused = max(0, len(self.prompt) - self.computed) if self.outputs[0].forwards else 0
        first, *others = self.outputs
        return [first.completion(seconds, len(self.prompt), reused), *(other.completion(seconds) for other in others)]


class ThinkingPiece(str):
    """A streamed piece of thinking, which is not part of the completion's text."""


class Handle:
    """A submitted request: await it or call `result()`, iterate over pieces of text, or cancel it."""

    def __init__(self, wake: Callable[[], None], stream: bool) -> None:
        self.future: Future[list[Completion]] = Future()
        self._cancelled = False
        self._wake = wake
        self._pieces: queue.SimpleQueue[tuple[int, str] | None] | None = queue.SimpleQueue() if stream else None
        self._notify: Callable[[], object] | None = None
        """Wakes the event loop that waits for pieces, if any."""
        self._emitted: defaultdict[tuple[int, type[str]], int] = defaultdict(int)
        """Number of characters emitted, by sample and kind of piece."""

    def result(self, timeout: float | None = None) -> list[Completion]:
        """Wait for the n completions. Raises the error of the request, or TimeoutError."""
        return self.future.result(timeout)

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        """Stop at the next step and release the slots. The result is the text decoded so far."""
        self._cancelled = True
        self._wake()

    def __await__(self) -> Generator[Any, None, list[Completion]]:
        return self._wait().__await__()

    async def _wait(self) -> list[Completion]:
        try:
            return await asyncio.shield(asyncio.wrap_future(self.future))
        except asyncio.CancelledError:
            self.cancel()
            raise

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """Yield (sample, text) pieces as they become final. Requires `stream=True` on submission.

        Texts of thinking are a `ThinkingPiece`.
        """
        pieces = self._stream()
        while (piece := pieces.get()) is not None:
            yield piece
        self.result()

    async def __aiter__(self) -> AsyncIterator[tuple[int, str]]:
        """Yield the pieces asynchronously, without a thread. Cancelling the iterating task cancels the request."""
        pieces = self._stream()
        arrived = asyncio.Event()
        self._notify = partial(asyncio.get_running_loop().call_soon_threadsafe, arrived.set)
        while True:
            arrived.clear()  # before reading the queue: later pieces set it again
            try:
                while (piece := pieces.get_nowait()) is not None:
                    yield piece
                break
            except queue.Empty:
                pass
            try:
                await arrived.wait()
            except asyncio.CancelledError:
                self.cancel()
                raise
        await self

    def _stream(self) -> queue.SimpleQueue[tuple[int, str] | None]:
        if self._pieces is None:
            raise RequestError("this request was not submitted for streaming: submit(..., stream=True)")
        return self._pieces

    def emit(self, outputs: Sequence[Output]) -> None:
        """Emit new text (engine only)."""
        if not self.streams:
            return
        for output in outputs:
            for kind, settled in ((ThinkingPiece, output.settled_thinking()), (str, output.settled())):
                if piece := settled[self._emitted[output.index, kind] :]:
                    self.put(output.index, kind(piece))
                    self._emitted[output.index, kind] = len(settled)

    @property
    def streams(self) -> bool:
        return self._pieces is not None

    def put(self, index: int, text: str) -> None:
        """Stream a piece of a sample's text."""
        if text:
            self._put((index, text))

    def _put(self, piece: tuple[int, str] | None) -> None:
        if self._pieces is None:
            return
        self._pieces.put(piece)
        if self._notify is not None:
            with suppress(RuntimeError):  # the event loop is closed, so no task waits
                self._notify()

    def finish(self, result: list[Completion] | BaseException) -> None:
        """Settle the future and end the stream (engine only)."""
        if self.future.set_running_or_notify_cancel():
            if isinstance(result, BaseException):
                self.future.set_exception(result)
            else:
                self.future.set_result(result)
        self._put(None)


PolicyFactory = Callable[[Job], Policy]


class Call(NamedTuple):
    """A request to queue, its policy, and the handle that gets its result."""

    request: Request
    policy: PolicyFactory
    handle: Handle
