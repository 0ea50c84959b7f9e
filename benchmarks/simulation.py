"""Simulate the schedules of draft and target (SEED, section 4) from the seconds of their forwards.

Texts of a wave are decoded serially, packed into one forward, or in the paper's rounds: a text is drafted, waits, and
is verified alone while other texts are drafted. Each drafted position is accepted with one chance. Sampling and Python
between forwards count only as far as the given seconds include them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from random import Random
from typing import NamedTuple

from tot.decoders.drafting.latency_model import ROWS, LatencyModel


class Wave(NamedTuple):
    """Texts that are decoded together."""

    lengths: Sequence[int]
    """New tokens of each text."""
    prompt: int = 0
    """Prompt tokens to compute."""


@dataclass(frozen=True)
class Machine:
    """The seconds of forwards, and how much draft and target slow each other down."""

    target: LatencyModel
    draft: LatencyModel
    """With all threads, while the target waits."""
    worker: float = 1.0
    """A draft in a thread of its own, while the target waits, as a multiple of `draft`."""
    draft_beside: float = 1.0
    """The same while the target verifies."""
    verify_beside: float = 1.0
    """A verification while a draft runs, as a multiple of `target`."""
    devices: int = 1
    """Number of drafts that run at the same time."""


@dataclass(frozen=True)
class Schedule:
    """How the texts of a wave are decoded."""

    kind: str
    """serial, packed or rounds."""
    k_config: tuple[int, ...] = ()
    """Candidates at each drafted position, as in the decoders' option. Empty: no drafts, as in `ar`."""
    adapt: bool = False
    """Draft only as deep as pays."""
    overlap: bool = True
    """For rounds: draft while the target verifies."""

    def rows(self, depth: int) -> int:
        """Return the rows that verify the first `depth` positions."""
        return int(1 + sum(accumulate(self.k_config[:depth], mul)))

    def draft_seconds(self, machine: Machine, depths: Sequence[int]) -> float:
        """Return the seconds of the draft's forwards, which are packed for texts of these depths."""
        rows = [1, *accumulate(self.k_config, mul)]
        deepest = range(max(depths, default=0))
        return sum(machine.draft.of(rows[at] * sum(depth > at for depth in depths)) for at in deepest)


def simulate(schedule: Schedule, waves: Sequence[Wave], machine: Machine, chance: float, seed: int = 0) -> float:
    """Return the seconds of the waves, one after another. `chance`: share of drafted positions that are accepted."""
    rng, total = Random(seed), 0.0

    def accepted(depth: int) -> int:
        return next((i for i in range(depth) if rng.random() >= chance), depth)

    for wave in waves:
        models = [machine.target, *([machine.draft] if schedule.k_config else [])]
        total += sum(wave.prompt * model.slope(ROWS[-1]) for model in models)
        if schedule.kind == "rounds" and schedule.overlap:
            total += _rounds(schedule, wave.lengths, machine, accepted)
        else:
            for texts in [wave.lengths] if schedule.kind == "packed" else [[length] for length in wave.lengths]:
                total += _packed(schedule, texts, machine, chance, accepted)
    return total


def _packed(
    schedule: Schedule, lengths: Sequence[int], machine: Machine, chance: float, accepted: Callable[[int], int]
) -> float:
    """Return the seconds of texts whose drafts are verified in one forward."""

    def rate(depth: int) -> float:
        """Return the expected tokens per second of a step at a depth."""
        seconds = machine.target.of(len(left) * schedule.rows(depth))
        seconds += schedule.draft_seconds(machine, [depth] * len(left))
        return len(left) * sum(chance**i for i in range(depth + 1)) / seconds

    total, left = 0.0, list(lengths)
    while left:
        deepest = len(schedule.k_config)
        if schedule.adapt:
            deepest = max(range(deepest + 1), key=rate)
        depths = [min(deepest, tokens - 1) for tokens in left]
        total += schedule.draft_seconds(machine, depths) + machine.target.of(sum(map(schedule.rows, depths)))
        steps = zip(left, depths, strict=True)
        left = [rest for tokens, depth in steps if (rest := tokens - 1 - accepted(depth)) > 0]
    return total


def _rounds(schedule: Schedule, lengths: Sequence[int], machine: Machine, accepted: Callable[[int], int]) -> float:
    """Return the seconds of texts that are drafted and verified one by one, at the same time (SEED, Algorithm 1)."""
    total, left = 0.0, list(lengths)
    waiting, drafted = deque(range(len(left))), deque[int]()
    drafting: dict[int, float] = {}
    """By text: the seconds left of its draft, if nothing else runs."""
    verifying: dict[int, float] = {}
    """The same of the verification."""

    def depth(text: int) -> int:
        return min(len(schedule.k_config), left[text] - 1)

    while waiting or drafted or drafting or verifying:
        while waiting and len(drafting) < machine.devices:
            text = waiting.popleft()
            drafting[text] = schedule.draft_seconds(machine, [depth(text)])
        if drafted and not verifying:
            text = drafted.popleft()
            verifying[text] = machine.target.of(schedule.rows(depth(text)))
        slow_draft = machine.draft_beside if verifying else machine.worker
        slow_target = machine.verify_beside if drafting else 1.0
        running = ((drafting, slow_draft), (verifying, slow_target))
        step = min(seconds * slow for texts, slow in running for seconds in texts.values())
        total += step
        for texts, slow in running:
            for text in list(texts):
                texts[text] -= step / slow
                if texts[text] > 1e-12:
                    continue
                del texts[text]
                if texts is drafting:
                    drafted.append(text)
                else:
                    left[text] -= 1 + accepted(depth(text))
                    waiting.extend([text] if left[text] > 0 else [])
    return total
