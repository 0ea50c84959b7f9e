"""ModelDrafter: drafts with a second model, over its own RadixCache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from tot.decoders.drafting.drafters import DraftContext
from tot.decoders.drafting.levels import LevelDrafter, Tip
from tot.decoders.engine.radix_cache import Branch, RadixCacheFullError
from tot.decoders.engine.runner import Chunk, Runner
from tot.decoders.errors import ModelError
from tot.decoders.kernels.native.forward import Quantization
from tot.decoders.models.loaded import LoadedModel

_CHUNK = 512
"""Rows of prompt that a draft model computes in one forward."""
_TIMED = 16
"""Number of forwards after which the estimate of their cost is trusted."""


class ModelDrafter(LevelDrafter[Branch]):
    """Drafts with a second model, with one packed forward per position for all texts."""

    def __init__(
        self,
        loaded: LoadedModel,
        kv_budget: int | str | None,
        vocabulary: int,
        quantize: Quantization | None = None,
    ) -> None:
        """`quantize` is as in `Runner`."""
        super().__init__(vocabulary)
        self.loaded = loaded
        self.runner: Runner = Runner(loaded, kv_budget, quantize)
        self.forwards = 0
        self._rows = int(loaded.config.vocab_size)
        self._branches: dict[int, Branch] = {}
        self._forks: list[Branch] = []
        """Branches of the draft that is being made."""
        self._starts: dict[int, int] = {}
        """By key: the position of the text at which its branch begins."""

    @property
    def timed(self) -> bool:
        return self.forwards >= _TIMED

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

    def _logits(self, contexts: Sequence[DraftContext], frontier: Sequence[Tip[Branch]], depth: int) -> Any:
        cache, began = self.runner.cache, time.perf_counter()
        chunks = []
        for i, _, branch in frontier:
            start = min(cache.computed_length(branch), len(branch) - 1)
            chunks.append(Chunk(branch, start, len(branch), [contexts[i].draws[depth]]))
        forward = self.runner.forward(chunks)
        self.forwards += 1
        self.runner.observe(forward, time.perf_counter() - began)
        return forward.logits[[rows[0] for rows in forward.rows]][:, : self.vocabulary]

    def _child(self, place: Branch, token: int) -> Branch:
        self._forks.append(self.runner.cache.fork(place))
        self.runner.cache.extend(self._forks[-1], [token])
        return self._forks[-1]

    def _free(self) -> None:
        for fork in self._forks:
            self.runner.cache.rollback(fork, 0)
        self._forks = []

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
