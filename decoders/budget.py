"""Limits on what a search may spend, and the meter that counts it where it happens."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace

from pydantic import BaseModel, ConfigDict, Field

from tot.decoders.request import Usage


class Budget(BaseModel):
    """The most a search may spend; None is no limit. Seconds run from the start of the search."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: int | None = Field(None, ge=0, description="Stop after so many new tokens.")
    forwards: int | None = Field(None, ge=0, description="Stop after so many forward passes.")
    seconds: float | None = Field(None, ge=0, allow_inf_nan=False, description="Stop after so many seconds of search.")
    nodes: int | None = Field(None, ge=0, description="Stop after so many thoughts.")


class Meter:
    """Counts one search's spending as it happens; shared by all of its requests, safe across threads.

    A decoder counts tokens and forwards; the search counts nodes.
    """

    def __init__(self, budget: Budget | None = None) -> None:
        self.budget = budget or Budget()
        self.started = time.monotonic()
        self.new_tokens = 0
        self.forwards = 0
        self.nodes = 0
        self.usage = Usage()
        """Sum over the completions received so far."""
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def total(self) -> Usage:
        """All that was spent: forwards that calls shared count once, and seconds are those that went by."""
        return replace(self.usage, forwards=self.forwards, new_tokens=self.new_tokens, seconds=self.seconds)

    def replay(self, spent: Usage) -> None:
        """Count what an earlier part of the same search spent."""
        self.usage += spent
        self.count(new_tokens=spent.new_tokens, forwards=spent.forwards)
        self.started -= spent.seconds

    def count(self, new_tokens: int = 0, forwards: int = 0, nodes: int = 0) -> None:
        with self._lock:
            self.new_tokens += new_tokens
            self.forwards += forwards
            self.nodes += nodes

    def overspent(self) -> str | None:
        """The first limit on decoding that was reached, such as "tokens (512 of 500)", or None."""
        limits = self.budget
        return (
            _reached("tokens", self.new_tokens, limits.tokens)
            or _reached("forwards", self.forwards, limits.forwards)
            or _reached("seconds", self.seconds, limits.seconds)
        )

    def exhausted(self) -> str | None:
        """The same, or the limit on the tree's nodes: decoding may end what it began, but nothing new may grow."""
        return self.overspent() or _reached("nodes", self.nodes, self.budget.nodes)


def _reached(name: str, spent: float, limit: float | None) -> str | None:
    return f"{name} ({spent:.4g} of {limit:.4g})" if limit is not None and spent >= limit else None


@dataclass
class Metrics:
    """The requests of one purpose on one engine. Seconds that requests of several purposes shared are split by rows."""

    tokens: int = 0
    """New tokens, those of decoders that don't draft among them."""
    verifications: int = 0
    """Forwards of samples whose drafter was asked, whether it had a draft or not."""
    drafted: int = 0
    accepted: int = 0
    """Drafted tokens that were accepted."""
    reached: int = 0
    """Positions at which a draft had candidates, and all before them had been accepted."""
    skeletons: int = 0
    """Skeletons of parallel steps that were begun."""
    broken: int = 0
    """Skeletons that broke the format: their complete steps were decoded; without any, the text is plain."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Elapsed: "draft", "verify" (the target's forwards), "sampling", "scheduling" (all else)."""

    @property
    def acceptance_rate(self) -> float:
        """Accepted over reached positions (SEED, table 2: alpha); 0 where nothing was drafted."""
        return self.accepted / self.reached if self.reached else 0.0
