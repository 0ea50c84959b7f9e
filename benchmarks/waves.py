"""Waves of requests that any engine can run: branches of one prompt, or the recorded requests of a search.

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

from benchmarks.engines import forget, timed_parts
from benchmarks.harness import Measured, SideError, timed
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
class WaveRequest:
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


Waves = Sequence[Sequence[WaveRequest]]


def branches(prompt: Sequence[int], count: int, new: int) -> Waves:
    """Return `count` samples of `new` tokens each after one prompt (token ids)."""
    return ((WaveRequest(tuple(prompt), (new,) * count),),)


def mixed_ids(tokenizer: Any, length: int = 1000) -> list[int]:
    """Return a prompt of `length` tokens: random words of the GSM8K task's demonstrations.

    Its continuation is unpredictable, so samples differ and an engine cannot share their computation.
    """
    words = [word for entry in load_task("gsm8k").prompts.data("demonstrations") for word in entry["question"].split()]
    text = " ".join(random.Random(0).choices(words, k=length))
    ids: list[int] = tokenizer.encode(text)[:length]
    return ids


def rotated(ids: Sequence[int], by: int) -> list[int]:
    """Rotate the tokens, so that they share no prefix with other rotations."""
    by %= len(ids)
    return [*ids[by:], *ids[:by]]


def rows(waves: Waves) -> int:
    """Return the number of tokens that an engine without prefix sharing computes, as a measure of work."""
    return sum(len(request.prompt) + length for wave in waves for request in wave for length in request.samples)


def questions(task: Task, data: Path | None, count: int) -> list[str]:
    """Return the first questions of a file, or of the task. Raises OptionError if there are no questions."""
    found = task.prompts.data("questions") if data is None else read_rows(data)
    texts = [CheckedTask(task).question_of(row) for row in itertools.islice(found, count)]
    if not texts:
        raise OptionError(f"{data} has no rows: give a file with questions, or leave --data out")
    return texts


class _Recorder:
    """A decoder that forwards a search's requests and records each batch as a wave."""

    def __init__(self, decoder: LocalDecoder) -> None:
        self.waves: list[tuple[WaveRequest, ...]] = []
        self._decoder = decoder

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        completions = self._decoder.generate(requests)
        remaining, wave = iter(completions), []
        for one in requests:
            lengths = tuple(len(completion.tokens) for completion in itertools.islice(remaining, one.sampling.n))
            prompt = tuple(self._decoder.engine.codec.encode_prompt(one.prompt))
            new = () if one.choices else lengths
            wave.append(WaveRequest(prompt, new, one.choices, one.close_choices, one.sampling.seed))
        self.waves.append(tuple(wave))
        return completions


def record(decoder: LocalDecoder, task: Task, question: str, thoughts: int, breadth: int, depth: int) -> Waves:
    """Return the waves of a breadth-first search with `thoughts` samples per state, from an empty cache."""
    recorder = _Recorder(decoder)
    decoder.engine.call(decoder.engine.cache.clear)
    search: Any = {"search": BFS(thoughts=thoughts, breadth=breadth, depth=depth), "prompts": "papers"}
    run_to_end(asolve(task, question, decoder=recorder, generator="sample", evaluator="likelihood", **search))
    return recorder.waves


def requests(wave: Sequence[WaveRequest]) -> Iterator[Request]:
    """Yield a wave's requests at T = 1, ignoring the end of text. Samples of equal length share one request."""
    for one in wave:
        if one.choices:
            scored: Any = {"choices": one.choices, "close_choices": one.close_choices}
            yield Request(prompt=one.prompt, purpose="evaluate", sampling=Sampling(seed=one.seed), **scored)
            continue
        equal = len(set(one.new)) == 1
        for i, length in enumerate(one.new[:1] if equal else one.new):
            repeated: Any = {"n": len(one.new) if equal else 1, "seed": (one.seed + i) % 2**64}
            sampling = Sampling(max_tokens=length, temperature=1.0, ignore_eos=True, **repeated)
            yield Request(prompt=one.prompt, sampling=sampling)


def replay(decoder: LocalDecoder, waves: Waves) -> Measured:
    """Run every wave packed, from an empty cache, and score choices exactly.

    For branches of one prompt, "prefill" has the seconds until every sample had its first token.
    """
    forget(decoder)
    batches = [list(requests(wave)) for wave in waves]
    with timed_parts(decoder.engine) as timeline:
        seconds, done = timed(lambda: [completion for batch in batches for completion in decoder.generate(batch)])
    measured = checked(seconds, sum(len(completion.tokens) for completion in done), waves)
    if len(waves) == len(waves[0]) == 1:
        sampled = [span.ended for span in timeline.spans if span.kind == "sampling"]
        measured["prefill"] = sampled[-waves[0][0].new[0]] - timeline.spans[0].began
    return measured


def checked(seconds: float, tokens: int, waves: Waves, scores: bool = True) -> Measured:
    """Return the measurement of an engine that scores choices, or not. Raises SideError for other numbers of tokens."""
    wanted = sum(sum(one.new if scores else one.samples) for wave in waves for one in wave)
    if tokens != wanted:
        raise SideError(f"it sampled {tokens} tokens instead of {wanted}")
    return {"seconds": seconds, "tokens": tokens}
