"""The gain of drafting while the target verifies (SEED, section 4): expected from measured times, and measured.

On one machine both slow each other down. So the expectation uses the times of a draft and of a verification while both
run, and the number of texts that took turns, since a single text cannot overlap. A verification's time is a forward's
mean, prompts included.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.table import Table

from tot.bench.harness import RATE, Measured, Measurements, times

APART, BESIDE = "no overlap", "overlap"
"""Ends of the names of the sides that are compared."""


def overlap_table(results: Measurements, branches: int, bases: Sequence[str]) -> Table:
    """Build a table with a column per pair of sides without and with overlap.

    Its last rows are the speeds, as multiples of the sides `bases`, if neither slowed the other down: with one draft
    device, and with one per branch.
    """
    pairs = {side.removesuffix(f", {APART}"): side for side in results.sides if side.endswith(APART)}
    columns = [_column(results, side, branches, bases) for side in pairs.values()]
    table = Table("", *pairs, title="overlap of drafts and verifications")
    for heading in columns[0] if columns else ():
        table.add_row(heading, *(column[heading] for column in columns))
    return table


def _column(results: Measurements, side: str, branches: int, bases: Sequence[str]) -> dict[str, str]:
    """Return the cells of a side without overlap, by heading."""
    beside = side.removesuffix(APART) + BESIDE
    alone, together = _times_of(results, side), _times_of(results, beside)
    turns: Counter[int] = Counter()
    for column in results.columns:
        for one in results.of(side, column).values():
            turns.update(dict(one["in flight"]))
    gain = sum(alone) * turns.total() / sum(count * interval(*together, texts) for texts, count in turns.items())
    measured = [ratio for column in results.columns for ratio in results.ratios(RATE, beside, side, column)]
    cells = {"overlap, of no overlap: expected": f"{gain:.2f}x", "measured": times(measured)}
    for name, *seconds in zip(("draft", "verification"), alone, together, strict=True):
        cells[f"a {name} alone and beside the other, ms"] = ", ".join(f"{1000 * one:.0f}" for one in seconds)
    for base in (base for base in bases if base in results.sides):
        for count, devices in ((1, "1 draft device"), (branches, f"{branches} draft devices")):
            speeds = list(_without_contention(results, side, base, count))
            cells[f"without contention, {devices}: of {base}"] = times(speeds)
    return cells


def in_flight(forwards: Sequence[int]) -> Counter[int]:
    """Return the number of forwards by the number of unfinished texts, for texts that take turns.

    `forwards` has the number of each text.
    """
    counts: Counter[int] = Counter()
    before = 0
    for ended, total in enumerate(sorted(forwards)):
        texts = len(forwards) - ended
        counts[texts] += texts * (total - before)
        before = total
    return +counts


def interval(draft: float, verify: float, texts: int, devices: int = 1) -> float:
    """Return the seconds from one verification to the next if `devices` draft while the target verifies.

    The slowest of the target, the devices and each text's own turns sets it. A draft takes `draft` seconds and a
    verification `verify`.
    """
    return max(verify, draft / devices, (draft + verify) / texts)


def _times_of(results: Measurements, side: str) -> tuple[float, float]:
    """Return the median seconds of a draft and of a verification."""
    pairs = [_seconds(measured) for column in results.columns for measured in results.of(side, column).values()]
    draft, verify = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
    return draft, verify


def _seconds(measured: Measured) -> tuple[float, float]:
    """Return the mean seconds of a draft and of a verification of one search."""
    spent, forwards = measured["spent"], max(1, measured["forwards"])
    return spent.get("draft", 0.0) / forwards, spent.get("verify", 0.0) / forwards


def _without_contention(results: Measurements, side: str, base: str, devices: int) -> Iterator[float]:
    """Yield each search's speed as a multiple of `base`'s if overlap cost neither draft nor target anything."""
    for column in results.columns:
        bases = results.of(base, column)
        for turn, measured in results.of(side, column).items():
            draft, verify = _seconds(measured)
            turns = dict(measured["in flight"]).items()
            saved = sum(count * (draft + verify - interval(draft, verify, texts, devices)) for texts, count in turns)
            if turn in bases:
                yield RATE.ratio({**measured, "seconds": measured["seconds"] - saved}, bases[turn])
