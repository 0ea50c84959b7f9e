"""Waves: a whole search as the requests that it made, to be made again by any engine.

A wave holds the requests that don't depend on one another: a level's first parts of thoughts, then their second parts,
then the evaluations. Each has its prompt as token ids and, for every sample, how many new tokens it had.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tot.decoders.budget import Meter
from tot.decoders.local import LocalDecoder
from tot.decoders.request import Completion, Request
from tot.search import BFS
from tot.solver import solve
from tot.task import Task


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a search."""

    prompt: tuple[int, ...]
    new: tuple[int, ...] = ()
    """New tokens of each sample; none where choices were scored."""
    choices: tuple[str, ...] = ()
    close_choices: bool = False
    seed: int = 0

    @property
    def samples(self) -> tuple[int, ...]:
        """What an engine that scores no choices does instead: it reads one token after the prompt."""
        return self.new or (1,)


Wave = tuple[Asked, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """A search's waves, and the seconds that the search took with all that belongs to it."""

    waves: tuple[Wave, ...]
    seconds: float


def new_tokens(waves: Sequence[Wave]) -> int:
    """Tokens that the waves' samples have to draw."""
    return sum(sum(asked.new) for wave in waves for asked in wave)


def rows(waves: Sequence[Wave]) -> int:
    """Tokens that an engine which shares nothing computes: what the work of two searches is compared by."""
    return sum(len(asked.prompt) + length for wave in waves for asked in wave for length in asked.samples)


def record(decoder: LocalDecoder, task: Task, question: str, thoughts: int, seed: int = 0, **options: Any) -> Recording:
    """A breadth-first search with `thoughts` samples a state and scored evaluations, from an empty store of keys.

    `options` go to `BFS` (breadth, depth).
    """
    recorder = _Recorder(decoder)
    decoder.engine.call(decoder.engine.cache.clear)
    began = time.perf_counter()
    solve(
        task,
        question,
        decoder=recorder,
        search=BFS(thoughts=thoughts, **options),
        generator="sample",
        evaluator="likelihood",
        seed=seed,
    )
    return Recording(tuple(recorder.waves), time.perf_counter() - began)


class _Recorder:
    """Passes a search's requests on, each batch a wave, and notes what came of them."""

    def __init__(self, decoder: LocalDecoder) -> None:
        self.waves: list[Wave] = []
        self._decoder = decoder

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        done = self._decoder.generate(requests)
        flat = iter(done)
        self._note(requests, [[next(flat) for _ in range(request.sampling.n)] for request in requests])
        return done

    async def complete(self, requests: Sequence[Request], meter: Meter | None = None) -> list[list[Completion]]:
        done = await self._decoder.complete(requests, meter)
        self._note(requests, done)
        return done

    def _note(self, requests: Sequence[Request], done: Sequence[Sequence[Completion]]) -> None:
        encode = self._decoder.engine.codec.encode_prompt
        self.waves.append(
            tuple(
                Asked(
                    tuple(encode(request.prompt)),
                    () if request.choices else tuple(len(completion.tokens) for completion in completions),
                    request.choices,
                    request.close_choices,
                    request.sampling.seed,
                )
                for request, completions in zip(requests, done, strict=True)
            )
        )
