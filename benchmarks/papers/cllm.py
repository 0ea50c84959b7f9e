"""The benchmark `cllm`: compare a consistency LLM with its base model (CLLM, tables 1 and 3).

AR, Jacobi and lookahead decode on both models, one question per round, after prefill. Each question gets a new decoder,
so no pool or statistics hold its answer. Then the convergence of whole Jacobi windows is measured.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from itertools import islice
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness import RATE, Bench, Measured, Measurements, Metric, Side, by_metric, timed
from benchmarks.options import CLLMOptions
from tot.decoders.decoder import LocalDecoder, load_decoder
from tot.decoders.engine.engine import Engine
from tot.decoders.errors import OptionError
from tot.decoders.machine import describe
from tot.decoders.models.loading import load_model
from tot.decoders.training.cllm.trajectories import stationary, windows
from tot.evaluation.estimate import estimate
from tot.training.questions import NOTHING_TO_ASK, TrainingQuestion, questions_of


def run(options: CLLMOptions, console: Console) -> None:
    """Run the benchmark and print the tables. Raises OptionError if there are no questions."""
    all_questions = questions_of(options.questions, options.max_tokens)
    if options.shuffle_seed is not None:
        shuffled = list(all_questions)
        random.Random(options.shuffle_seed).shuffle(shuffled)
        all_questions = iter(shuffled)
    questions = list(islice(all_questions, options.offset, options.offset + options.limit))
    if not questions:
        raise OptionError(NOTHING_TO_ASK)
    names = list(dict.fromkeys((options.base, options.model)))
    with ExitStack() as stack:
        engines = {name: stack.enter_context(Engine(load_model(name, dtype=options.dtype))) for name in names}
        first = engines[options.base].loaded
        bench = Bench(options, console, describe(first.device, first.dtype))
        methods: dict[str, dict[str, Any]] = {
            "ar": {},
            "jacobi": {"n": options.n},
            "jacobi, whole": {"n": options.n, "adapt": False},
            "lookahead": {},
            "lookahead, whole": {"window": 15, "ngram": 5, "guesses": 15, "adapt": False},
        }
        sides = [
            Side(f"{name} + {method}", partial(answered, engine, method.partition(",")[0], method_options))
            for name, engine in engines.items()
            for method, method_options in methods.items()
        ]
        whole = {
            name: load_decoder("jacobi", engine=engine, n=options.n, adapt=False, trajectory=True)
            for name, engine in engines.items()
        }

        def computed(_: Any, turn: int) -> TrainingQuestion:
            """Prefill a question's prompt, so that only decoding is timed."""
            request = questions[turn].request
            sampling = request.sampling.model_copy(update={"max_tokens": 1})
            for decoder in whole.values():
                decoder.generate([request.model_copy(update={"sampling": sampling})])
            return questions[turn]

        bench.compare(
            "questions, one at a time",
            sides,
            computed,
            rounds=len(questions),
            warm_up=lambda _: questions[0],
            table=partial(_speed, [f"{name} + ar" for name in names]),
        )
        metrics = [
            Metric(f"fast-forwarded tokens a forward, windows of {options.n}", _tokens_a_forward, _mean),
            Metric("stationary tokens a window", lambda measured: measured["stationary"], _mean),
        ]
        sides = [Side(name, partial(converged, decoder, options.n)) for name, decoder in whole.items()]
        bench.compare("windows", sides, lambda _, turn: questions[turn], rounds=len(questions), metrics=metrics)


def answered(engine: Engine, method: str, options: Mapping[str, Any], question: TrainingQuestion) -> Measured:
    """Decode one question with a new decoder; return its cost, its answer and the score."""
    with load_decoder(method, engine=engine, **options) as decoder:
        seconds, (completion,) = timed(lambda: decoder.generate([question.request]))
    answer = question.answer(completion.text)
    return {
        "seconds": seconds,
        "tokens": len(completion.tokens),
        "forwards": completion.usage.forwards,
        "score": question.score(answer),
        "answer": None if answer is None else str(question.same(answer)),
    }


def converged(decoder: LocalDecoder, n: int, question: TrainingQuestion) -> Measured:
    """Measure how the windows of one completion converge to their fixed points."""
    seconds, (completion,) = timed(lambda: decoder.generate([question.request]))
    stationary_tokens = [stationary(points, fixed) for _, points, fixed in windows(completion, n) if len(fixed) == n]
    counts = {"tokens": len(completion.tokens), "forwards": completion.usage.forwards}
    return {"seconds": seconds, **counts, "stationary": fmean(stationary_tokens) if stationary_tokens else None}


def _speed(ar: list[str], results: Measurements) -> Table:
    """CLLM, table 1, with the share of answers equal to the base model's `ar` answers."""
    base = results.of(ar[0])
    for cell in results.cells:
        cell["same"] = float(cell["answer"] == base.get(cell["round"], cell)["answer"])
    metrics = [
        RATE,
        Metric("tokens a forward", _tokens_a_forward, _mean),
        Metric("score", lambda measured: measured["score"], _share),
        Metric(f"answers of {ar[0]}", lambda measured: measured["same"], _share),
    ]
    return by_metric(results, metrics, ar, "decoding")


def _tokens_a_forward(measured: Measured) -> float:
    return float(measured["tokens"] / measured["forwards"])


def _mean(values: Any) -> str:
    return f"{fmean(values):.2f}"


def _share(values: Any) -> str:
    return estimate(values).format(".0%")
