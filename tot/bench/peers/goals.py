"""Goals: what is to be reached against each peer, and whether it was, from what the sides took."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tot.bench.machine import spread
from tot.bench.peers.turns import Results

OURS, INT8, DYNAMIC = "tot", "tot, int8", "tot, int8-dynamic"
INT8_LEAST = 1.4
BATCHED, VLLM, LLAMA = "generate, batched", "vLLM", "llama.cpp"


@dataclass(frozen=True, slots=True)
class Goal:
    """A ratio and the least that it should be, if anything; `ratios` are by round, none where a side is missing."""

    what: str
    measured: str
    ratios: Sequence[float]
    least: float | None
    share: bool = False
    """Shown in percent."""

    @property
    def ratio(self) -> float | None:
        """The median of the rounds' ratios."""
        return statistics.median(self.ratios) if self.ratios else None

    def shown(self, ratio: float) -> str:
        """A ratio as it is written: "2.05x", or "34%"."""
        return f"{100 * ratio:.0f}%" if self.share else f"{ratio:.2f}x"

    @property
    def verdict(self) -> str:
        if self.ratio is None:
            return "not measured"
        if self.least is None:
            return ""
        return "reached" if self.ratio >= self.least else "MISSED"


def decode_goals(results: Results) -> Iterator[Goal]:
    """Against each peer at 15 and 32 branches, with one branch alone, and of int8 against our own as it is."""
    llamas = [side for side in results.works if side.startswith(LLAMA)]
    for ours in (side for side in (OURS, DYNAMIC) if side == OURS or side in results.works):
        for count, least in ((15, 15.0), (32, 20.0)):
            yield _decoding(results, ours, BATCHED, count, least)
        for count in (15, 32):
            yield _decoding(results, ours, results.fastest(llamas, count) or LLAMA, count, 2.0)
            yield _decoding(results, ours, VLLM, count, 2.0)
        yield _decoding(results, ours, VLLM, 1, 1.0)
    if INT8 in results.works:
        for count in (column for column in results.columns if column <= 8):
            yield _decoding(results, INT8, OURS, count, INT8_LEAST)


def tree_goals(results: Results) -> Iterator[Goal]:
    """Whole searches."""
    llamas = [side for side in results.works if side.startswith(LLAMA)]
    for count in results.columns:
        yield _searching(results, BATCHED, count, 20.0)
        yield _searching(results, results.fastest(llamas, count) or LLAMA, count, 2.0)
        yield _searching(results, VLLM, count, 1.5 if count <= 3 else 2.0)


def _decoding(results: Results, ours: str, theirs: str, count: int, least: float) -> Goal:
    shown = " / ".join(spread(rates) if (rates := results.rates(side, count)) else "-" for side in (ours, theirs))
    return Goal(f"decode, {count}: {ours} / {theirs}, tokens/s", shown, results.ratios(ours, theirs, count), least)


def _searching(results: Results, theirs: str, count: int, least: float) -> Goal:
    shown = " / ".join(spread(taken) if (taken := results.seconds(side, count)) else "-" for side in (theirs, OURS))
    return Goal(f"tree, n = {count}: {theirs} / {OURS}, s", shown, results.ratios(OURS, theirs, count), least)
