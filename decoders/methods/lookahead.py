"""Lookahead decoding: n-grams that the target's own Jacobi iteration leaves behind are verified as drafts.

Fu et al., 2024. Beside each text a window of W columns is iterated in the same forward: after N - 1 steps each column
has drawn N tokens in a row, which go to a pool that all branches share. Up to G n-grams that begin with a text's last
token are its draft. Accepted or not, the text is that of `ar`.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from tot.decoders.drafting.drafters import Context, Draft
from tot.decoders.drafting.latency_model import engine_costs
from tot.decoders.drafting.planner import SpeculationPlanner
from tot.decoders.engine.engine import Engine
from tot.decoders.engine.job import Job
from tot.decoders.engine.radix_cache import Branch
from tot.decoders.engine.runner import Chunk
from tot.decoders.engine.sampling import Sampled
from tot.decoders.methods.acceptance import Coupled, Rule
from tot.decoders.methods.autoregressive import DecodingSequence
from tot.decoders.methods.method import Method, OpenedMethod
from tot.decoders.methods.speculative import Speculation, Speculative
from tot.decoders.request import Purpose

_CAPACITY = 50_000
"""First tokens that a pool remembers n-grams of."""
_WINDOW = ("lookahead", "window")


class LookaheadOptions(BaseModel):
    """Options of `lookahead`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    window: Annotated[int, Field(ge=1, le=64)] = 8
    """W: columns iterated beside each text."""
    ngram: Annotated[int, Field(ge=2, le=16)] = 4
    """N: tokens of an n-gram; N - 1 of them are drafted."""
    guesses: Annotated[int, Field(ge=1, le=64)] = 8
    """G: n-grams verified a step."""
    adapt: bool = True
    """Iterate windows and verify n-grams only where that pays, by the measured cost of rows and what was accepted."""

    @property
    def k_config(self) -> tuple[int, ...]:
        return (self.guesses,) + (1,) * (self.ngram - 2)

    def acceptance(self) -> Rule:
        return Coupled()


class Pool:
    """N-grams by their first token, the latest first; a drafter of what they go on with."""

    runner = None

    def __init__(self, guesses: int) -> None:
        self._guesses = guesses
        self._ngrams: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()

    def add(self, ngram: Sequence[int]) -> None:
        first, *rest = ngram
        known = self._ngrams.setdefault(first, OrderedDict())
        known[tuple(rest)] = None
        known.move_to_end(tuple(rest))
        self._ngrams.move_to_end(first)
        if len(known) > self._guesses:
            known.popitem(last=False)
        if len(self._ngrams) > _CAPACITY:
            self._ngrams.popitem(last=False)

    def draft(self, contexts: Sequence[Context], outlook: SpeculationPlanner | None = None) -> list[Draft]:
        return [self._cache(context, outlook) for context in contexts]

    def _cache(self, context: Context, outlook: SpeculationPlanner | None) -> Draft:
        """The n-grams as a tree, in which equal beginnings are one."""
        draft = Draft()
        chances = {-1: 1.0}
        for rank, ngram in enumerate(reversed(self._ngrams.get(context.tokens[-1], OrderedDict()))):
            node = -1
            for depth, token in enumerate(ngram[: len(context.widths)]):
                known = next((child for child in draft.children(node) if draft.tokens[child] == token), None)
                if known is None:
                    kind = ("lookahead", depth, min(rank, 3))
                    chance = 0.0
                    if outlook is not None:
                        chance = chances[node] * outlook.experience.chance(kind)
                        if not outlook.admit(chance):
                            break
                    known = draft.add(token, node, kind)
                    chances[known] = chance
                node = known
        return draft

    def end(self, key: int) -> None:
        pass


class Looking(Speculation):
    """Also decides beside which texts a window is iterated in this step."""

    def __init__(self, pool: Pool, options: LookaheadOptions, *rest: Any) -> None:
        super().__init__(pool, options, *rest)
        self.pool = pool
        self.width = options.window
        self.length = options.ngram
        self._plan: SpeculationPlanner | None = None

    def prepare(self, policies: Sequence[Any]) -> None:
        super().prepare(policies)
        for policy in policies:
            sequences = policy.decoding() if self.drafts else ()
            policy.looks = {sequence.output.index for sequence in sequences if self._pays(policy.purpose)}

    def outlook(self, branches: int, length: float, purpose: Purpose = "generate") -> SpeculationPlanner | None:
        self._plan = super().outlook(branches, length, purpose)
        return self._plan

    def _pays(self, purpose: Purpose) -> bool:
        if self._plan is None:
            return True
        self._plan.experience = self.experience[purpose]
        return self._plan.invest(_WINDOW, self.width * (self.length - 1))


class Lookahead(Speculative):
    """Decodes as `Speculative` does, and iterates a window beside each text."""

    def __init__(self, job: Job, companion: Looking) -> None:
        super().__init__(job, companion)
        self._looking = companion
        self.looks: set[int] = set()
        """Samples whose windows are iterated in this step."""
        self._rows: dict[int, list[list[int]]] = {}
        """By sample: up to N - 1 rows of W tokens, each what was drawn after the row before."""
        self._columns: dict[int, list[Branch]] = {}

    def growth(self) -> int:
        return super().growth() + self._looking.width * (self._looking.length - 1) * len(self._job.running)

    def run(self, sequence: DecodingSequence) -> list[Chunk]:
        feeds = super().run(sequence)
        index, cache, root = sequence.output.index, self._job.cache, sequence.branch
        if index not in self.looks:
            return feeds
        rows = self._rows.setdefault(index, [self._guess(len(root))])
        width = min(len(rows[0]), self._looking.engine.runner.context - len(root) - len(rows))
        columns = self._columns[index] = []
        for column in range(width):
            branch = cache.fork(root)
            columns.append(branch)
            cache.extend(branch, [*rows[0][: column + 1], *(row[column] for row in rows[1:])])
            feeds.append(Chunk(branch, len(root), len(branch), [sequence.output.draw(column + len(rows))]))
        return feeds

    def _guess(self, seed: int) -> list[int]:
        """The first row: tokens of the prompt, by chance."""
        return random.Random(seed).choices(self._job.prompt, k=self._looking.width)

    def take(self, sequence: DecodingSequence, rows: Iterator[list[Sampled]]) -> None:
        super().take(sequence, rows)
        index = sequence.output.index
        columns = self._columns.pop(index, [])
        if not columns:
            return
        drawn = [next(rows)[0].token for _ in columns]
        for branch in columns:
            self._job.cache.rollback(branch, 0)
        window = [*self._rows[index], drawn]
        if len(window) == self._looking.length:
            for ngram in zip(*window, strict=False):  # the window narrows at the end of the context
                self._looking.pool.add(ngram)
            del window[0]
        self._rows[index] = window

    def verified(self, sequence: DecodingSequence, draft: Draft, drawn: Mapping[int, Sampled], kept: int) -> None:
        if sequence.output.index in self.looks:
            self._looking.experience[self.purpose].learn(_WINDOW, kept > 0)

    def release(self) -> None:
        for columns in self._columns.values():
            for branch in columns:
                self._job.cache.rollback(branch, 0)
        super().release()


def _open(engine: Engine, options: LookaheadOptions, stack: ExitStack) -> OpenedMethod:
    pool = Pool(options.guesses)
    looking = Looking(pool, options, engine, (engine_costs(engine), None) if options.adapt else None)
    return OpenedMethod(partial(Lookahead, companion=looking), pool)


METHOD = Method(_open, LookaheadOptions)
