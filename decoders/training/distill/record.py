"""What a target model says, recorded to teach a smaller one: texts, and its likeliest tokens at each place in them.

Texts are what the target itself writes, recorded while it is decoded: the logits are there already, so teaching costs
no forward of its own. Texts that are given are read in one forward each. Records go to safetensors files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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
"""Tokens recorded at each place; the probability of all others is known as their sum."""


@dataclass(frozen=True, slots=True)
class Record:
    """A text, and what the target said about its tokens from `first` on."""

    tokens: Tensor
    """(length,) int32."""
    first: int
    top: Tensor
    """(length - first, TOP) int32: the likeliest tokens in the place of each."""
    logprobs: Tensor
    """(length - first, TOP) float16, their log-probabilities (nats)."""


class Recorder:
    """Collects records; texts are cut to their last `window` tokens."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.records: list[Record] = []

    def add(self, tokens: Sequence[int], said: Sequence[tuple[Tensor, Tensor]]) -> None:
        """A text whose last tokens were drawn from `said`."""
        said = said[-(self.window - 1) :]
        text = torch.tensor(tokens[-self.window :], dtype=torch.int32)
        top, logprobs = (torch.stack(parts) for parts in zip(*said, strict=True))
        self.records.append(Record(text, len(text) - len(said), top, logprobs))

    def policy(self, job: Job) -> RecordedAutoregressive:
        """Decodes as `ar` does, and records."""
        return RecordedAutoregressive(job, self)

    def read(self, engine: Engine, texts: Sequence[Sequence[int]]) -> None:
        """Record texts that are given, as token ids. Blocks until they are read."""
        handles = [
            engine.submit(Request(prompt=tuple(text[:1])), partial(Reader, text=text, recorder=self))
            for text in texts
            if len(text) > 1
        ]
        for handle in handles:
            handle.result()


def _likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, tokens = logits.topk(min(TOP, len(logits)))
    return tokens.int().cpu(), (values - logits.logsumexp(-1)).half().cpu()


class RecordedAutoregressive(Autoregressive):
    """Decodes as `Autoregressive` does, and records each text and what it was drawn from."""

    def __init__(self, job: Job, recorder: Recorder) -> None:
        super().__init__(job)
        self._recorder = recorder
        self._said: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def run(self, sequence: DecodingSequence) -> list[Chunk]:
        (chunk,) = super().run(sequence)
        chunk.reads = [Raw(sequence.output.draw())]
        return [chunk]

    def take(self, sequence: DecodingSequence, rows: Iterator[list[Sampled]]) -> None:
        (sampled,) = next(rows)
        assert sampled.logits is not None
        said = self._said.setdefault(sequence.output.index, [])
        said.append(_likeliest(sampled.logits))
        super().take(sequence, iter([[sampled]]))
        if sequence.output.finish_reason is not None:
            self._recorder.add([*self._job.cache.tokens(sequence.branch), sampled.token], said)
            said.clear()


class Reader(Policy):
    """A policy that decodes nothing: it reads a given text in one forward, and records."""

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
        self._recorder.add(self._text, [_likeliest(row) for row in rows if row is not None])
        self._job.outputs[0].end("stop")

    def release(self) -> None:
        if self._branch is not None:
            self._job.cache.release(self._branch)


def save(records: Sequence[Record], path: Path) -> None:
    """Write records to a safetensors file, whole or not at all."""
    lengths = torch.tensor([(len(record.tokens), record.first) for record in records], dtype=torch.int32)
    whole = {name: torch.cat([getattr(record, name) for record in records]) for name in ("tokens", "top", "logprobs")}
    with replacing(path) as unfinished:
        save_file({"lengths": lengths, **whole}, unfinished)


def load(path: Path) -> list[Record]:
    """The records of a file that `save` wrote."""
    whole = load_file(path)
    lengths, firsts = whole["lengths"].T.tolist()
    said = [length - first for length, first in zip(lengths, firsts, strict=True)]
    parts = (
        torch.split(whole["tokens"], lengths),
        firsts,
        torch.split(whole["top"], said),
        torch.split(whole["logprobs"], said),
    )
    return [Record(*fields) for fields in zip(*parts, strict=True)]
