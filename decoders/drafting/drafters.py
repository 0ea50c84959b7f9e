"""Drafters: what a text may go on with, guessed cheaply, for a target model to verify.

ModelDrafter asks a second model that shares the target's noise, so it guesses the token that the target is most likely
to draw; LookupDrafter asks no model: it finds where the text's end was seen before, in the prompt or in any branch of
the reasoning tree. A drafter never decides what comes out, only how fast.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.functional import pad

from tot.decoders.drafting.ngram_index import NgramIndex
from tot.decoders.drafting.planner import SpeculationPlanner
from tot.decoders.engine.radix_cache import Branch, RadixCacheFullError
from tot.decoders.engine.runner import Chunk, Runner
from tot.decoders.engine.sampling import Draw, candidates, distribution
from tot.decoders.errors import ModelError
from tot.decoders.kernels.backend import Backend
from tot.decoders.models.loading import LoadedModel
from tot.decoders.request import Purpose

_CHUNK = 512
"""Rows of prompt that a draft model computes in one forward."""
_LOOKUP_DEPTH = 3
"""From here on, tokens that were looked up are accepted about as often, one after the other."""


@dataclass(frozen=True, slots=True)
class Context:
    """A text to be continued."""

    key: int
    """The same for one text as it grows."""
    prompt: Sequence[int]
    """What the text began with."""
    tokens: Sequence[int]
    """All of it, prompt and what was drawn."""
    draws: Sequence[Draw]
    """How the target will draw each of the next tokens: as many as may be drafted."""
    widths: Sequence[int]
    """k_config: how many candidates at each of these positions, after each candidate before it."""
    weigh: bool = False
    """The probabilities that candidates are drawn with are wanted too."""
    purpose: Purpose = "generate"


@dataclass(slots=True)
class Draft:
    """A tree of tokens; a node stands after its parent in the lists, -1 being the text's end."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    kinds: list[Hashable] = field(default_factory=list)
    """By node: what is learned from its being accepted or not is of use for others of this kind."""
    chances: list[float] = field(default_factory=list)
    """By node: that all up to it is accepted, where that is known."""
    levels: dict[int, Hashable] = field(default_factory=dict)
    """By node whose children a model drafted: the kind of that forward, which brought something if one is accepted."""
    weights: dict[int, Tensor] = field(default_factory=dict)
    """By node (-1 for the text's end): the probabilities (vocab,) that its children were drawn with, vocab being the
    target's."""
    probes: list[list[int]] = field(default_factory=list)
    """Tokens to be fed after the text's end beside the tree, for what the target draws after the last of them: nothing
    of them is ever accepted. The longest come last, and are left out where the model's context ends."""

    def add(
        self, token: int, parent: int, kind: Hashable = None, planner: SpeculationPlanner | None = None
    ) -> int | None:
        """The new node; None where it does not pay by the plan."""
        chance = 1.0
        if planner is not None:
            chance = planner.statistics.chance(kind) * (1.0 if parent < 0 else self.chances[parent])
            if not planner.admit(chance):
                return None
        self.tokens.append(token)
        self.parents.append(parent)
        self.kinds.append(kind)
        self.chances.append(chance)
        return len(self.tokens) - 1

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def path(self, node: int) -> list[int]:
        """The nodes from the text's end to `node`, which is the last."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def leaves(self) -> list[int]:
        """Nodes without children, depth first."""
        inner = set(self.parents)
        return sorted((node for node in range(len(self.tokens)) if node not in inner), key=self.path)


class Verified(NamedTuple):
    """What became of a draft."""

    context: Context
    """The text as it was drafted for."""
    draft: Draft
    drawn: Mapping[int, int]
    """By node (-1 for the text's end): the token that the target drew after it."""
    probed: Sequence[int]
    """The tokens that it drew after the draft's first probes."""
    accepted: int
    """How many of the draft's tokens are now part of the text; one more token was drawn after them."""


class Drafter(ABC):
    runner: Runner | None = None
    """What runs its model, where it has one."""

    @abstractmethod
    def draft(self, contexts: Sequence[Context], planner: SpeculationPlanner | None = None) -> list[Draft]:
        """A draft for each text, which may be empty. With a planner, what does not pay is left out."""

    def observe(self, verified: Verified) -> None:  # noqa: B027
        """Learn from what became of a draft, be it this drafter's or another's."""

    def end(self, key: int) -> None:  # noqa: B027
        """That text will not be continued."""


class LookupDrafter(Drafter):
    """Drafts what followed the text's last tokens when they were last seen, in any text of this engine so far.

    Prompt lookup (Saxena, 2023) over sibling and ancestor branches too: they are prompts and texts like any other.
    """

    def __init__(self) -> None:
        self.index = NgramIndex()
        self._texts: dict[int, tuple[int, int]] = {}
        """By key: the number in the index, and how many tokens it has of the text."""
        self._prompts: dict[tuple[int, ...], int] = {}

    def draft(self, contexts: Sequence[Context], planner: SpeculationPlanner | None = None) -> list[Draft]:
        for context in contexts:
            self._learn(context)
        drafts = []
        for context in contexts:
            draft, node = Draft(), -1
            matched, tokens = self.index.follow(context.tokens, len(context.widths))
            for depth, token in enumerate(tokens):
                added = draft.add(token, node, ("lookup", matched, min(depth, _LOOKUP_DEPTH)), planner)
                if added is None:
                    break
                node = added
            drafts.append(draft)
        return drafts

    def _learn(self, context: Context) -> None:
        if context.key not in self._texts:
            prompt = tuple(context.prompt)
            if self._prompts.get(prompt, 0) not in self.index:
                self._prompts = {known: text for known, text in self._prompts.items() if text in self.index}
                self._prompts[prompt] = self.index.begin()
                self.index.extend(self._prompts[prompt], prompt)
            # A text begins with the prompt's end, so that n-grams span the two.
            self._texts[context.key] = self.index.begin(), max(0, len(prompt) - self.index.longest)
        text, known = self._texts[context.key]
        self.index.extend(text, context.tokens[known:])
        self._texts[context.key] = text, len(context.tokens)

    def end(self, key: int) -> None:
        self._texts.pop(key, None)


class _Tip(NamedTuple):
    """A node that a draft may go on from."""

    context: int
    node: int
    branch: Branch
    """Ends in the node; or in its parent, until it is gone on from."""


def level(context: Context, depth: int) -> Hashable:
    """What the share of a model's forwards at that depth, after which something was accepted, is kept under."""
    return "level", depth, round(context.draws[0].temperature, 1)


class ModelDrafter(Drafter):
    """Drafts with a second model over a RadixCache of its own; all texts in one packed forward a position."""

    def __init__(
        self,
        loaded: LoadedModel,
        kv_budget: int | str | None,
        vocabulary: int,
        owned: bool = False,
        shared: Backend | None = None,
    ) -> None:
        """`owned` and `shared` as for a Runner: a model that nobody else has, or one of the target's layers."""
        self.loaded = loaded
        self.vocabulary = vocabulary
        """Tokens that the target has logits for; a draft may have more or fewer of them."""
        self.runner: Runner = Runner(loaded.model, kv_budget, None, owned, shared)
        self.forwards = 0
        self._lock = threading.Lock()
        """Drafting may go on in a thread of its own (SEED's rounds), and decoders share a drafter."""
        self._rows = int(loaded.model.get_input_embeddings().num_embeddings)
        self._branches: dict[int, Branch] = {}
        self._starts: dict[int, int] = {}
        """By key: the first token of the text that its branch holds."""

    def draft(self, contexts: Sequence[Context], planner: SpeculationPlanner | None = None) -> list[Draft]:
        with self._lock:
            return self._draft(contexts, planner)

    def _draft(self, contexts: Sequence[Context], planner: SpeculationPlanner | None) -> list[Draft]:
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

    def _follow(self, contexts: Sequence[Context]) -> list[tuple[int, Branch]]:
        """Bring the branches of all texts up to date, but for computing their last token."""
        cache = self.runner.cache
        tips = []
        for i, context in enumerate(contexts):
            if not context.widths:
                continue
            if (start := self._start(context)) is None:
                continue
            branch = self._branches.setdefault(context.key, cache.open())
            new = context.tokens[start + len(branch) :]
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

    def _start(self, context: Context) -> int | None:
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
        contexts: Sequence[Context],
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


class DrafterChain(Drafter):
    """Asks one drafter, and for texts it has nothing for the next."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = drafters
        self.runner = next((drafter.runner for drafter in drafters if drafter.runner is not None), None)

    def draft(self, contexts: Sequence[Context], planner: SpeculationPlanner | None = None) -> list[Draft]:
        drafts = [Draft() for _ in contexts]
        for drafter in self._drafters:
            missing = [i for i, draft in enumerate(drafts) if not draft.tokens]
            for i, draft in zip(missing, drafter.draft([contexts[i] for i in missing], planner), strict=True):
                drafts[i] = draft
        return drafts

    def observe(self, verified: Verified) -> None:
        for drafter in self._drafters:
            drafter.observe(verified)

    def end(self, key: int) -> None:
        for drafter in self._drafters:
            drafter.end(key)


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
