"""Side: one engine under test. Its work is waves of requests: a search's, or one wave with branches of one prompt.

A side measures itself, around the work alone, and says how many tokens it drew. Nothing that it computed in one run may
be left for the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tot.bench.peers.waves import Asked, Wave
from tot.decoders.errors import TotError


class SideError(TotError):
    """A side that can't be had, or can't go on; the others can."""


@dataclass(frozen=True, slots=True)
class Work:
    """What was done: seconds of wall time, and tokens that were drawn."""

    seconds: float
    tokens: int

    @property
    def rate(self) -> float:
        """New tokens a second."""
        return self.tokens / self.seconds


class Side(Protocol):
    """An engine."""

    name: str
    about: str
    """What runs: versions and number format."""
    most: int | None
    """Branches beyond which it is not asked, since it would only take longer; None for no limit."""

    searches: bool
    """Whether it can draw different numbers of tokens for different prompts, as a search wants."""

    def run(self, waves: Sequence[Wave]) -> Work:
        """Compute all prompts and draw all samples at T = 1, wave by wave, from nothing. Raises SideError."""

    def close(self) -> None:
        """Free what it holds."""


def branches(prompt: Sequence[int], count: int, new: int) -> tuple[Wave]:
    """`count` samples of `new` tokens each after one prompt (token ids)."""
    return ((Asked(tuple(prompt), (new,) * count),),)


def drawn(waves: Sequence[Wave]) -> int:
    """Tokens that a side draws that can't score choices: one for each evaluation, too."""
    return sum(sum(asked.samples) for wave in waves for asked in wave)
