"""ModelDrafter: drafts with a second model over its own RadixCache, one packed forward per position for all texts.

The draft is drawn with the target's own noise, so it guesses the token that the target is most likely to draw.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from tot.decoders.drafting.drafters import Draft, DraftContext, Drafter
from tot.decoders.drafting.planner import SpeculationPlanner
from tot.decoders.engine.radix_cache import Branch, RadixCacheFullError
from tot.decoders.engine.runner import Chunk, Runner
from tot.decoders.engine.sampling import candidates, distribution, read
from tot.decoders.models.loaded import LoadedModel

_CHUNK = 512
"""Rows of prompt that a draft model computes in one forward."""
_TIMED = 16
"""Number of forwards after which the estimate of their cost is trusted."""


class _Tip(NamedTuple):
    """A node that a draft may be extended from."""

    text: int
    """Number of the context."""
    node: int
    branch: Branch


def level(context: DraftContext, depth: int) -> Hashable:
    """Return the kind of a draft model's forward at a depth; it succeeds if a token after it is accepted."""
    return "level", depth, round(context.draws[0].temperature, 1)


class ModelDrafter(Drafter):
    """Drafts with a second model."""

    def __init__(self, loaded: LoadedModel, kv_budget: int | str | None, vocabulary: int) -> None:
        """`vocabulary`: size of the target's logits, which may be larger or smaller."""
        self.loaded = loaded
        self.runner: Runner = Runner(loaded, kv_budget)
        self.forwards = 0
        self._vocabulary = vocabulary
        self._rows = int(loaded.config.vocab_size)
        self._branches: dict[int, Branch] = {}
        self._starts: dict[int, int] = {}
        """By key: the position of the text at which its branch begins."""
        self._lock = threading.Lock()
        """Drafting may run in another thread (SEED's rounds), and decoders share a drafter."""

    def draft(self, contexts: Sequence[DraftContext], planner: SpeculationPlanner | None = None) -> list[Draft]:
        with self._lock:
            forks: list[Branch] = []
            drafts = [Draft() for _ in contexts]
            try:
                self._draft(contexts, drafts, forks, planner)
            except RadixCacheFullError:  # return the draft so far
                pass
            finally:
                for fork in forks:
                    self.runner.cache.rollback(fork, 0)
            return drafts

    def _draft(
        self,
        contexts: Sequence[DraftContext],
        drafts: Sequence[Draft],
        forks: list[Branch],
        planner: SpeculationPlanner | None,
    ) -> None:
        """Extend the drafts level by level. `forks` gets the branches to free afterwards."""
        active = [i for i, context in enumerate(contexts) if context.widths]
        if not active:
            return
        if planner is not None:
            kind, timed = level(contexts[active[0]], 0), self.forwards >= _TIMED
            if not planner.deepen(kind, [1.0] * len(active), timed):
                return
        cache, depth = self.runner.cache, 0
        frontier = self._roots(contexts, active)
        while frontier:
            found = self._candidates(contexts, frontier, depth, drafts, planner is not None)
            deeper: list[_Tip] = []
            for (i, node, branch), (tokens, confidence) in zip(frontier, found, strict=True):
                temperature = round(contexts[i].draws[0].temperature, 1)
                drafts[i].levels[node] = level(contexts[i], depth)
                for rank, token in enumerate(tokens):
                    child = drafts[i].add(token, node, ("model", temperature, rank, confidence), planner)
                    if child is None:
                        break  # rejection tests candidates in the order in which they were drawn
                    if depth + 1 < len(contexts[i].widths):
                        deeper.append(_Tip(i, child, branch))
            depth += 1
            if planner is not None and deeper:
                chances = [drafts[tip.text].chances[tip.node] for tip in deeper]
                if not planner.deepen(level(contexts[deeper[0].text], depth), chances):
                    return
            frontier = []
            for i, node, branch in deeper:
                forks.append(cache.fork(branch))
                cache.extend(forks[-1], [drafts[i].tokens[node]])
                frontier.append(_Tip(i, node, forks[-1]))

    def _roots(self, contexts: Sequence[DraftContext], active: Sequence[int]) -> list[_Tip]:
        """Extend the branches of the texts to their current tokens, and compute all but the last chunk."""
        cache = self.runner.cache
        tips = []
        for i in active:
            context = contexts[i]
            if (start := self._start(context)) is None:
                continue
            tokens = list(context.tokens[start:])
            branch = self._branches.setdefault(context.key, cache.open())
            pairs = zip(cache.tokens(branch), tokens, strict=False)
            # The end of the text may have been replaced.
            common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(branch), len(tokens)))
            cache.rollback(branch, common)
            new = tokens[common:]
            if max(new, default=0) >= self._rows:
                continue  # a token of the target's padding, which the draft lacks
            try:
                cache.extend(branch, new)
            except RadixCacheFullError:  # no room for this text; others may be shorter
                self._forget(context.key)
                continue
            computed = cache.computed_length(branch)
            while computed < len(branch) - _CHUNK:
                self.runner.forward([Chunk(branch, computed, computed + _CHUNK)])
                self.forwards += 1
                computed += _CHUNK
            tips.append(_Tip(i, -1, branch))
        return tips

    def _start(self, context: DraftContext) -> int | None:
        """Return where the draft's context window begins in a text, or None. Texts of one prompt begin alike."""
        window, length = self.runner.context, len(context.tokens)
        start = self._starts.get(context.key, 0)
        if 0 < length - start <= window - len(context.widths):
            return start
        self._forget(context.key)
        start = max(0, length - window + max(len(context.widths), window // 4))  # room for the text to grow
        if start >= length:  # the window is too short for the draft
            return None
        self._starts[context.key] = start
        return start

    def _candidates(
        self,
        contexts: Sequence[DraftContext],
        frontier: Sequence[_Tip],
        depth: int,
        drafts: Sequence[Draft],
        weigh: bool,
    ) -> list[tuple[list[int], int]]:
        """Return the candidates after each tip of the frontier, computed in one forward.

        With `weigh`, also return the draft's confidence in its top token, from 0 to 9; otherwise 0.
        """
        cache, began = self.runner.cache, time.perf_counter()
        draws = [contexts[tip.text].draws[depth] for tip in frontier]
        chunks = []
        for (_, _, branch), draw in zip(frontier, draws, strict=True):
            start = min(cache.computed_length(branch), len(branch) - 1)
            chunks.append(Chunk(branch, start, len(branch), [draw]))
        forward = self.runner.forward(chunks)
        self.forwards += 1
        logits = forward.logits[[rows[0] for rows in forward.rows]][:, : self._vocabulary]
        for tip, row, draw in zip(frontier, logits, draws, strict=True):
            if contexts[tip.text].weigh and draw.temperature > 0:
                missing = self._vocabulary - len(row)  # tokens that only the target has
                drafts[tip.text].weights[tip.node] = np.pad(distribution(row, draw), (0, missing))
        found: list[list[int]] = [[] for _ in frontier]
        widths = [contexts[tip.text].widths[depth] for tip in frontier]
        for width in sorted(set(widths)):
            same = [i for i, other in enumerate(widths) if other == width]
            for i, tokens in zip(same, candidates(logits[same], [draws[i] for i in same], width), strict=True):
                found[i] = tokens
        confidence = [0] * len(found)
        if weigh:
            best = read(logits, logits.argmax(-1).tolist())
            confidence = [0 if math.isnan(one.logprob) else int(9.99 * math.exp(one.logprob)) for one in best]
        self.runner.observe(forward, time.perf_counter() - began)
        return list(zip(found, confidence, strict=True))

    def end(self, key: int) -> None:
        with self._lock:
            self._forget(key)

    def _forget(self, key: int) -> None:
        """Free the state of a text."""
        self._starts.pop(key, None)
        if (branch := self._branches.pop(key, None)) is not None:
            self.runner.cache.release(branch)

    def close(self) -> None:
        self.runner.close()
