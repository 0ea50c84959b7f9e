"""`tot cllm eval`: what a consistency LLM is worth beside its base (CLLM, tables 1 and 3).

AR, Jacobi and lookahead on both models, one question a round, its prompt computed beforehand; then how windows of
Jacobi iteration converge that are fed whole.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from functools import partial
from itertools import islice
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from tot.bench.harness import RATE, Bench, Measured, Measurements, Metric, Side, by_metric, timed
from tot.bench.options import CLLMOptions
from tot.decoders.decoder import LocalDecoder, load_decoder
from tot.decoders.engine.engine import Engine
from tot.decoders.errors import OptionError
from tot.decoders.machine import describe
from tot.decoders.models.loading import load_model
from tot.decoders.training.cllm.trajectories import stationary, windows
from tot.evaluation.estimate import estimate
from tot.training.questions import NOTHING_TO_ASK, TrainingQuestion, questions_of


def run(options: CLLMOptions, console: Console) -> None:
    """Measure, and print the tables. Raises OptionError where there is nothing to ask."""
    found = questions_of(options.questions, options.max_tokens)
    if options.shuffle_seed is not None:
        shuffled = list(found)
        random.Random(options.shuffle_seed).shuffle(shuffled)
        found = iter(shuffled)
    asked = list(islice(found, options.offset, options.offset + options.limit))
    if not asked:
        raise OptionError(NOTHING_TO_ASK)
    names = list(dict.fromkeys((options.base, options.model)))
    with ExitStack() as stack:
        engines = {name: stack.enter_context(Engine(load_model(name, dtype=options.dtype))) for name in names}
        first = engines[options.base].loaded
        bench = stack.enter_context(Bench(options, console, describe(first.device, first.dtype)))
        methods: dict[str, dict[str, Any]] = {
            "ar": {},
            "jacobi": {"n": options.n},
            "jacobi, whole": {"n": options.n, "adapt": False},
            "lookahead": {},
            "lookahead, whole": {"window": 15, "ngram": 5, "guesses": 15, "adapt": False},
        }
        sides = [
            Side(
                f"{name} + {method}", partial(answered, load_decoder(method.partition(",")[0], engine=engine, **given))
            )
            for name, engine in engines.items()
            for method, given in methods.items()
        ]
        whole = {
            name: load_decoder("jacobi", engine=engine, n=options.n, adapt=False, trajectory=True)
            for name, engine in engines.items()
        }

        def computed(_: Any, turn: int) -> TrainingQuestion:
            """With its prompt computed, so that only decoding is timed."""
            request = asked[turn].request
            sampling = request.sampling.model_copy(update={"max_tokens": 1})
            for decoder in whole.values():
                decoder.generate([request.model_copy(update={"sampling": sampling})])
            return asked[turn]

        bench.compare(
            f"{len(asked)} questions, one at a time",
            sides,
            computed,
            rounds=len(asked),
            warm_up=lambda _: asked[0],
            table=partial(_speed, [f"{name} + ar" for name in names]),
        )
        counted = [
            Metric(f"fast-forwarded tokens a forward, windows of {options.n}", _tokens_a_forward, _mean),
            Metric("stationary tokens a window", lambda took: took["stationary"], _mean),
        ]
        sides = [Side(name, partial(converged, decoder, options.n)) for name, decoder in whole.items()]
        bench.compare("windows", sides, lambda _, turn: asked[turn], rounds=len(asked), metrics=counted)


def answered(decoder: LocalDecoder, question: TrainingQuestion) -> Measured:
    """What one question takes; its answer, and what that scores."""
    seconds, (text,) = timed(lambda: decoder.generate([question.request]))
    answer = question.answer(text.text)
    return {
        "seconds": seconds,
        "tokens": len(text.tokens),
        "forwards": text.usage.forwards,
        "score": question.score(answer),
        "answer": None if answer is None else str(question.same(answer)),
    }


def converged(decoder: LocalDecoder, n: int, question: TrainingQuestion) -> Measured:
    """How the windows of one text came to their fixed points."""
    seconds, (text,) = timed(lambda: decoder.generate([question.request]))
    found = [stationary(points, fixed) for _, points, fixed in windows(text, n) if len(fixed) == n]
    counted = {"tokens": len(text.tokens), "forwards": text.usage.forwards}
    return {"seconds": seconds, **counted, "stationary": fmean(found) if found else None}


def _speed(ar: list[str], results: Measurements) -> Table:
    """Table 1, with the share of the answers that are those of the base's `ar`."""
    base = results.of(ar[0])
    for cell in results.cells:
        cell["same"] = float(cell["answer"] == base.get(cell["round"], cell)["answer"])
    metrics = [
        RATE,
        Metric("tokens a forward", _tokens_a_forward, _mean),
        Metric("score", lambda took: took["score"], _share),
        Metric(f"answers of {ar[0]}", lambda took: took["same"], _share),
    ]
    return by_metric(results, metrics, ar, "decoding")


def _tokens_a_forward(took: Measured) -> float:
    return float(took["tokens"] / took["forwards"])


def _mean(values: Any) -> str:
    return f"{fmean(values):.2f}"


def _share(values: Any) -> str:
    return estimate(values).format(".0%")
