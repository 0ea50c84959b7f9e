"""Evaluations in words, one branch at a time: `ar` against `seed` with drafts that are looked up, each on its engine.

What is evaluated are thoughts of real searches, as the evaluator `explain` does: an explanation to its own end, then
the scores. Prompts are computed beforehand; `seed` may look up what it was asked and what it wrote before, nothing that
`ar` wrote.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tot.bench.machine import spread
from tot.bench.peers.goals import Goal
from tot.decoders.decoder import load_decoder
from tot.decoders.local import LocalDecoder
from tot.decoders.request import Request, Sampling
from tot.evaluators.model import Explain
from tot.search import BFS
from tot.solver import solve
from tot.task import Task


def speeds(
    model: str, dtype: str, task: Task, questions: Sequence[str], say: Callable[[str], None]
) -> dict[str, list[float]]:
    """New tokens a second of either side, by question; the first question warms up."""
    found: dict[str, list[float]] = {"ar": [], "seed": []}
    with (
        load_decoder("ar", model, dtype=dtype) as plain,
        load_decoder("seed", model, dtype=dtype, draft="lookup") as drafting,
    ):
        sides = {"ar": plain, "seed": drafting}
        for turn, question in enumerate(questions):
            asked = requests(plain, task, question, turn)
            for name in sorted(sides, reverse=bool(turn % 2)):
                rate = one_by_one(sides[name], asked)
                if turn:
                    found[name].append(rate)
                    say(f"evaluations of question {turn + 1}: {name}: {rate:.1f} tokens/s")
    return found


def goal(found: dict[str, list[float]]) -> Goal:
    """Lookup drafts against none."""
    ratios = [seed / ar for seed, ar in zip(found["seed"], found["ar"], strict=False) if ar]
    shown = " / ".join(spread(found[name]) if found[name] else "-" for name in ("seed", "ar"))
    return Goal("evaluations in words, one at a time: seed by lookup / ar, tokens/s", shown, ratios, 1.5)


def requests(decoder: LocalDecoder, task: Task, question: str, seed: int) -> list[Request]:
    """The evaluations of the thoughts after a question."""
    tree = solve(
        task, question, decoder=decoder, search=BFS(thoughts=3, breadth=2, depth=3), evaluator="random", seed=seed
    ).tree
    explain = Explain()
    sampling = Sampling(temperature=explain.temperature, **{"max_tokens": 128, **task.sampling.get("explain", {})})
    states = [tree.state(node) for node in tree if node.parent is not None]
    return [explain.request(task, explain.prompt(task, state), sampling) for state in states]


def one_by_one(decoder: LocalDecoder, asked: Sequence[Request]) -> float:
    """New tokens a second, each request by itself, with nothing but the prompts computed."""
    one = Sampling(max_tokens=1)
    decoder.generate([Request(prompt=request.prompt, sampling=one, purpose="evaluate") for request in asked])
    tokens, seconds = 0, 0.0
    for request in asked:
        began = time.perf_counter()
        (done,) = decoder.generate([request])
        seconds += time.perf_counter() - began
        tokens += len(done.tokens)
    return tokens / seconds
