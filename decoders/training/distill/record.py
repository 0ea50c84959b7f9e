"""Record a target model's texts and its most likely tokens at each position, to distill a smaller model.

The target's own texts are recorded while they are decoded, from logits that decoding computes anyway. A given text
takes one forward pass. Records are saved as safetensors files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tot.decoders.engine.engine import Engine
from tot.decoders.engine.radix_cache import Branch
from tot.decoders.engine.runner import Chunk
from tot.decoders.engine.sampling import Raw, Sampled
from tot.decoders.engine.sequence import DecodingSequence, Job, Policy
from tot.decoders.files import replacing
from tot.decoders.methods.autoregressive import Autoregressive
from tot.decoders.request import Request

TOP = 32
"""Tokens recorded per position; the other tokens share the remaining probability."""


@dataclass(frozen=True, slots=True)
class Record:
    """A text, and the target's distribution for each of its tokens from index `first`."""

    tokens: Tensor
    """(length,) int32."""
    first: int
    top: Tensor
    """(length - first, TOP) int32: the most likely tokens at each position."""
    logprobs: Tensor
    """(length - first, TOP) float16: their logprobs (nats)."""


class Recorder:
    """Collects records; texts are truncated to their last `window` tokens."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.records: list[Record] = []

    def add(self, tokens: Sequence[int], said: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add a text; `said` has (top tokens, logprobs) for each of its last tokens."""
        said = said[-(self.window - 1) :]
        text = torch.tensor(tokens[-self.window :], dtype=torch.int32)
        top, logprobs = (torch.stack(parts) for parts in zip(*said, strict=True))
        self.records.append(Record(text, len(text) - len(said), top, logprobs))

    def policy(self, job: Job) -> RecordedAutoregressive:
        """Return a policy that decodes as `ar` does and records."""
        return RecordedAutoregressive(job, self)

    def read(self, engine: Engine, texts: Sequence[Sequence[int]]) -> None:
        """Record given texts (token ids). Blocks until all are done."""
        handles = [
            engine.submit(Request(prompt=tuple(text[:1])), partial(Reader, text=text, recorder=self))
            for text in texts
            if len(text) > 1
        ]
        for handle in handles:
            handle.result()


def _top(row: np.ndarray[Any, np.dtype[np.float32]]) -> tuple[Tensor, Tensor]:
    logits = torch.from_numpy(row)
    values, tokens = logits.topk(min(TOP, len(logits)))
    return tokens.int(), (values - logits.logsumexp(-1)).half()


class RecordedAutoregressive(Autoregressive):
    """Decodes as `Autoregressive` does, and records each text and its distributions."""

    def __init__(self, job: Job, recorder: Recorder) -> None:
        super().__init__(job)
        self._recorder = recorder
        self._distributions: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def run(self, sequence: DecodingSequence) -> list[Chunk]:
        (chunk,) = super().run(sequence)
        chunk.reads = [Raw(sequence.output.draw())]
        return [chunk]

    def take(self, sequence: DecodingSequence, rows: Iterator[list[Sampled]]) -> None:
        (sampled,) = next(rows)
        assert sampled.logits is not None
        distributions = self._distributions.setdefault(sequence.output.index, [])
        distributions.append(_top(sampled.logits))
        super().take(sequence, iter([[sampled]]))
        if sequence.output.finish_reason is not None:
            self._recorder.add([*self._job.cache.tokens(sequence.branch), sampled.token], distributions)
            distributions.clear()


class Reader(Policy):
    """A policy that records a given text in one forward pass and decodes nothing."""

    def __init__(self, job: Job, text: Sequence[int], recorder: Recorder) -> None:
        self._job, self._text, self._recorder = job, text, recorder
        self._branch: Branch | None = None

    def growth(self) -> int:
        return len(self._text)

    def propose(self) -> list[Chunk]:
        self._branch = self._job.cache.fork(self._job.branch)
        self._job.cache.extend(self._branch, self._text[:-1])
        return [Chunk(self._branch, 0, len(self._branch), [Raw()] * len(self._branch))]

    def commit(self, reads: list[list[Sampled]]) -> None:
        rows = [sampled.logits for sampled in reads[0]]
        self._recorder.add(self._text, [_top(row) for row in rows if row is not None])
        self._job.outputs[0].end("stop")

    def release(self) -> None:
        if self._branch is not None:
            self._job.cache.release(self._branch)


def save(records: Sequence[Record], path: Path) -> None:
    """Write records to a safetensors file atomically."""
    lengths = torch.tensor([(len(record.tokens), record.first) for record in records], dtype=torch.int32)
    whole = {name: torch.cat([getattr(record, name) for record in records]) for name in ("tokens", "top", "logprobs")}
    with replacing(path) as unfinished:
        save_file({"lengths": lengths, **whole}, unfinished)


def load(path: Path) -> list[Record]:
    """Load the records of a file that `save` wrote."""
    whole = load_file(path)
    lengths, firsts = whole["lengths"].T.tolist()
    recorded = [length - first for length, first in zip(lengths, firsts, strict=True)]
    parts = (
        torch.split(whole["tokens"], lengths),
        firsts,
        torch.split(whole["top"], recorded),
        torch.split(whole["logprobs"], recorded),
    )
    return [Record(*fields) for fields in zip(*parts, strict=True)]
