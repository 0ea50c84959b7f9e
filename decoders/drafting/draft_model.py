"""Draft models: a second model drafts over its own RadixCache, one packed forward per position for all texts.

The draft is drawn with the target's own noise, so it guesses the token that the target is most likely to draw.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tot.decoders.drafting.drafters import Draft, DraftContext, Drafter
from tot.decoders.drafting.lookup import LookupDrafter
from tot.decoders.drafting.planner import SpeculationPlanner
from tot.decoders.engine.engine import Engine
from tot.decoders.engine.radix_cache import Branch, RadixCacheFullError
from tot.decoders.engine.runner import Chunk, Runner
from tot.decoders.engine.sampling import candidates, distribution, read
from tot.decoders.errors import REMOVED, ModelError, OptionError, unknown
from tot.decoders.kernels.native.packed_file import open_packed
from tot.decoders.models.loaded import LoadedModel
from tot.decoders.models.model_names import model_key

_CHUNK = 512
"""Rows of prompt that a draft model computes in one forward."""
_TIMED = 16
"""Number of forwards after which the estimate of their cost is trusted."""
_loading = threading.Lock()
"""Held while a draft is loaded, so that decoders that name the same one share it."""


def level(context: DraftContext, depth: int) -> Hashable:
    """Return the kind of a draft model's forward at a depth; it succeeds if a token after it is accepted."""
    return "level", depth, round(context.draws[0].temperature, 1)


class _Tip(NamedTuple):
    """A node that a draft may be extended from."""

    text: int
    """Number of the context."""
    node: int
    branch: Branch
    chance: float = 1.0
    """Of being reached."""


class ModelDrafter(Drafter):
    """Drafts with a second model."""

    def __init__(self, loaded: LoadedModel, kv_budget: int | str | None, vocabulary: int) -> None:
        """`vocabulary`: size of the target's logits, which may be larger or smaller."""
        self.loaded = loaded
        self.runner: Runner = Runner(loaded, kv_budget)
        self.forwards = 0
        self._vocabulary = vocabulary
        self._branches: dict[int, Branch] = {}
        self._lock = threading.Lock()
        """Drafting may run in another thread (SEED's rounds), and decoders share a drafter."""
        self._closed = False

    def draft(self, contexts: Sequence[DraftContext], planner: SpeculationPlanner | None = None) -> list[Draft]:
        with self._lock:
            forks: list[Branch] = []
            drafts = [Draft() for _ in contexts]
            if self._closed:
                return drafts
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
        cache, depth = self.runner.cache, 0
        tips = self._roots(contexts)
        while tips:
            kind, chances = level(contexts[tips[0].text], depth), [tip.chance for tip in tips]
            if planner is not None and not planner.deepen(kind, chances, self.forwards >= _TIMED):
                return
            added: list[tuple[_Tip, int]] = []
            found = self._candidates(contexts, tips, depth, drafts, planner is not None)
            for tip, (tokens, confidence) in zip(tips, found, strict=True):
                context, draft = contexts[tip.text], drafts[tip.text]
                draft.levels[tip.node] = level(context, depth)
                for rank, token in enumerate(tokens):
                    kind = ("model", round(context.draws[0].temperature, 1), rank, confidence)
                    if (child := draft.add(token, tip.node, kind, planner)) is None:
                        break  # rejection tests candidates in the order in which they were drawn
                    if depth + 1 < len(context.widths):
                        added.append((tip, child))
            depth += 1
            tips = []
            for tip, child in added:
                forks.append(cache.fork(tip.branch))
                cache.extend(forks[-1], [drafts[tip.text].tokens[child]])
                tips.append(_Tip(tip.text, child, forks[-1], drafts[tip.text].chances[child]))

    def _roots(self, contexts: Sequence[DraftContext]) -> list[_Tip]:
        """Extend the branches of the texts to their current tokens. Texts that the model cannot continue are left out.

        These are longer than its context, or have a token of the target's padding.
        """
        cache, tips = self.runner.cache, []
        for i, context in enumerate(contexts):
            if not context.widths or len(context.tokens) + len(context.widths) > self.runner.context:
                continue
            branch = self._branches.setdefault(context.key, cache.open())
            pairs = zip(cache.tokens(branch), context.tokens, strict=False)
            # The end of the text may have been replaced.
            common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(branch), len(context.tokens)))
            cache.rollback(branch, common)
            new = context.tokens[common:]
            if max(new, default=0) >= self.loaded.config.vocab_size:
                continue
            try:
                cache.extend(branch, new)
            except RadixCacheFullError:  # no room for this text; others may be shorter
                self._forget(context.key)
                continue
            tips.append(_Tip(i, -1, branch))
        return tips

    def _candidates(
        self,
        contexts: Sequence[DraftContext],
        tips: Sequence[_Tip],
        depth: int,
        drafts: Sequence[Draft],
        weigh: bool,
    ) -> list[tuple[list[int], int]]:
        """Return the candidates after each tip, computed in one forward after all but the last chunk of new prompts.

        With `weigh`, also return the draft's confidence in its top token, from 0 to 9; otherwise 0.
        """
        cache = self.runner.cache
        draws = [contexts[tip.text].draws[depth] for tip in tips]
        starts = []
        for tip in tips:
            start = min(cache.computed_length(tip.branch), len(tip.branch) - 1)
            while len(tip.branch) - start > _CHUNK:
                self.runner.forward([Chunk(tip.branch, start, start + _CHUNK)])
                self.forwards += 1
                start += _CHUNK
            starts.append(start)
        began = time.perf_counter()
        forward = self.runner.forward(
            [Chunk(tip.branch, at, len(tip.branch), [how]) for tip, at, how in zip(tips, starts, draws, strict=True)]
        )
        self.forwards += 1
        logits = forward.logits[[rows[0] for rows in forward.rows]][:, : self._vocabulary]
        for tip, row, draw in zip(tips, logits, draws, strict=True):
            if contexts[tip.text].weigh and draw.temperature > 0:
                missing = self._vocabulary - len(row)  # tokens that only the target has
                drafts[tip.text].weights[tip.node] = np.pad(distribution(row, draw), (0, missing))
        found = candidates(logits, draws, contexts[tips[0].text].widths[depth])  # all texts have the same k_config
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
        if (branch := self._branches.pop(key, None)) is not None:
            self.runner.cache.release(branch)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self.runner.close()


