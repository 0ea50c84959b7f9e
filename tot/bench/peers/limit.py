"""The machine's limit: how much of what memory and arithmetic allow a packed decoding step makes use of."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from tot.bench.machine import spread
from tot.bench.peers.goals import Goal
from tot.bench.peers.here import Tot
from tot.decoders.request import Request, Sampling
from tot.decoders.timeline import Load
from tot.machine import limit, matrix_rate, read_bandwidth
from tot.report.profile import Demand

STEPS = 64


def step(rows: int, context: int) -> Load:
    """What a step computes that decodes so many rows, each at `context` tokens."""
    return Load({("generate", "decode"): rows}, rows, rows * context, context)


def step_seconds(side: Tot, prompt: Sequence[int], count: int, steps: int = STEPS) -> float:
    """Seconds of a step that decodes `count` branches and nothing else."""
    engine = side.decoder.engine
    engine.call(engine.cache.clear)
    taken = []
    for new in (1, 1, 1 + steps):  # the first computes the prompt
        sampling = Sampling(max_tokens=new, temperature=1.0, n=count, ignore_eos=True)
        began = time.perf_counter()
        side.decoder.generate([Request(prompt=tuple(prompt), sampling=sampling)])
        taken.append(time.perf_counter() - began)
    return (taken[2] - taken[1]) / steps


def quicker(ours: Tot, other: Tot, prompts: Sequence[Sequence[int]], counts: Sequence[int], least: float) -> list[Goal]:
    """How many times as long a step of ours takes as one of the other, by count; they take turns."""
    goals = []
    for count in counts:
        pairs = [(step_seconds(ours, prompt, count), step_seconds(other, prompt, count)) for prompt in prompts]
        shown = " / ".join(spread([1e3 * seconds for seconds in taken]) for taken in zip(*pairs, strict=True))
        ratios = [mine / theirs for mine, theirs in pairs]
        goals.append(Goal(f"a step of {count}: {ours.name} / {other.name}, ms", shown, ratios, least))
    return goals


def shares(side: Tot, prompts: Sequence[Sequence[int]], counts: Sequence[int], numbers: dict[str, Any]) -> list[Goal]:
    """By count, in as many rounds as there are prompts; what was measured goes into `numbers`."""
    loaded, demand = side.decoder.engine.loaded, Demand.of(side.decoder.engine)
    weights = demand.weight_bytes
    bandwidth = read_bandwidth(loaded.device, weights)
    rate = matrix_rate(loaded.dtype, loaded.device)
    numbers |= {"read_bandwidth": bandwidth, "matrix_rate": rate, "weight_bytes": weights, "steps": {}}
    goals = []
    for count in counts:
        taken = [step_seconds(side, prompt, count) for prompt in prompts]
        numbers["steps"][count] = taken
        bounds = [
            limit(weights, demand.operations(step(count, len(prompt) + STEPS // 2)), bandwidth, rate)
            for prompt in prompts
        ]
        used = [bound / seconds for bound, seconds in zip(bounds, taken, strict=True)]
        measured = f"{1e3 * bounds[0]:.1f} / {1e3 * sorted(taken)[len(taken) // 2]:.1f} ms"
        for goal in (0.3, 0.5):
            goals.append(
                Goal(f"a step of {count}: the machine's limit / {side.name}", measured, used, goal, share=True)
            )
    return goals
