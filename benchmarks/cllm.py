"""The benchmark `cllm`: compare a consistency LLM with its base model (CLLM, tables 1 and 3).

AR, Jacobi and lookahead decode on both models, one question per round, after prefill. Each question gets a new decoder,
so no pool or statistics hold its answer. Then the convergence of whole Jacobi windows is measured.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from statistics import fmean
from typing import Any, ClassVar

from pydantic import Field
from rich.console import Console
from rich.table import Table

from benchmarks.harness import RATE, Bench, BenchOptions, Cells, Measured, Metric, by_metric, timed
from benchmarks.rationales import Question, scored
from tot.decoders.decoder import LocalDecoder, load_decoder
from tot.decoders.engine.engine import Engine
from tot.decoders.errors import OptionError
from tot.decoders.machine import describe
from tot.decoders.models.loading import load_model
from tot.decoders.training.cllm.trajectories import windows
from tot.evaluation.estimate import estimate
from tot.evaluation.solutions import NO_QUESTIONS, solutions

WINDOW = 16
METHODS: dict[str, dict[str, Any]] = {
    "ar": {},
    "jacobi": {"n": WINDOW},
    "jacobi, whole": {"n": WINDOW, "adapt": False},
    "lookahead": {},
    "lookahead, whole": {"window": 15, "ngram": 5, "guesses": 15, "adapt": False},
}


class Options(BenchOptions):
    """Compare a consistency LLM with its base: speed, tokens per forward, score, unchanged answers."""

    extends: ClassVar = "limit"
    model: str = Field(description="The consistency LLM.")
    base: str = Field("smollm2-135m", description="Its base model.")
    questions: list[str] = Field(description="TASK=FILE: questions to answer with whole solutions. Repeat for more.")
    max_tokens: int = Field(128, ge=2, description="Maximum new tokens per solution.")
    limit: int = Field(50, ge=1, description="Number of questions.")
    offset: int = Field(0, ge=0, description="Questions to skip first.")
    shuffle_seed: int | None = Field(None, ge=0, description="Seed for a random order of the questions.")


def _mean(values: Any) -> str:
    return f"{fmean(values):.2f}"


def _share(values: Any) -> str:
    return estimate(values).format(".0%")


_TOKENS_A_FORWARD = Metric("tokens a forward", lambda cell: float(cell["tokens"] / cell["forwards"]), _mean)
_CONVERGENCE = [
    Metric(f"fast-forwarded tokens a forward, windows of {WINDOW}", _TOKENS_A_FORWARD.of, _mean),
    Metric("stationary tokens a window", lambda cell: cell["stationary"], _mean),
]


def run(asked: Options, console: Console) -> None:
    """Run the benchmark and print the tables. Raises OptionError if there are no questions."""
    found = solutions(asked.questions, asked.max_tokens)
    if asked.shuffle_seed is not None:
        every = list(found)
        random.Random(asked.shuffle_seed).shuffle(every)
        found = iter(every)
    questions = [scored(one) for one in islice(found, asked.offset, asked.offset + asked.limit)]
    if not questions:
        raise OptionError(NO_QUESTIONS)
    with ExitStack() as stack:
        names = dict.fromkeys((asked.base, asked.model))
        engines = {name: stack.enter_context(Engine(load_model(name))) for name in names}
        first = engines[asked.base].loaded
        bench = Bench(asked, console, describe(first.device, first.dtype))
        whole = {
            name: load_decoder("jacobi", engine=engine, n=WINDOW, adapt=False, trajectory=True)
            for name, engine in engines.items()
        }

        def computed(_: Any, turn: int) -> Question:
            """Prefill a question's prompt, so that only decoding is timed."""
            request = questions[turn].request
            sampling = request.sampling.model_copy(update={"max_tokens": 1})
            for decoder in whole.values():
                decoder.generate([request.model_copy(update={"sampling": sampling})])
            return questions[turn]

        bench.compare(
            "questions, one at a time",
            {
                f"{name} + {method}": partial(answered, engine, method.partition(",")[0], options)
                for name, engine in engines.items()
                for method, options in METHODS.items()
            },
            computed,
            partial(_speed, ar=[f"{name} + ar" for name in names]),
            rounds=len(questions),
            warm_up=True,
        )
        bench.compare(
            "windows",
            {name: partial(converged, decoder) for name, decoder in whole.items()},
            questions,
            partial(by_metric, metrics=_CONVERGENCE, title="windows"),
        )


def answered(engine: Engine, method: str, options: Mapping[str, Any], question: Question) -> Measured:
    """Decode one question with a new decoder; return its cost, its answer and the score."""
    with load_decoder(method, engine=engine, **options) as decoder:
        seconds, (completion,) = timed(lambda: decoder.generate([question.request]))
    answer = question.answer(completion)
    counts = {"tokens": len(completion.tokens), "forwards": completion.usage.forwards}
    same = question.read(answer)
    return {"seconds": seconds, **counts, "score": question.score(answer), "answer": same}


def converged(decoder: LocalDecoder, question: Question) -> Measured:
    """Measure how the windows of one completion converge to their fixed points."""
    seconds, (completion,) = timed(lambda: decoder.generate([question.request]))
    found = [stationary(points, fixed) for _, points, fixed in windows(completion, WINDOW) if len(fixed) == WINDOW]
    counts = {"tokens": len(completion.tokens), "forwards": completion.usage.forwards}
    return {"seconds": seconds, **counts, "stationary": fmean(found) if found else None}


def stationary(points: Sequence[Sequence[int]], fixed: Sequence[int]) -> int:
    """Count the stationary tokens of a window (section 3.3, Table 3).

    They are guessed correctly while an earlier token is wrong, and never change again.
    """
    count = 0
    for position, correct in enumerate(fixed):
        wrong = [i for i, point in enumerate(points) if point[position] != correct]
        early = [*points, fixed][wrong[-1] + 1 if wrong else 0]
        count += list(early[:position]) != list(fixed[:position])
    return count


def _speed(cells: Cells, ar: list[str]) -> Table:
    """CLLM, table 1, with the share of answers equal to the base model's `ar` answers."""
    base = cells.of(ar[0])
    metrics = [
        RATE,
        _TOKENS_A_FORWARD,
        Metric("score", lambda cell: cell["score"], _share),
        Metric(
            f"answers of {ar[0]}",
            lambda cell: float(cell["answer"] == base.get(cell["round"], cell)["answer"]),
            _share,
        ),
    ]
    return by_metric(cells, metrics, ar, "decoding")