def make_drafter(draft: Any, engine: Engine, stack: ExitStack) -> Drafter:
    """Return the drafter that the option `draft` names, for an engine. `stack` closes the resources opened for it.

    Args:
        draft: None or "lookup" for prompt lookup; another name, a path or a model object for that model. A Drafter is
            returned as it is, and its owner closes it.

    Decoders of one engine share the draft models that they name, which stay open until the engine closes. Warns if the
    draft is not smaller than its target. Raises ModelError if the draft's tokens differ from the target's.
    """
    if isinstance(draft, Drafter):
        return draft
    if draft is None or draft == "lookup":
        return LookupDrafter()
    named = isinstance(draft, str | Path)
    if isinstance(draft, str) and draft.partition(":")[0] in REMOVED:
        raise OptionError(unknown("draft", draft, ()))
    if not named and not hasattr(draft, "config"):
        raise OptionError(f"draft={draft!r} is not a model: give a name, a path, a model object or lookup")
    if not named:
        own = _load_drafter(draft, named, engine)
        stack.callback(own.close)
        return own
    with _loading:
        if (key := model_key(draft)) not in engine.drafters:
            engine.drafters[key] = _load_drafter(draft, named, engine)
        shared: ModelDrafter = engine.drafters[key]
    return shared


def _load_drafter(draft: Any, named: bool, engine: Engine) -> ModelDrafter:
    """Load a draft model with the target's number of cache slots, so that every admitted request has room.

    Its weights are quantized like the target's if possible.
    """
    target = engine.loaded
    for integers in dict.fromkeys((target.weights.integers, False)):
        loaded = open_packed(
            draft,
            tokenizer=None if named else target.tokenizer,
            dtype=target.dtype.name if named else "auto",
            device=target.device,
            integers=integers,
        )
        check_vocabulary(loaded.tokenizer, target.tokenizer)
        try:
            drafter = ModelDrafter(loaded, engine.cache.capacity, target.config.vocab_size)
            break
        except OptionError as error:
            reason = error
    else:
        raise OptionError(f"no room for the draft's keys and values beside the target's: {reason}")
    if loaded.size >= target.size:
        warnings.warn(
            f"the draft {loaded.name} has {loaded.size:,} weights and the target {target.name} {target.size:,}: "
            "drafting will not make it faster; choose a smaller draft",
            stacklevel=4,
        )
    return drafter


def check_vocabulary(draft: Any, target: Any) -> None:
    """Raise ModelError unless both tokenizers have the same tokens. Embeddings may be padded to different sizes."""
    draft_ids, target_ids = draft.get_vocab(), target.get_vocab()
    if different := sorted({token for token, _ in draft_ids.items() ^ target_ids.items()}):
        examples = ", ".join(f"{one!r} ({draft_ids.get(one)} and {target_ids.get(one)})" for one in different[:3])
        raise ModelError(
            f"the draft's tokenizer differs from the target's in {len(different)} of {len(target_ids)} tokens, such as "
            f"{examples}: choose a draft of the same family, or draft=None for lookup"
        )
