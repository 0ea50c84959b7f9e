"""Drafters: what a text may go on with, guessed cheaply, for a target model to verify.

ModelDrafter asks a second model that shares the target's noise, so it guesses the token that the target is most likely
to draw; LookupDrafter asks no model: it finds where the text's end was seen before, in the prompt or in any branch of
the reasoning tree. A drafter never decides what comes out, only how fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from tot.decoders.engine.kv_tree import Branch, KVTreeFullError
from tot.decoders.engine.loading import LoadedModel
from tot.decoders.engine.runner import Feed, Runner
from tot.decoders.engine.sampling import Draw, candidates, distribution, read
from tot.decoders.errors import ModelError
from tot.decoders.ngram_index import NgramIndex

_CHUNK = 512
"""Rows of prompt that a draft model computes in one forward."""


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
    replacement: bool = False
    """Candidates of one position are drawn independently of each other, so that some may be equal."""


@dataclass(slots=True)
class Draft:
    """A tree of tokens; a node stands after its parent in the lists, -1 being the text's end."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    weights: dict[int, Tensor] = field(default_factory=dict)
    """By node (-1 for the text's end): the probabilities (vocab,) that its children were drawn with."""

    def add(self, token: int, parent: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
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


class Drafter(Protocol):
    def draft(self, contexts: Sequence[Context]) -> list[Draft]:
        """A draft for each text, which may be empty."""

    def end(self, key: int) -> None:
        """That text will not be continued."""

    def close(self) -> None:
        """Give everything back."""


class LookupDrafter:
    """Drafts what followed the text's last tokens when they were last seen, in any text of this engine so far.

    Prompt lookup (Saxena, 2023) over sibling and ancestor branches too: they are prompts and texts like any other.
    """

    def __init__(self) -> None:
        self.index = NgramIndex()
        self._texts: dict[int, tuple[int, int]] = {}
        """By key: the number in the index, and how many tokens it has of the text."""
        self._prompts: dict[tuple[int, ...], int] = {}

    def draft(self, contexts: Sequence[Context]) -> list[Draft]:
        for context in contexts:
            self._learn(context)
        drafts = []
        for context in contexts:
            draft, parent = Draft(), -1
            for token in self.index.follow(context.tokens, len(context.widths)):
                parent = draft.add(token, parent)
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

    def close(self) -> None:
        pass


class ModelDrafter:
    """Drafts with a second model over a KVTree of its own; all texts in one packed forward a position."""

    def __init__(self, loaded: LoadedModel, kv_budget: int | str | None = None, vocabulary: int | None = None) -> None:
        self.loaded = loaded
        self.vocabulary = vocabulary
        """Tokens that the target has logits for; a draft may be padded to more."""
        self.runner = Runner(loaded.model, kv_budget)
        self.forwards = 0
        self._rows = int(loaded.model.get_input_embeddings().num_embeddings)
        self._branches: dict[int, Branch] = {}

    def draft(self, contexts: Sequence[Context]) -> list[Draft]:
        drafts = [Draft() for _ in contexts]
        forks: list[Branch] = []
        try:
            tips = self._follow(contexts)
            # (which context, node, branch that ends in it)
            frontier = [(i, -1, branch) for i, branch in tips]
            depth = 0
            while frontier:
                grown = self._candidates(contexts, frontier, depth, drafts)
                depth += 1
                deeper: list[tuple[int, int, Branch]] = []
                for (i, node, branch), tokens in zip(frontier, grown, strict=True):
                    for token in tokens:
                        child = drafts[i].add(token, node)
                        if depth < len(contexts[i].widths):
                            fork = self.runner.tree.fork(branch)
                            forks.append(fork)
                            self.runner.tree.extend(fork, [token])
                            deeper.append((i, child, fork))
                frontier = deeper
        except KVTreeFullError:  # what was drafted so far is as good
            pass
        finally:
            for fork in forks:
                self.runner.tree.rollback(fork, 0)
        return drafts

    def _follow(self, contexts: Sequence[Context]) -> list[tuple[int, Branch]]:
        """Bring the branches of all texts up to date, but for computing their last token."""
        tree = self.runner.tree
        tips = []
        for i, context in enumerate(contexts):
            if not context.widths:
                continue
            tokens = list(context.tokens)
            branch = self._branches.setdefault(context.key, tree.open())
            same = min(len(branch), len(tokens))
            held = tree.tokens(branch)[:same]
            while held != tokens[:same]:  # an answer's trigger has taken a rationale's end away
                same -= 1
                held = held[:same]
            tree.rollback(branch, same)
            if max(tokens[same:], default=0) >= self._rows:
                continue  # a token of the target's padding: the draft has no such row
            try:
                tree.extend(branch, tokens[same:])
            except KVTreeFullError:  # no room for this text: others may be shorter
                self.end(context.key)
                continue
            start = tree.computed_length(branch)
            while start < len(branch) - _CHUNK:
                self.runner.forward([Feed(branch, start, start + _CHUNK)])
                self.forwards += 1
                start += _CHUNK
            tips.append((i, branch))
        return tips

    def _candidates(
        self,
        contexts: Sequence[Context],
        frontier: Sequence[tuple[int, int, Branch]],
        depth: int,
        drafts: Sequence[Draft],
    ) -> list[list[int]]:
        """The tokens that may follow each branch of the frontier, computed in one forward."""
        tree = self.runner.tree
        feeds = []
        for i, _, branch in frontier:
            start = min(tree.computed_length(branch), len(branch) - 1)
            feeds.append(Feed(branch, start, len(branch), [contexts[i].draws[depth]]))
        forward = self.runner.forward(feeds)
        self.forwards += 1
        rows = [rows[0] for rows in forward.rows]
        logits = forward.logits[rows][:, : self.vocabulary]
        draws = [contexts[i].draws[depth] for i, _, _ in frontier]
        for (i, node, _), row, draw in zip(frontier, logits, draws, strict=True):
            if contexts[i].weigh and draw.temperature > 0:
                drafts[i].weights[node] = distribution(row, draw)
        grown: list[list[int]] = [[] for _ in frontier]
        kinds = [(contexts[i].widths[depth], contexts[i].replacement) for i, _, _ in frontier]
        for width, replacement in sorted(set(kinds)):
            same = [at for at, kind in enumerate(kinds) if kind == (width, replacement)]
            if replacement:  # every candidate with noise of its own
                many = [draws[at]._replace(sample=draws[at].sample + (j << 32)) for at in same for j in range(width)]
                drawn = iter(read(logits[same].repeat_interleave(width, 0), many))
                found = [[next(drawn).token for _ in range(width)] for _ in same]
            else:
                found = candidates(logits[same], [draws[at] for at in same], width)
            for at, tokens in zip(same, found, strict=True):
                grown[at] = tokens
        return grown

    def end(self, key: int) -> None:
        branch = self._branches.pop(key, None)
        if branch is not None:
            self.runner.tree.release(branch)

    def close(self) -> None:
        self.runner.close()


class DrafterChain:
    """Asks one drafter, and for texts it has nothing for the next."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = drafters

    def draft(self, contexts: Sequence[Context]) -> list[Draft]:
        drafts = [Draft() for _ in contexts]
        for drafter in self._drafters:
            missing = [i for i, draft in enumerate(drafts) if not draft.tokens]
            for i, draft in zip(missing, drafter.draft([contexts[i] for i in missing]), strict=True):
                drafts[i] = draft
        return drafts

    def end(self, key: int) -> None:
        for drafter in self._drafters:
            drafter.end(key)

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.close()


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
