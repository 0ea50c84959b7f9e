"""`tot cllm eval`: what a consistency LLM is worth beside its base (CLLM, tables 1 and 3)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tot.decoders.decoder import load_decoder
from tot.decoders.engine.engine import Engine
from tot.decoders.errors import OptionError
from tot.decoders.files import write_json
from tot.decoders.local import LocalDecoder
from tot.decoders.models.loading import load_model
from tot.decoders.request import Completion
from tot.decoders.training.cllm.trajectories import stationary, windows
from tot.evaluation.estimate import estimate, spread
from tot.machine import describe
from tot.training.questions import NOTHING_TO_ASK, Question


@dataclass
class _Side:
    """A model with a decoder, and what was measured of it, question by question."""

    name: str
    decoder: LocalDecoder
    speeds: list[float] = field(default_factory=list)
    """New tokens a second."""
    answers: list[Any] = field(default_factory=list)
    texts: list[Completion] = field(default_factory=list)

    def ask(self, question: Question) -> None:
        began = time.perf_counter()
        (completion,) = self.decoder.generate([question.request])
        self.speeds.append(len(completion.tokens) / (time.perf_counter() - began))
        self.answers.append(question.answer(completion.text))
        self.texts.append(completion)

    @property
    def tokens_per_forward(self) -> float:
        return sum(len(text.tokens) for text in self.texts) / sum(text.usage.forwards for text in self.texts)


def evaluate(
    model: str, base: str, asked: Sequence[Question], n: int, dtype: str, out: Path | None, console: Console
) -> None:
    """AR, Jacobi and lookahead on the base and on the consistency LLM, one request at a time, in turns: speed of
    decoding, tokens a forward, score and answers unchanged; then how windows converge."""
    if not asked:
        raise OptionError(NOTHING_TO_ASK)
    numbers: dict[str, Any] = {}
    methods: tuple[tuple[str, dict[str, Any]], ...] = (("ar", {}), ("jacobi", {"n": n}), ("lookahead", {}))
    engines = {name: Engine(load_model(name, dtype=dtype)) for name in dict.fromkeys((base, model))}
    try:
        sides = [
            _Side(f"{name} + {method}", load_decoder(method, engine=engine, **options))
            for name, engine in engines.items()
            for method, options in methods
        ]
        counted = {
            name: load_decoder("jacobi", engine=engine, n=n, adapt=False, trajectory=True)
            for name, engine in engines.items()
        }
        for side in sides:  # a warm-up
            side.decoder.generate([asked[0].request])
        for number, question in enumerate(asked):
            one_token = question.request.sampling.model_copy(update={"max_tokens": 1})
            for decoder in counted.values():  # prompts are computed beforehand, so only decoding is timed
                decoder.generate([question.request.model_copy(update={"sampling": one_token})])
            turn = number % len(sides)
            for side in (*sides[turn:], *sides[:turn]):
                side.ask(question)
        first = next(iter(engines.values()))
        console.print(f"{describe(first.loaded.device, first.loaded.dtype)}; {len(asked)} questions, one at a time")
        numbers["table 1"] = _first_table(sides, asked, console)
        numbers["table 3"] = _third_table(counted, asked, n, console)
    finally:
        for engine in engines.values():
            engine.close()
    if out is not None:
        write_json(out, numbers)


def _first_table(sides: Sequence[_Side], asked: Sequence[Question], console: Console) -> dict[str, Any]:
    scored = [question.score for question in asked if question.score is not None]
    table = Table("model + decoder", "tokens/s", "speedup", "tokens a forward", "score", "answers of base + ar")
    numbers = {}
    base = sides[0]
    for place, side in enumerate(sides):
        own_ar = sides[place - place % 3]
        ratios = [ours / theirs for ours, theirs in zip(side.speeds, own_ar.speeds, strict=True)]
        same = [
            question.same(ours) == question.same(theirs) if ours is not None and theirs is not None else ours is theirs
            for question, ours, theirs in zip(asked, side.answers, base.answers, strict=True)
        ]
        scores = [
            question.score(answer)
            for question, answer in zip(asked, side.answers, strict=True)
            if question.score is not None
        ]
        table.add_row(
            side.name,
            spread(side.speeds),
            f"{statistics.median(ratios):.2f}x",
            f"{side.tokens_per_forward:.2f}",
            estimate(scores).format(".0%") if scored else "",
            estimate([float(one) for one in same]).format(".0%"),
        )
        numbers[side.name] = {
            "speeds": side.speeds,
            "speedup": statistics.median(ratios),
            "tokens_per_forward": side.tokens_per_forward,
            "scores": scores,
            "unchanged": same,
        }
    console.print(table)
    return numbers


def _third_table(
    decoders: dict[str, LocalDecoder], asked: Sequence[Question], n: int, console: Console
) -> dict[str, Any]:
    table = Table("model", f"tokens a forward, windows of {n} fed whole", "stationary tokens a window")
    numbers = {}
    for name, decoder in decoders.items():
        texts = [decoder.generate([question.request])[0] for question in asked]
        found = [
            stationary(points, fixed) for text in texts for _, points, fixed in windows(text, n) if len(fixed) == n
        ]
        forwards = sum(text.usage.forwards for text in texts)
        numbers[name] = {
            "tokens_per_forward": sum(len(text.tokens) for text in texts) / forwards,
            "stationary": statistics.mean(found) if found else 0.0,
        }
        table.add_row(name, f"{numbers[name]['tokens_per_forward']:.2f}", f"{numbers[name]['stationary']:.2f}")
    console.print(table)
    return numbers
