"""Workloads: branches of one prompt, and whole searches, as waves of requests that any engine can make.

A wave holds the requests that don't depend on one another: a level's first parts of thoughts, then their second parts,
then the evaluations. Each has its prompt as token ids and, for every sample, how many new tokens it has.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tot.bench.harness import timed
from tot.decoders.decoder import LocalDecoder
from tot.decoders.errors import OptionError
from tot.decoders.request import Completion, Request, Sampling
from tot.evaluation.data import rows as read_rows
from tot.registry import load_task
from tot.search import BFS
from tot.solver import solve
from tot.task.checked import CheckedTask
from tot.task.task import Task


@dataclass(frozen=True, slots=True)
class AskedWork:
    """One request of a wave."""

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


Waves = Sequence[Sequence[AskedWork]]


def branches(prompt: Sequence[int], count: int, new: int) -> Waves:
    """`count` samples of `new` tokens each after one prompt (token ids)."""
    return ((AskedWork(tuple(prompt), (new,) * count),),)


def new_tokens(waves: Waves) -> int:
    """Tokens that the waves' samples have to draw."""
    return sum(sum(asked.new) for wave in waves for asked in wave)


def drawn(waves: Waves) -> int:
    """The same of an engine that can't score choices: one for each evaluation, too."""
    return sum(sum(asked.samples) for wave in waves for asked in wave)


def rows(waves: Waves) -> int:
    """Tokens that an engine which shares nothing computes: what the work of two searches is compared by."""
    return sum(len(asked.prompt) + length for wave in waves for asked in wave for length in asked.samples)


def requests(wave: Sequence[AskedWork]) -> Iterator[Request]:
    """A wave as requests at T = 1 that ignore the end of text: samples of equal length are one request."""
    for asked in wave:
        if asked.choices:
            options = {"choices": asked.choices, "close_choices": asked.close_choices}
            yield Request(prompt=asked.prompt, purpose="evaluate", sampling=Sampling(seed=asked.seed), **options)
        elif len(set(asked.new)) == 1:
            yield _request(asked, asked.new[0], 0, len(asked.new))
        else:
            yield from (_request(asked, length, i, 1) for i, length in enumerate(asked.new))


def _request(asked: AskedWork, length: int, sample: int, n: int) -> Request:
    seed = (asked.seed + sample) % 2**64
    sampling = Sampling(max_tokens=length, temperature=1.0, n=n, seed=seed, ignore_eos=True)
    return Request(prompt=asked.prompt, sampling=sampling)


def record(
    decoder: LocalDecoder, task: Task, question: str, thoughts: int, **options: Any
) -> tuple[list[tuple[AskedWork, ...]], float]:
    """The waves of a breadth-first search with `thoughts` samples a state and scored evaluations, from an empty store
    of keys, and the seconds that the search took with all that belongs to it. `options` go to `BFS`."""
    recorder = _Recorder(decoder)
    decoder.engine.call(decoder.engine.cache.clear)
    search: Any = {"search": BFS(thoughts=thoughts, **options), "generator": "sample", "evaluator": "likelihood"}
    seconds, _ = timed(lambda: solve(task, question, decoder=recorder, prompts="papers", **search))
    return recorder.waves, seconds


class _Recorder:
    """Passes a search's requests on, each batch a wave, and notes what came of them."""

    def __init__(self, decoder: LocalDecoder) -> None:
        self.waves: list[tuple[AskedWork, ...]] = []
        self._decoder = decoder

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        done = self._decoder.generate(requests)
        encode, left, wave = self._decoder.engine.codec.encode_prompt, iter(done), []
        for one in requests:
            lengths = tuple(len(got.tokens) for got in itertools.islice(left, one.sampling.n))
            new = () if one.choices else lengths
            wave.append(AskedWork(tuple(encode(one.prompt)), new, one.choices, one.close_choices, one.sampling.seed))
        self.waves.append(tuple(wave))
        return done


def mixed_ids(tokenizer: Any, length: int = 1000) -> list[int]:
    """A prompt of so many tokens: words of the GSM8K task's demonstrations, drawn at random. What follows can't be
    foreseen, so samples differ: what they have in common an engine may compute once."""
    words = [word for entry in load_task("gsm8k").data("demonstrations") for word in entry["question"].split()]
    text = " ".join(random.Random(0).choices(words, k=length))
    ids: list[int] = tokenizer(text)["input_ids"][:length]
    return ids


def rotated(ids: Sequence[int], by: int) -> list[int]:
    """The same tokens from another one on: they share no beginning with other rotations."""
    by %= len(ids)
    return [*ids[by:], *ids[:by]]


def questions(task: Task, data: Path | None, count: int) -> list[str]:
    """The first questions of a file, or the task's own. Raises OptionError where there are none."""
    given = task.data("questions") if data is None else read_rows(data)
    found = [CheckedTask(task).question_of(row) for row in itertools.islice(given, count)]
    if not found:
        raise OptionError(f"{data} has no rows: give a file with questions, or leave --data out")
    return found
