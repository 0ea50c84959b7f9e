"""Lookahead decoding: drafts are n-grams from the target's own Jacobi iteration.

Fu et al., 2024. The same forward also iterates a window of W columns beside each text. After N - 1 steps each column
has drawn N consecutive tokens, which go to a pool that all branches share. The draft of a text is up to G n-grams that
begin with its last token. The text always equals the text of `ar`.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated

from pydantic import Field

from tot.decoders.drafting.drafters import Draft, DraftContext, Drafter, Verified
from tot.decoders.drafting.planner import SpeculationPlanner
from tot.decoders.engine.engine import Engine
from tot.decoders.methods.method import Method, MethodOptions, OpenedMethod
from tot.decoders.methods.speculative import SpeculativeConfig, speculate

_CAPACITY = 50_000
"""Maximum number of first tokens for which the pool keeps n-grams."""
_WINDOW = ("lookahead", "window")


class LookaheadOptions(MethodOptions):
    """Lookahead decoding (Fu et al., 2024): n-grams of earlier guesses as drafts."""

    window: Annotated[int, Field(ge=1, le=64)] = 8
    """W: columns iterated beside each text."""
    ngram: Annotated[int, Field(ge=2, le=16)] = 4
    """N: tokens of an n-gram; a draft holds N - 1 of them."""
    guesses: Annotated[int, Field(ge=1, le=64)] = 8
    """G: n-grams verified per step."""
    adapt: bool = True
    """Iterate windows and verify n-grams only if that pays, by the measured latency and acceptance."""


class LookaheadDrafter(Drafter):
    """N-grams by their first token, latest first, and the windows that produce them."""

    def __init__(self, options: LookaheadOptions) -> None:
        self._options = options
        self._ngrams: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()
        self._windows: dict[int, list[list[int]]] = {}
        """By text: up to N - 1 rows of W tokens; each row was drawn after the previous one."""

    def add(self, ngram: Sequence[int]) -> None:
        """Add an n-gram to the pool, or mark it as the latest."""
        first, *rest = ngram
        ngrams = self._ngrams.setdefault(first, OrderedDict())
        ngrams[tuple(rest)] = None
        ngrams.move_to_end(tuple(rest))
        self._ngrams.move_to_end(first)
        if len(ngrams) > self._options.guesses:
            ngrams.popitem(last=False)
        if len(self._ngrams) > _CAPACITY:
            self._ngrams.popitem(last=False)

    def draft(self, contexts: Sequence[DraftContext], planner: SpeculationPlanner | None = None) -> list[Draft]:
        drafts = [self._tree(context, planner) for context in contexts]
        for context, draft in zip(contexts, drafts, strict=True):
            if planner is None or planner.invest(_WINDOW, self._options.window * (self._options.ngram - 1)):
                draft.levels[-1] = _WINDOW
                draft.probes = self._columns(context)
        return drafts

    def _tree(self, context: DraftContext, planner: SpeculationPlanner | None) -> Draft:
        """Return the n-grams as a tree that shares equal prefixes."""
        draft = Draft()
        for rank, ngram in enumerate(reversed(self._ngrams.get(context.tokens[-1], OrderedDict()))):
            node = -1
            for depth, token in enumerate(ngram[: len(context.widths)]):
                child = draft.child(node, token)
                if child is None:
                    child = draft.add(token, node, ("lookahead", depth, min(rank, 3)), planner)
                if child is None:
                    break
                node = child
        return draft

    def _columns(self, context: DraftContext) -> list[list[int]]:
        """Return the window by columns, each after the tokens before it in the first row."""
        if context.key not in self._windows:  # random tokens of the prompt
            rng = random.Random(len(context.tokens))
            self._windows[context.key] = [rng.choices(context.prompt, k=self._options.window)]
        first, *later = self._windows[context.key]
        return [[*first[: column + 1], *(row[column] for row in later)] for column in range(len(first))]

    def observe(self, verified: Verified) -> None:
        """Append the tokens drawn as the window's next row; a full window adds its columns to the pool."""
        if not verified.probed:
            return
        window = self._windows[verified.context.key]
        # The window narrows at the end of the context.
        window[:] = [*(row[: len(verified.probed)] for row in window), list(verified.probed)]
        if len(window) == self._options.ngram:
            for ngram in zip(*window, strict=True):
                self.add(ngram)
            del window[0]

    def end(self, key: int) -> None:
        self._windows.pop(key, None)


def _open(engine: Engine, options: LookaheadOptions, stack: ExitStack) -> OpenedMethod:
    k_config = (options.guesses, *(1,) * (options.ngram - 2))
    probes = options.window * (options.ngram - 1)
    return speculate(engine, LookaheadDrafter(options), SpeculativeConfig(k_config, adapt=options.adapt, probes=probes))


METHOD = Method(_open, LookaheadOptions)
