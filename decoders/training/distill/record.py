"""Record a target model's texts, hidden states and most likely tokens at each position, to train a draft.

The target's own texts are recorded while they are decoded, from logits and states that decoding computes anyway. A
given text is read some rows at a time. Records are saved as safetensors files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
_ROWS = 128
"""Maximum positions of a given text per forward pass, each with a row of logits."""


class Record(NamedTuple):
    """Consecutive tokens of a text, and the target's states and distribution before each of them."""

    tokens: Tensor
    """(length,) int32."""
    top: Tensor
    """(length, TOP) int32: the most likely tokens at each position."""
    logprobs: Tensor
    """(length, TOP) float16: their logprobs (nats)."""
    states: Tensor
    """(length, layers, hidden) float16: the states that the logprobs were computed from."""


class Recorder:
    """Collects records with the states of `layers`."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = layers
        self.records: list[Record] = []

    def add(self, tokens: Sequence[Record]) -> None:
        """Add a text, given as one record for each token."""
        self.records.append(Record(*(torch.stack(parts) for parts in zip(*tokens, strict=True))))

    def policy(self, job: Job) -> RecordedAutoregressive:
        """Return a policy that decodes as `ar` does and records."""
        return RecordedAutoregressive(job, self)

    def read(self, engine: Engine, texts: Sequence[Sequence[int]]) -> None:
        """Record given texts (token ids). Blocks until all are done."""
        for text in texts:  # one at a time, because each takes _ROWS rows of logits
            if len(text) > 1:
                engine.submit(Request(prompt=tuple(text[:1])), partial(Reader, text=text, recorder=self)).result()


def _record(token: int, logits: Any, states: Any) -> Record:
    """Return the record of one token, without the first dimension."""
    count = min(TOP, len(logits))
    top = np.argpartition(logits, -count)[-count:].astype(np.int32)
    top = top[np.argsort(-logits[top], kind="stable")]
    likely = logits[top[0]]
    logprobs = logits[top] - likely - np.log(np.exp(logits - likely).sum())
    parts = torch.from_numpy(top), torch.from_numpy(logprobs).half(), torch.from_numpy(states)
    return Record(torch.tensor(token, dtype=torch.int32), *parts)


class RecordedAutoregressive(Autoregressive):
    """Decodes as `Autoregressive` does, and records each text and its distributions."""

    def __init__(self, job: Job, recorder: Recorder) -> None:
        super().__init__(job)
        self._recorder, self.layers = recorder, recorder.layers
        self._tokens: dict[int, list[Record]] = {}
        """By sample: the tokens of its unfinished text."""

    def run(self, sequence: DecodingSequence) -> list[Chunk]:
        (chunk,) = super().run(sequence)
        chunk.reads = [Raw(sequence.output.draw())]
        return [chunk]

    def take(self, sequence: DecodingSequence, rows: Iterator[list[Sampled]]) -> None:
        (sampled,) = next(rows)
        sampled, states = self.split(sampled)
        index = sequence.output.index
        self._tokens.setdefault(index, []).append(_record(sampled.token, sampled.logits, states))
        super().take(sequence, iter([[sampled]]))
        if sequence.output.finish_reason is not None:
            self._recorder.add(self._tokens.pop(index))


class Reader(Policy):
    """A policy that records a given text, some rows of logits at a time, and decodes nothing."""

    def __init__(self, job: Job, text: Sequence[int], recorder: Recorder) -> None:
        self._job, self._text, self._recorder = job, text, recorder
        self.layers = recorder.layers
        self._branch: Branch | None = None
        self._tokens: list[Record] = []

    def growth(self) -> int:
        return len(self._text) - len(self._tokens)

    def propose(self) -> list[Chunk]:
        if self._branch is None:
            self._branch = self._job.cache.fork(self._job.branch)
        start = len(self._branch)
        self._job.cache.extend(self._branch, self._text[start:-1][:_ROWS])
        return [Chunk(self._branch, start, len(self._branch), [Raw()] * (len(self._branch) - start))]

    def commit(self, reads: list[list[Sampled]]) -> None:
        following = self._text[1 + len(self._tokens) :]
        self._tokens += [
            _record(token, one.logits, one.states) for token, one in zip(following, reads[0], strict=False)
        ]
        if len(self._tokens) == len(self._text) - 1:
            self._recorder.add(self._tokens)
            self._job.outputs[0].end("stop")

    def release(self) -> None:
        if self._branch is not None:
            self._job.cache.release(self._branch)


def save(records: Sequence[Record], path: Path) -> None:
    """Write records to a safetensors file atomically."""
    parts = zip(*records, strict=True)
    whole = {name: torch.cat(part) for name, part in zip(Record._fields, parts, strict=True)}
    lengths = torch.tensor([len(record.tokens) for record in records], dtype=torch.int32)
    with replacing(path) as file:
        save_file({"lengths": lengths, **whole}, file.name)


def load(path: Path) -> list[Record]:
    """Load the records of a file that `save` wrote."""
    whole = load_file(path)
    lengths = whole["lengths"].tolist()
    return [
        Record(*parts) for parts in zip(*(torch.split(whole[name], lengths) for name in Record._fields), strict=True)
    ]
