"""What is decoded side by side: steps, each with its branch, the block they form, and the sample they are part of.

PDOS (Yu et al., 2025), section 3. State only: what happens to it when is decided in `parallel_steps.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tot.decoders.engine.radix_cache import Branch, RadixCache
from tot.decoders.engine.runner import Chunk
from tot.decoders.engine.sampling import Sampled
from tot.decoders.engine.text import TextCodec
from tot.decoders.methods.pdos.steps_output import Passage, SteppedOutput


class Head(NamedTuple):
    """What a step begins with."""

    title: str
    text: str
    ids: list[int]


class Step:
    """One step: its title, its text, and its branch while it runs."""

    def __init__(self, head: Head, opening: Sequence[int], output: Passage, limit: int) -> None:
        self.ids = list(head.ids)
        """The step's tokens in the text: its title's, and from `close` on all of them."""
        self.output = output
        self.branch: Branch | None = None
        self.pending = list(head.ids)
        self._opening = opening
        self._limit = limit
        self._title = head.text
        self._said: str | None = None

    @property
    def text(self) -> str:
        return self._title + (f"{self.output.open_text}\n" if self._said is None else self._said)

    def run(self, cache: RadixCache, trunk: Branch) -> Chunk:
        """The title, all at once, and then token by token."""
        start = len(self.branch or trunk)
        if self.branch is None:
            self.branch = cache.fork(trunk)
            cache.extend(self.branch, self._opening)
        cache.extend(self.branch, self.pending)
        return Chunk(self.branch, start, len(self.branch), [self.output.draw()])

    def take(self, drawn: Sampled) -> bool:
        """Returns True where this ended the step."""
        self.pending = [drawn.token]
        return self.output.add(drawn)

    def close(self, codec: TextCodec, between: str) -> None:
        """Settle what the step adds to the text, `between` being what separates it from the next."""
        said = self.output.open_text
        if between:
            said = said.rstrip().rstrip("\N{REPLACEMENT CHARACTER}").rstrip()
        kept, rest = self.output.whole(said)
        ids = self.output.tokens[:kept] + codec.encode(rest)
        if len(ids) > self._limit:  # a marker that cut a token in two: its first half took more tokens than it had
            ids = ids[: self._limit]
            said = codec.decode(ids)
        self.ids += ids
        self._said = said + between

    def release(self, cache: RadixCache) -> None:
        if self.branch is not None:
            cache.release(self.branch)


@dataclass
class Block:
    """Steps that are decoded side by side."""

    steps: list[Step]
    opening: list[int]
    """What stands between the branch they fork from and each step."""
    unfed: int
    """How many of those are the prompt's."""
    left: int
    """Tokens that the text may still have, from the block on."""
    began: float = field(default_factory=time.perf_counter)
    active: list[Step] = field(default_factory=list)
    """Those that run in this step."""


@dataclass
class Line:
    """One sample: its text, and the skeleton or block that it is at."""

    output: SteppedOutput
    base: int
    """Positions of its branch before the open part of the text."""
    given: Sequence[Head] = ()
    """Steps of the request, until they begin."""
    heads: list[Head] = field(default_factory=list)
    """The skeleton so far."""
    title: Passage | None = None
    """The title that is being written."""
    block: Block | None = None
    numbered: int = 0
    """Steps so far."""
    filling: int | None = None
    """A block is fed in pieces: positions that were."""
