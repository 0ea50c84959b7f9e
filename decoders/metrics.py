"""What decoding cost and what drafts were worth, split by what requests were for."""

from __future__ import annotations

from collections import Counter, defaultdict
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
    reached: Counter[int] = field(default_factory=Counter)
    """By position from 0: how often a draft had candidates there, and all before it had been accepted."""
    taken: Counter[int] = field(default_factory=Counter)
    """By position: how often one of them was accepted."""
    skeletons: int = 0
    """Skeletons of parallel steps that were begun."""
    broken: int = 0
    """Of them, those that left their format: what steps they had were decoded, without any they were plain text."""
    block_tokens: int = 0
    """Tokens of parallel steps."""
    block_seconds: float = 0.0
    """Elapsed from the beginning of each block of parallel steps to the end of its last one."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Elapsed: "draft", "verify" (the target's forwards), "sampling", "scheduling" (all else)."""

    @property
    def by_position(self) -> list[float]:
        """Acceptance rate at each position of a draft, of those that were reached."""
        return [self.taken[position] / self.reached[position] for position in sorted(self.reached)]

    @property
    def acceptance_rate(self) -> float:
        """Accepted over reached positions (SEED, table 2: alpha); 0 where nothing was drafted."""
        return self.accepted / self.reached.total() if self.reached else 0.0

    @property
    def accepted_of_drafted(self) -> float:
        """The share of all drafted tokens; of a tree, most of which can't be accepted, it is small at best."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def block_efficiency(self) -> float:
        """Tokens a verification brings: 1 without drafts, k + 1 at best."""
        return 1.0 + self.accepted / self.verifications if self.verifications else 1.0
