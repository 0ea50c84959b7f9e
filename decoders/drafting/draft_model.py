"""ModelDrafter: drafts with a second model.

It shares the target's noise, so it guesses the token that the target is most likely to draw.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tot.decoders.drafting.drafters import Draft, DraftContext, Drafter
from tot.decoders.drafting.planner import SpeculationPlanner
from tot.decoders.engine.radix_cache import Branch, RadixCacheFullError
from tot.decoders.engine.runner import Chunk, Runner
from tot.decoders.engine.sampling import candidates, distribution, read
from tot.decoders.errors import ModelError
from tot.decoders.kernels.backend import Backend
from tot.decoders.kernels.native.forward import Quantization
from tot.decoders.models.loaded import LoadedModel

_CHUNK = 512
"""Rows of prompt that a draft model computes in one forward."""


class _Tip(NamedTuple):
    """A node that a draft may be extended from."""

    context: int
    node: int
    branch: Branch
    """Ends in the node, or in its parent until the node is extended."""


def level(context: DraftContext, depth: int) -> Hashable:
    """Return the kind of a draft model's forward at a depth; it succeeds if a token after it is accepted."""
    return "level", depth, round(context.draws[0].temperature, 1)


class ModelDrafter(Drafter):
    """Drafts with a second model over its own RadixCache, with one packed forward per position for all texts."""

    def __init__(
        self,
        loaded: LoadedModel,
        kv_budget: int | str | None,
        vocabulary: int,
        quantize: Quantization | None = None,
        shared: Backend | None = None,
    ) -> None:
        """`quantize` and `shared` are as in `Runner`."""
        self.loaded = loaded
        self.vocabulary = vocabulary
        """Size of the target's logits; the draft's may be larger or smaller."""
        self.runner: Runner = Runner(loaded, kv_budget, quantize, shared)
        self.forwards = 0
        self._lock = threading.Lock()
        """Drafting may run in another thread (SEED's rounds), and decoders share a drafter."""
        self._rows = int(loaded.config.vocab_size)
        self._branches: dict[int, Branch] = {}
        self._starts: dict[int, int] = {}
        """By key: the position of the text at which its branch begins."""

    def draft(self, contexts: Sequence[DraftContext], planner: SpeculationPlanner | None = None) -> list[Draft]:
        with self._lock:
            return self._draft(contexts, planner)

    def _draft(self, contexts: Sequence[DraftContext], planner: SpeculationPlanner | None) -> list[Draft]:
        drafts = [Draft() for _ in contexts]
        active = [i for i, context in enumerate(contexts) if context.widths]
        if not active or not (planner is None or planner.deepen(level(contexts[active[0]], 0), [1.0] * len(active))):
            return drafts
        forks: list[Branch] = []
        try:
            frontier = [_Tip(i, -1, branch) for i, branch in self._follow(contexts)]
            depth = 0
            while frontier:
                candidates_by_tip = self._candidates(contexts, frontier, depth, drafts, planner is not None)
                depth += 1
                deeper: list[_Tip] = []
                for (i, node, branch), (tokens, confidence) in zip(frontier, candidates_by_tip, strict=True):
                    temperature = round(contexts[i].draws[0].temperature, 1)
                    drafts[i].levels[node] = level(contexts[i], depth - 1)
                    for rank, token in enumerate(tokens):
                        child = drafts[i].add(token, node, ("model", temperature, rank, confidence), planner)
                        if child is None:
                            break  # rejection tests candidates in the order in which they were drawn
                        if depth < len(contexts[i].widths):
                            deeper.append(_Tip(i, child, branch))
                if planner is not None and deeper:
                    chances = [drafts[tip.context].chances[tip.node] for tip in deeper]
                    if not planner.deepen(level(contexts[deeper[0].context], depth), chances):
                        break
                frontier = []
                for i, node, branch in deeper:
                    forks.append(self.runner.cache.fork(branch))
                    self.runner.cache.extend(forks[-1], [drafts[i].tokens[node]])
                    frontier.append(_Tip(i, node, forks[-1]))
        except RadixCacheFullError:  # return the draft so far
            pass
        finally:
            for fork in forks:
                self.runner.cache.rollback(fork, 0)
        return drafts

    def _follow(self, contexts: Sequence[DraftContext]) -> list[tuple[int, Branch]]:
        """Extend the branches of all texts to their current tokens, and compute all but the last chunk."""
        cache = self.runner.cache
        tips = []
        for i, context in enumerate(contexts):
            if not context.widths:
                continue
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
            tips.append((i, branch))
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
        """Return the candidates after each branch of the frontier, computed in one forward.

        With `weigh`, also return the draft's confidence in its top token, from 0 to 9; otherwise 0.
        """
        cache, began = self.runner.cache, time.perf_counter()
        chunks = []
        for i, _, branch in frontier:
            start = min(cache.computed_length(branch), len(branch) - 1)
            chunks.append(Chunk(branch, start, len(branch), [contexts[i].draws[depth]]))
        forward = self.runner.forward(chunks)
        self.forwards += 1
        rows = [rows[0] for rows in forward.rows]
        logits = forward.logits[rows][:, : self.vocabulary]
        draws = [contexts[tip.context].draws[depth] for tip in frontier]
        for tip, row, draw in zip(frontier, logits, draws, strict=True):
            if contexts[tip.context].weigh and draw.temperature > 0:
                missing = self.vocabulary - len(row)  # tokens that only the target has
                drafts[tip.context].weights[tip.node] = np.pad(distribution(row, draw), (0, missing))
        top_tokens: list[list[int]] = [[] for _ in frontier]
        widths = [contexts[tip.context].widths[depth] for tip in frontier]
        for width in sorted(set(widths)):
            same = [i for i, other in enumerate(widths) if other == width]
            for i, tokens in zip(same, candidates(logits[same], [draws[i] for i in same], width), strict=True):
                top_tokens[i] = tokens
        self.runner.observe(forward, time.perf_counter() - began)
        if not weigh:
            return [(tokens, 0) for tokens in top_tokens]
        best = read(logits, logits.argmax(-1).tolist())
        confidence = [0 if math.isnan(token.logprob) else int(9.99 * math.exp(token.logprob)) for token in best]
        return list(zip(top_tokens, confidence, strict=True))

    def end(self, key: int) -> None:
        with self._lock:
            self._forget(key)

    def _forget(self, key: int) -> None:
        self._starts.pop(key, None)
        branch = self._branches.pop(key, None)
        if branch is not None:
            self.runner.cache.release(branch)

    def close(self) -> None:
        self.runner.close()


def check_vocabulary(draft: Any, target: Any) -> None:
    """Raise ModelError unless both tokenizers have the same tokens. Embeddings may be padded to different sizes."""
    draft_ids, target_ids = draft.get_vocab(), target.get_vocab()
    different = sorted(
        token for token in draft_ids.keys() | target_ids.keys() if draft_ids.get(token) != target_ids.get(token)
    )
    if different:
        examples = ", ".join(
            f"{token!r} ({draft_ids.get(token)} and {target_ids.get(token)})" for token in different[:3]
        )
        raise ModelError(
            f"the draft's tokenizer differs from the target's in {len(different)} of {len(target_ids)} tokens, such as "
            f"{examples}: choose a draft of the same family, or draft=None for lookup"
        )
