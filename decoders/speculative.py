"""Speculative decoding: a drafter guesses several tokens, the target verifies all of them in one forward.

SD (Leviathan et al., 2023) drafts a chain; MCSD (Yang et al., 2024; SEED, section 3.2) drafts a tree, k_config being
how many candidates each position has. Verification is coupled: the target draws each token with its own seeded noise,
and a drafted token is accepted where it is that token. So what comes out is token for token what `ar` gives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from tot.decoders.autoregressive import Autoregressive, Strand
from tot.decoders.drafters import Context, Draft, Drafter
from tot.decoders.engine.job import Job
from tot.decoders.engine.kv_tree import Branch
from tot.decoders.engine.runner import Feed
from tot.decoders.engine.sampling import Sampled

_keys = itertools.count()
KConfig = Annotated[tuple[Annotated[int, Field(ge=1, le=64)], ...], Field(min_length=1, max_length=16)]


class SDOptions(BaseModel):
    """Options of `sd`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    draft: Any = None
    """A draft model: a name, a hub id, a folder or a GGUF file; None looks tokens up in what was written so far."""
    k: Annotated[int, Field(ge=1, le=16)] = 4
    """Tokens drafted a step."""

    @property
    def k_config(self) -> tuple[int, ...]:
        return (1,) * self.k


class MCSDOptions(BaseModel):
    """Options of `mcsd`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    draft: Any = None
    """As for `sd`. Lookup drafts a single chain."""
    k_config: KConfig = (2, 2, 1)
    """Candidates at each position drafted, after each candidate of the position before."""


class Speculation:
    """What all requests of one decoder share: the drafter, which drafts for all of them at once."""

    def __init__(self, drafter: Drafter, k_config: Sequence[int]) -> None:
        self.drafter = drafter
        self.k_config = tuple(k_config)
        self.nodes = sum(math.prod(self.k_config[: depth + 1]) for depth in range(len(self.k_config)))
        """Tokens of one full draft."""

    def prepare(self, policies: Sequence[Speculative]) -> None:
        """Draft for every sample that is about to go on."""
        asked = [(policy, strand) for policy in policies for strand in policy.decoding()]
        contexts = [policy.context(strand) for policy, strand in asked]
        for (policy, strand), draft in zip(asked, self.drafter.draft(contexts), strict=True):
            policy.drafts[strand.output.index] = draft


class Speculative(Autoregressive):
    """Decodes as `Autoregressive` does, several tokens a step where the draft is right."""

    def __init__(self, job: Job, companion: Speculation) -> None:
        super().__init__(job, companion)
        self._speculation = companion
        self._keys = [next(_keys) for _ in job.outputs]
        self.drafts: dict[int, Draft] = {}
        """By sample: what is to be verified next."""
        self._paths: dict[int, list[tuple[Branch, list[int]]]] = {}
        """By sample: a branch for each leaf of the draft, and the nodes that it reads."""

    def growth(self) -> int:
        return super().growth() + self._speculation.nodes * len(self._job.running)

    def context(self, strand: Strand) -> Context:
        """What a drafter needs to know. Drafts end one token early: the target always adds one of its own."""
        output, config = strand.output, self._speculation.k_config
        widths = config[: max(0, output.room - 1)]
        return Context(
            key=self._keys[output.index],
            prompt=self._job.prompt,
            tokens=[*self._job.tree.tokens(strand.branch), *strand.pending],
            draws=[output.draw(ahead) for ahead in range(len(widths))],
            widths=widths,
        )

    def run(self, strand: Strand) -> list[Feed]:
        tree, output = self._job.tree, strand.output
        start = len(strand.branch)
        tree.extend(strand.branch, strand.pending)
        root = len(strand.branch)
        draft = self.drafts.setdefault(output.index, Draft())
        if not draft.tokens:
            return [Feed(strand.branch, start, root, [output.draw()])]
        feeds: list[Feed] = []
        paths = self._paths[output.index] = []
        read: set[int] = set()
        for leaf in draft.leaves():
            nodes = draft.path(leaf)
            branch = tree.fork(strand.branch)
            paths.append((branch, [node for node in nodes if node not in read]))
            tree.extend(branch, [draft.tokens[node] for node in nodes])
            shared = len(nodes) - len(paths[-1][1])
            draws = [output.draw(ahead) for ahead in range(shared + 1, len(nodes) + 1)]
            if not feeds:  # the first also reads what follows the text itself
                feeds.append(Feed(branch, start, len(branch), [output.draw(), *draws]))
            else:
                feeds.append(Feed(branch, root + shared, len(branch), draws))
            read.update(nodes)
        return feeds

    def take(self, strand: Strand, rows: Iterator[list[Sampled]]) -> None:
        """Go down the draft along what the target drew; what it drew last is no part of the draft."""
        tree, output = self._job.tree, strand.output
        draft, paths = self.drafts.pop(output.index), self._paths.pop(output.index, [])
        if not draft.tokens:
            super().take(strand, rows)
            return
        root = len(strand.branch)
        drawn: dict[int, Sampled] = {}
        for _, nodes in paths:
            first, *rest = reads = next(rows)
            if not drawn:
                drawn[-1], reads = first, rest
            drawn.update(zip(nodes, reads, strict=True))
        accepted: list[int] = []
        while True:
            at = accepted[-1] if accepted else -1
            sampled = drawn[at]
            if output.add(sampled):
                break
            right = [node for node in draft.children(at) if draft.tokens[node] == sampled.token]
            if not right:
                break
            accepted += right
        strand.pending = [sampled.token]
        output.drafted += len(draft.tokens)
        output.accepted += len(accepted)
        leaves = [draft.path(leaf) for leaf in draft.leaves()]
        along = next(i for i, path in enumerate(leaves) if path[: len(accepted)] == accepted)
        for i, (branch, _) in enumerate(paths):
            if i == along:
                tree.commit(strand.branch, branch, root + len(accepted))
            else:
                tree.rollback(branch, 0)
        if output.finish_reason is not None:
            self._speculation.drafter.end(self._keys[output.index])

    def release(self) -> None:
        for paths in self._paths.values():
            for branch, _ in paths:
                self._job.tree.rollback(branch, 0)
        for key in self._keys:
            self._speculation.drafter.end(key)
        super().release()
