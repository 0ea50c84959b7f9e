"""The budget of a search, and the meter that counts its usage."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from pydantic import BaseModel, ConfigDict, Field

from tot.decoders.request import Completion, Usage


class Budget(BaseModel):
    """The limits of a search; None is no limit. Seconds count from the start of the search."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: int | None = Field(None, ge=0, description="Stop after this number of new tokens.")
    forwards: int | None = Field(None, ge=0, description="Stop after this number of forward passes.")
    seconds: float | None = Field(None, ge=0, allow_inf_nan=False, description="Stop after this number of seconds.")
    nodes: int | None = Field(None, ge=0, description="Stop after this number of thoughts.")


class Meter:
    """Counts the usage of one search. All requests of the search share it; it is thread-safe.

    A decoder counts tokens and forwards; the search counts nodes.
    """

    def __init__(self, budget: Budget | None = None) -> None:
        self.budget = budget or Budget()
        self.started = time.monotonic()
        self.new_tokens = 0
        self.forwards = 0
        self.nodes = 0
        self.usage = Usage()
        """Sum of the usage of all completions received so far."""
        self._uncounted_tokens = 0
        self._uncounted_forwards = 0
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def total(self) -> Usage:
        """Total usage. Forward passes that requests shared count once, and seconds are elapsed time."""
        return replace(self.usage, forwards=self.forwards, new_tokens=self.new_tokens, seconds=self.seconds)

    def replay(self, spent: Usage) -> None:
        """Add the usage of an earlier part of the same search."""
        self.usage += spent
        self.count(new_tokens=spent.new_tokens, forwards=spent.forwards)
        self.started -= spent.seconds

    def receive(self, completions: Sequence[Completion]) -> None:
        """Add the usage of a request's completions.

        If their decoder counts no tokens, the budget takes four characters for a token; if it counts no forward passes,
        the tokens of the longest text.
        """
        usage = sum((one.usage for one in completions), Usage())
        self.usage += usage
        written = [one.usage.new_tokens or 1 + len(one.text) // 4 for one in completions if one.text]
        self._uncounted_tokens += 0 if usage.new_tokens else sum(written)
        self._uncounted_forwards += 0 if usage.forwards else max(written, default=0)

    def count(self, new_tokens: int = 0, forwards: int = 0, nodes: int = 0) -> None:
        with self._lock:
            self.new_tokens += new_tokens
            self.forwards += forwards
            self.nodes += nodes

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the budget is spent, at the average speed so far; None without a limit, or before any usage."""
        seconds = self.seconds
        spent = {"tokens": self.new_tokens, "forwards": self.forwards, "seconds": seconds, "nodes": self.nodes}
        left = [seconds * (limit / spent[name] - 1) for name, limit in self.budget if limit is not None and spent[name]]
        return max(0.0, min(left)) if left else None

    def overspent(self) -> str | None:
        """Return the first decoding limit that was reached, such as "tokens (512 of 500)", or None."""
        limits = self.budget
        tokens = self.new_tokens + self._uncounted_tokens
        forwards = self.forwards + self._uncounted_forwards
        return (  # a search that decodes nothing counts its thoughts instead
            _reached("tokens", tokens or self.nodes, limits.tokens)
            or _reached("forwards", forwards or self.nodes, limits.forwards)
            or _reached("seconds", self.seconds, limits.seconds)
        )

    def exhausted(self) -> str | None:
        """Return the first limit that was reached, including the limit on nodes, or None.

        If only the node limit is reached, running requests may finish, but the tree may not grow."""
        return self.overspent() or _reached("nodes", self.nodes, self.budget.nodes)


def _reached(name: str, spent: float, limit: float | None) -> str | None:
    return f"{name} ({spent:.4g} of {limit:.4g})" if limit is not None and spent >= limit else None
