"""Workloads: branches of one prompt, and whole searches, as waves of requests that any engine can run.

A wave holds independent requests: the first parts of a level's thoughts, then their second parts, then the evaluations.
Each request has its prompt as token ids and the number of new tokens of every sample.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tot.api import asolve
from tot.decoders.decoder import LocalDecoder
from tot.decoders.errors import OptionError
from tot.decoders.request import Completion, Request, Sampling
from tot.evaluation.data import rows as read_rows
from tot.registry import load_task
from tot.running import run_to_end
from tot.search.bfs import BFS
from tot.task.checked import CheckedTask
from tot.task.task import Task


@dataclass(frozen=True, slots=True)
class AskedWork:
    """One request of a wave."""

    prompt: tuple[int, ...]
    new: tuple[int, ...] = ()
    """New tokens of each sample; empty if choices are scored."""
    choices: tuple[str, ...] = ()
    close_choices: bool = False
    seed: int = 0

    @property
    def samples(self) -> tuple[int, ...]:
        """New tokens of each sample for an engine that cannot score choices: it samples one token instead."""
        return self.new or (1,)


Waves = Sequence[Sequence[AskedWork]]


def branches(prompt: Sequence[int], count: int, new: int) -> Waves:
    """Return `count` samples of `new` tokens each after one prompt (token ids)."""
    return ((AskedWork(tuple(prompt), (new,) * count),),)


def new_tokens(waves: Waves) -> int:
    """Return the number of tokens that the waves sample."""
    return sum(sum(request.new) for wave in waves for request in wave)


def drawn(waves: Waves) -> int:
    """Return `new_tokens` for an engine that cannot score choices: each evaluation adds one token."""
    return sum(sum(request.samples) for wave in waves for request in wave)


def rows(waves: Waves) -> int:
    """Return the number of tokens that an engine without prefix sharing computes, as a measure of work."""
    return sum(len(request.prompt) + length for wave in waves for request in wave for length in request.samples)


def requests(wave: Sequence[AskedWork]) -> Iterator[Request]:
    """Yield a wave's requests at T = 1, ignoring the end of text. Samples of equal length share one request."""
    for work in wave:
        if work.choices:
            options = {"choices": work.choices, "close_choices": work.close_choices}
            yield Request(prompt=work.prompt, purpose="evaluate", sampling=Sampling(seed=work.seed), **options)
        elif len(set(work.new)) == 1:
            yield _request(work, work.new[0], 0, len(work.new))
        else:
            yield from (_request(work, length, i, 1) for i, length in enumerate(work.new))


def _request(request: AskedWork, length: int, sample: int, n: int) -> Request:
    seed = (request.seed + sample) % 2**64
    sampling = Sampling(max_tokens=length, temperature=1.0, n=n, seed=seed, ignore_eos=True)
    return Request(prompt=request.prompt, sampling=sampling)


def record(
    decoder: LocalDecoder, task: Task, question: str, thoughts: int, **options: Any
) -> list[tuple[AskedWork, ...]]:
    """Return the waves of a breadth-first search.

    The search takes `thoughts` samples per state, scores evaluations and starts with an empty cache. `options` go to
    `BFS`.
    """
    recorder = _Recorder(decoder)
    decoder.engine.call(decoder.engine.cache.clear)
    search: Any = {"search": BFS(thoughts=thoughts, **options), "generator": "sample", "evaluator": "likelihood"}
    run_to_end(asolve(task, question, decoder=recorder, prompts="papers", **search))
    return recorder.waves


class _Recorder:
    """A decoder that forwards a search's requests and records each batch as a wave."""

    def __init__(self, decoder: LocalDecoder) -> None:
        self.waves: list[tuple[AskedWork, ...]] = []
        self._decoder = decoder

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        completions = self._decoder.generate(requests)
        encode, remaining, wave = self._decoder.engine.codec.encode_prompt, iter(completions), []
        for request in requests:
            lengths = tuple(len(completion.tokens) for completion in itertools.islice(remaining, request.sampling.n))
            new = () if request.choices else lengths
            wave.append(
                AskedWork(
                    tuple(encode(request.prompt)), new, request.choices, request.close_choices, request.sampling.seed
                )
            )
        self.waves.append(tuple(wave))
        return completions


def mixed_ids(tokenizer: Any, length: int = 1000) -> list[int]:
    """Return a prompt of `length` tokens: random words of the GSM8K task's demonstrations.

    Its continuation is unpredictable, so samples differ and an engine cannot share their computation.
    """
    words = [word for entry in load_task("gsm8k").data("demonstrations") for word in entry["question"].split()]
    text = " ".join(random.Random(0).choices(words, k=length))
    ids: list[int] = tokenizer.encode(text)[:length]
    return ids


def rotated(ids: Sequence[int], by: int) -> list[int]:
    """Rotate the tokens, so that they share no prefix with other rotations."""
    by %= len(ids)
    return [*ids[by:], *ids[:by]]


def questions(task: Task, data: Path | None, count: int) -> list[str]:
    """Return the first questions of a file, or of the task. Raises OptionError if there are no questions."""
    all_rows = task.data("questions") if data is None else read_rows(data)
    texts = [CheckedTask(task).question_of(row) for row in itertools.islice(all_rows, count)]
    if not texts:
        raise OptionError(f"{data} has no rows: give a file with questions, or leave --data out")
    return texts
