"""ModelDrafter: a second model drafts. It shares the target's noise, so it guesses the token that the target is most
likely to draw."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from torch.nn.functional import pad

from tot.decoders.drafting.drafters import Draft, DraftContext, Drafter
from tot.decoders.drafting.planner import SpeculationPlanner
from tot.decoders.engine.radix_cache import Branch, RadixCacheFullError
from tot.decoders.engine.runner import Chunk, Runner
from tot.decoders.engine.sampling import candidates, distribution
from tot.decoders.errors import ModelError
from tot.decoders.kernels.backend import Backend
from tot.decoders.kernels.native.forward import Quantization
from tot.decoders.models.loaded import LoadedModel

_CHUNK = 512
"""Rows of prompt that a draft model computes in one forward."""


class _Tip(NamedTuple):
    """A node that a draft may go on from."""

    context: int
    node: int
    branch: Branch
    """Ends in the node; or in its parent, until it is gone on from."""


def level(context: DraftContext, depth: int) -> Hashable:
    """What the share of a model's forwards at that depth, after which something was accepted, is kept under."""
    return "level", depth, round(context.draws[0].temperature, 1)


class ModelDrafter(Drafter):
    """Drafts with a second model over a RadixCache of its own; all texts in one packed forward a position."""

    def __init__(
        self,
        loaded: LoadedModel,
        kv_budget: int | str | None,
        vocabulary: int,
        quantize: Quantization | None = None,
        shared: Backend | None = None,
    ) -> None:
        """`quantize` and `shared` as for a Runner."""
        self.loaded = loaded
        self.vocabulary = vocabulary
        """Tokens that the target has logits for; a draft may have more or fewer of them."""
        self.runner: Runner = Runner(loaded, kv_budget, quantize, shared)
        self.forwards = 0
        self._lock = threading.Lock()
        """Drafting may go on in a thread of its own (SEED's rounds), and decoders share a drafter."""
        self._rows = int(loaded.config.vocab_size)
        self._branches: dict[int, Branch] = {}
        self._starts: dict[int, int] = {}
        """By key: the first token of the text that its branch holds."""

    def draft(self, contexts: Sequence[DraftContext], planner: SpeculationPlanner | None = None) -> list[Draft]:
        with self._lock:
            return self._draft(contexts, planner)

    def _draft(self, contexts: Sequence[DraftContext], planner: SpeculationPlanner | None) -> list[Draft]:
        drafts = [Draft() for _ in contexts]
        asked = [i for i, context in enumerate(contexts) if context.widths]
        if not asked or not (planner is None or planner.deepen(level(contexts[asked[0]], 0), [1.0] * len(asked))):
            return drafts
        forks: list[Branch] = []
        try:
            frontier = [_Tip(i, -1, branch) for i, branch in self._follow(contexts)]
            depth = 0
            while frontier:
                grown = self._candidates(contexts, frontier, depth, drafts, planner is not None)
                depth += 1
                deeper: list[_Tip] = []
                for (i, node, branch), (tokens, sure) in zip(frontier, grown, strict=True):
                    heat = round(contexts[i].draws[0].temperature, 1)
                    drafts[i].levels[node] = level(contexts[i], depth - 1)
                    for rank, token in enumerate(tokens):
                        child = drafts[i].add(token, node, ("model", heat, rank, sure), planner)
                        if child is None:
                            break  # rejection takes candidates in the order in which they were drawn
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
        except RadixCacheFullError:  # what was drafted so far is as good
            pass
        finally:
            for fork in forks:
                self.runner.cache.rollback(fork, 0)
        return drafts

    def _follow(self, contexts: Sequence[DraftContext]) -> list[tuple[int, Branch]]:
        """Bring the branches of all texts up to date, but for computing their last token."""
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
            # Something else may have been written in the end's place.
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(branch), len(tokens)))
            cache.rollback(branch, same)
            new = tokens[same:]
            if max(new, default=0) >= self._rows:
                continue  # a token of the target's padding: the draft has no such row
            try:
                cache.extend(branch, new)
            except RadixCacheFullError:  # no room for this text: others may be shorter
                self._forget(context.key)
                continue
            done = cache.computed_length(branch)
            while done < len(branch) - _CHUNK:
                self.runner.forward([Chunk(branch, done, done + _CHUNK)])
                self.forwards += 1
                done += _CHUNK
            tips.append((i, branch))
        return tips

    def _start(self, context: DraftContext) -> int | None:
        """Where the draft's view of a text begins: it may see less than the target. Texts of one prompt begin alike."""
        window, length = self.runner.context, len(context.tokens)
        start = self._starts.get(context.key, 0)
        if 0 < length - start <= window - len(context.widths):
            return start
        self._forget(context.key)
        start = max(0, length - window + max(len(context.widths), window // 4))  # room for the text to grow
        if start >= length:  # a window that holds no draft of that length
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
        """The tokens that may follow each branch of the frontier, computed in one forward, and how sure the draft is of
        what comes there, from 0 to 9 (0 where nobody weighs it)."""
        cache = self.runner.cache
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
                missing = self.vocabulary - len(row)  # tokens that only the target may write
                drafts[tip.context].weights[tip.node] = pad(distribution(row, draw), (0, missing))
        grown: list[list[int]] = [[] for _ in frontier]
        widths = [contexts[tip.context].widths[depth] for tip in frontier]
        for width in sorted(set(widths)):
            same = [at for at, wanted in enumerate(widths) if wanted == width]
            for at, tokens in zip(same, candidates(logits[same], [draws[at] for at in same], width), strict=True):
                grown[at] = tokens
        if not weigh:
            return [(tokens, 0) for tokens in grown]
        sure = (logits.amax(-1) - logits.logsumexp(-1)).exp().mul_(9.99).nan_to_num_(0.0).int().tolist()
        return list(zip(grown, sure, strict=True))

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
    """Raise ModelError unless two tokenizers have the same tokens; embeddings may be padded to different sizes."""
    ours, theirs = draft.get_vocab(), target.get_vocab()
    different = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if different:
        shown = ", ".join(f"{token!r} ({ours.get(token)} and {theirs.get(token)})" for token in different[:3])
        raise ModelError(
            f"the draft's tokenizer differs from the target's in {len(different)} of {len(theirs)} tokens, such as "
            f"{shown}: choose a draft of the same family, or draft=None for lookup"
        )
