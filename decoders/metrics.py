"""What decoding cost and what drafts were worth, split by what requests were for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field


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
    """Of them, those that left their format: what steps they had were decoded, without any they were plain text."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Elapsed: "draft", "verify" (the target's forwards), "sampling", "scheduling" (all else)."""

    @property
    def acceptance_rate(self) -> float:
        """Accepted over reached positions (SEED, table 2: alpha); 0 where nothing was drafted."""
        return self.accepted / self.reached if self.reached else 0.0
