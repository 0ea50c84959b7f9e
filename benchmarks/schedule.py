"""Simulate the schedules of draft and target (SEED, section 4) from the seconds of their forwards.

Texts of a wave are decoded serially, packed into one forward, or in the paper's rounds: a text is drafted, waits, and
is verified alone while other texts are drafted. Each drafted position is accepted with one chance. Sampling and Python
between forwards count only as far as the given seconds include them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
    overlap: bool | None = True
    """For rounds: draft while the target verifies. None: the faster of both."""

    def widths(self, depth: int) -> list[int]:
        """Return the number of drafted tokens at each of the first `depth` positions."""
        return list(accumulate(self.k_config[:depth], mul))


Accepting = Callable[[int], int]
"""Draft depth -> number of accepted tokens."""


def simulate(schedule: Schedule, waves: Sequence[Wave], machine: Machine, chance: float, seed: int = 0) -> float:
    """Return the seconds of the waves, one after another. `chance`: share of drafted positions that are accepted."""
    if schedule.overlap is None:
        both = (replace(schedule, overlap=overlap) for overlap in (True, False))
        return min(simulate(one, waves, machine, chance, seed) for one in both)
    rng = Random(seed)

    def accepting(depth: int) -> int:
        return next((i for i in range(depth) if rng.random() >= chance), depth)

    decode = _rounds if schedule.kind == "rounds" and schedule.overlap else _packed
    total = 0.0
    for wave in waves:
        models = [machine.target, *([machine.draft] if schedule.k_config else [])]
        total += sum(wave.prompt * model.slope(ROWS[-1]) for model in models)
        groups = [wave.lengths] if schedule.kind == "packed" or decode is _rounds else [[one] for one in wave.lengths]
        total += sum(decode(schedule, group, machine, chance, accepting) for group in groups)
    return total


def _packed(schedule: Schedule, lengths: Sequence[int], machine: Machine, chance: float, accepting: Accepting) -> float:
    """Return the seconds of texts whose drafts are verified in one forward."""
    total, left = 0.0, list(lengths)
    while left:
        deepest = len(schedule.k_config)
        if schedule.adapt:
            deepest = max(range(deepest + 1), key=lambda depth: _rate(schedule, len(left), depth, machine, chance))
        depths = [min(deepest, tokens - 1) for tokens in left]
        total += sum(_draft_seconds(schedule, depths, machine))
        total += machine.target.of(sum(1 + sum(schedule.widths(depth)) for depth in depths))
        pairs = zip(left, depths, strict=True)
        left = [rest for tokens, depth in pairs if (rest := tokens - 1 - accepting(depth)) > 0]
    return total


def _rate(schedule: Schedule, texts: int, depth: int, machine: Machine, chance: float) -> float:
    """Return the expected tokens per second of a step at a depth."""
    tokens = texts * sum(chance**i for i in range(depth + 1))
    rows = texts * (1 + sum(schedule.widths(depth)))
    return tokens / (machine.target.of(rows) + sum(_draft_seconds(schedule, [depth] * texts, machine)))


def _draft_seconds(schedule: Schedule, depths: Sequence[int], machine: Machine) -> list[float]:
    """Return the seconds of the draft's forwards, which are packed for all texts."""
    rows = [1, *schedule.widths(max(depths, default=0))]
    return [
        machine.draft.of(rows[position] * sum(depth > position for depth in depths))
        for position in range(max(depths, default=0))
    ]


def _rounds(schedule: Schedule, lengths: Sequence[int], machine: Machine, chance: float, accepting: Accepting) -> float:
    """Return the seconds of texts that are drafted and verified one by one, at the same time (SEED, Algorithm 1)."""
    total, left = 0.0, list(lengths)
    waiting, drafted = deque(range(len(left))), deque[int]()
    drafting: dict[int, float] = {}
    """By text: the seconds left of its draft, in seconds of a machine that does nothing else."""
    verifying: tuple[int, float] | None = None
    while waiting or drafted or drafting or verifying is not None:
        while waiting and len(drafting) < machine.devices:
            text = waiting.popleft()
            depth = min(len(schedule.k_config), left[text] - 1)
            drafting[text] = sum(_draft_seconds(schedule, [depth], machine))
        if verifying is None and drafted:
            text = drafted.popleft()
            depth = min(len(schedule.k_config), left[text] - 1)
            verifying = text, machine.target.of(1 + sum(schedule.widths(depth)))
        slow = machine.worker if verifying is None else machine.draft_beside
        slow_target = machine.verify_beside if drafting else 1.0
        ends = [seconds * slow for seconds in drafting.values()]
        step = min([*ends, *([] if verifying is None else [verifying[1] * slow_target])])
        total += step
        drafting = {text: seconds - step / slow for text, seconds in drafting.items()}
        for text in [text for text, seconds in drafting.items() if seconds <= 1e-12]:
            del drafting[text]
            drafted.append(text)
        if verifying is not None:
            text, seconds = verifying[0], verifying[1] - step / slow_target
            verifying = text, seconds
            if seconds <= 1e-12:
                verifying = None
                left[text] -= 1 + accepting(min(len(schedule.k_config), left[text] - 1))
                if left[text] > 0:
                    waiting.append(text)
    return total
