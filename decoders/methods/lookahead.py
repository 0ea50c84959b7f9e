"""Lookahead decoding: n-grams that the target's own Jacobi iteration leaves behind are verified as drafts.

Fu et al., 2024. Beside each text a window of W columns is iterated in the same forward: after N - 1 steps each column
has drawn N tokens in a row, which go to a pool that all branches share. Up to G n-grams that begin with a text's last
token are its draft. Accepted or not, the text is that of `ar`.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence

from tot.decoders.drafting.drafters import Draft, DraftContext, Drafter, Verified
from tot.decoders.drafting.planner import SpeculationPlanner
from tot.decoders.methods.options import LookaheadOptions

_CAPACITY = 50_000
"""First tokens that a pool remembers n-grams of."""
_WINDOW = ("lookahead", "window")


class LookaheadDrafter(Drafter):
    """N-grams by their first token, the latest first, and the windows that they come from."""

    def __init__(self, options: LookaheadOptions) -> None:
        self._options = options
        self._ngrams: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()
        self._windows: dict[int, list[list[int]]] = {}
        """By text: up to N - 1 rows of W tokens, each what was drawn after the row before."""

    def add(self, ngram: Sequence[int]) -> None:
        first, *rest = ngram
        known = self._ngrams.setdefault(first, OrderedDict())
        known[tuple(rest)] = None
        known.move_to_end(tuple(rest))
        self._ngrams.move_to_end(first)
        if len(known) > self._options.guesses:
            known.popitem(last=False)
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
        """The n-grams as a tree, in which equal beginnings are one."""
        draft = Draft()
        for rank, ngram in enumerate(reversed(self._ngrams.get(context.tokens[-1], OrderedDict()))):
            node = -1
            for depth, token in enumerate(ngram[: len(context.widths)]):
                child = next((child for child in draft.children(node) if draft.tokens[child] == token), None)
                if child is None:
                    child = draft.add(token, node, ("lookahead", depth, min(rank, 3)), planner)
                if child is None:
                    break
                node = child
        return draft

    def _columns(self, context: DraftContext) -> list[list[int]]:
        """The window column by column, each after what the first row has before it."""
        if context.key not in self._windows:  # tokens of the prompt, by chance
            chance = random.Random(len(context.tokens))
            self._windows[context.key] = [chance.choices(context.prompt, k=self._options.window)]
        first, *later = self._windows[context.key]
        return [[*first[: column + 1], *(row[column] for row in later)] for column in range(len(first))]

    def observe(self, verified: Verified) -> None:
        """What was drawn is the window's next row; a row that is complete leaves n-grams behind."""
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
