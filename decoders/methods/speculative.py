"""Speculative decoding: a drafter guesses several tokens, the target verifies all of them in one forward.

SD (Leviathan et al., 2023) drafts a chain; MCSD (Yang et al., 2024; SEED, section 3.2) drafts a tree with k_config
candidates at each position. `acceptance.py` decides which tokens are accepted.
"""

from __future__ import annotations

import itertools
import operator
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from tot.decoders.drafting.acceptance import Coupled, Rejection
from tot.decoders.drafting.drafters import Draft, DraftContext, Drafter, Verified
from tot.decoders.drafting.latency_model import latency_model
from tot.decoders.drafting.planner import AcceptanceStatistics, SpeculationPlanner, Trial
from tot.decoders.engine.engine import Engine
from tot.decoders.engine.radix_cache import Branch
from tot.decoders.engine.runner import Chunk
from tot.decoders.engine.sampling import Sampled
from tot.decoders.engine.sequence import DecodingSequence, Job
from tot.decoders.methods.autoregressive import Autoregressive
from tot.decoders.methods.method import SpeculativeConfig
from tot.decoders.request import Purpose

_PACE_DECAY = 0.98
"""Decay of the difference of `Speculation`'s pace from 1, per step without drafts of a model."""
_DRAFT_SEED = 0x3C6EF372FE94F82B
"""Separates the noise of a draft from the target's noise if they are not coupled."""


class Drafted(NamedTuple):
    """A draft and its text."""

    context: DraftContext
    draft: Draft


class Speculation:
    """State shared by all requests of one decoder: the batch drafter, the acceptance rule, and the statistics."""

    def __init__(self, engine: Engine, drafter: Drafter, config: SpeculativeConfig) -> None:
        self.engine = engine
        self.drafter = drafter
        self.config = config
        self.rule = Coupled() if config.rule == "coupled" else Rejection()
        self.rows: int = sum(itertools.accumulate(config.k_config, operator.mul)) + config.probes
        """Number of rows of a full draft."""
        self.statistics: defaultdict[Purpose, AcceptanceStatistics] = defaultdict(AcceptanceStatistics)
        self.drafts: dict[int, Drafted] = {}
        """By sequence: the draft to verify next."""
        self._texts: dict[int, list[int]] = {}
        """By sequence: the prompt and the tokens drawn or given."""
        self._trials: dict[tuple[int, frozenset[Purpose]], Trial] = {}
        """By the bit length of the number of branches, and their purposes."""
        self._current: tuple[Trial, int, float] | None = None
        """The current step: its trial, number of branches and start time."""
        self._draft_seconds = 0.0
        """Seconds spent on drafting in the current step."""
        self._ended = 0.0
        self._gained = 0
        self._pace = 1.0
        """Ratio of drafting time to the time of its forwards."""
        self._read: set[int] = set()
        """Texts that have been drafted for."""

    def draft_all(self, sequences: Sequence[DecodingSequence]) -> None:
        """Draft for all sequences that are about to draw tokens."""
        if not sequences:
            return
        began = time.perf_counter()
        contexts = [self.context(sequence) for sequence in sequences]
        self._count_step(sequences)
        planner = self.planner(contexts, len({(sequence.branch.tip, *sequence.pending) for sequence in sequences}))
        if planner is not None and not self.drafter.judges_itself:
            planner.trying = self._is_trying(contexts, planner.seconds, began)
        if not self.drafter.may_draft(planner):
            self.drafts |= {context.key: Drafted(context, Draft()) for context in contexts}
            return
        groups = [contexts]
        if planner is not None:  # one plan for all, with the statistics of each purpose
            contexts = sorted(contexts, key=operator.attrgetter("purpose"))
            groups = [list(group) for _, group in itertools.groupby(contexts, operator.attrgetter("purpose"))]
        with self.span("draft"):
            for group in groups:
                if planner is not None:
                    planner.statistics = self.statistics[group[0].purpose]
                drafts = self.drafter.draft(group, planner)
                self.drafts |= {c.key: Drafted(c, draft) for c, draft in zip(group, drafts, strict=True)}
        seconds = self._draft_seconds = time.perf_counter() - began
        if planner is not None:
            self._draft_seconds = self._paced(contexts, seconds, planner.drafting)

    def _paced(self, contexts: Sequence[DraftContext], seconds: float, planned: float) -> float:
        """Learn the pace from a step's seconds of drafting. Return the seconds without reading beginnings of texts."""
        read = {context.key for context in contexts if self.drafts[context.key].draft.tokens}
        begun, self._read = read <= self._read, self._read | read
        if not planned:  # forget it slowly: an estimate that prevents drafts is never corrected
            self._pace = 1 + _PACE_DECAY * (self._pace - 1)
        elif begun:
            self._pace *= 1 + 0.2 * (min(seconds / planned, 3.0) - 1)
            self._pace = min(max(self._pace, 1.0), 5.0)
        return seconds if begun else min(seconds, planned)

    def context(self, sequence: DecodingSequence) -> DraftContext:
        """Return the drafter's context. Drafts end one token early, because the target always adds a token."""
        job, output = sequence.job, sequence.output
        if sequence.key not in self._texts:
            self._texts[sequence.key] = [*job.cache.tokens(sequence.branch), *sequence.pending]
        widths = self.config.k_config[: max(0, output.room - 1)]
        draws = [output.draw(ahead) for ahead in range(len(widths))]
        if not self.rule.coupled:  # the draft has its own noise
            draws = [draw._replace(seed=draw.seed ^ _DRAFT_SEED) for draw in draws]
        return DraftContext(
            key=sequence.key,
            prompt=job.prompt,
            tokens=self._texts[sequence.key],
            draws=draws,
            widths=widths,
            weigh=not self.rule.coupled,
            purpose=job.request.purpose,
        )

    def _count_step(self, sequences: Sequence[DecodingSequence]) -> None:
        """Count a step in the statistics of each purpose."""
        for purpose in {sequence.job.request.purpose for sequence in sequences}:
            self.statistics[purpose].step += 1

    def _is_trying(self, contexts: Sequence[DraftContext], plain: float, now: float) -> bool:
        """Record the previous step, and return whether drafters that need a trial may draft in this one.

        `plain` are the seconds of a step without drafts.
        """
        if self._current is not None and self._gained:
            trial, branches, began = self._current
            trial.step(self._gained / branches, self._ended - began - self._draft_seconds, self._draft_seconds)
        self._gained, self._draft_seconds = 0, 0.0
        purposes = frozenset(context.purpose for context in contexts)
        trial = self._trials.setdefault((len(contexts).bit_length(), purposes), Trial(plain))
        self._current = trial, len(contexts), now
        return trial.drafts

    def planner(self, contexts: Sequence[DraftContext], distinct: int | None = None) -> SpeculationPlanner | None:
        """Return a plan for a forward of these texts, or None if drafts do not adapt. `distinct`: as in the plan."""
        if not self.config.adapt:
            return None
        mean = sum(len(context.tokens) for context in contexts) / len(contexts)
        target = latency_model(self.engine.runner).at(mean)
        draft = self.drafter.latency(mean)
        statistics = self.statistics[contexts[0].purpose]
        return SpeculationPlanner(statistics, target, draft, len(contexts), self._pace, distinct=distinct)

    def span(self, lane: str, branch: int | None = None) -> AbstractContextManager[None]:
        """Record drafting on the engine's timeline, if it has one."""
        timeline = self.engine.timeline
        return nullcontext() if timeline is None else timeline.span(lane, "draft", branch)

    def learn(self, context: DraftContext, draft: Draft, node: int, chosen: int | None) -> bool:
        """Count the candidates after a reached node. Return whether there were any and all were rejected."""
        learn = self.statistics[context.purpose].learn
        if level := draft.levels.get(node):
            learn(level, chosen is not None)
        children = draft.children(node)
        for child in children:
            learn(draft.kinds[child], child == chosen)
        return bool(children) and chosen is None

    def observe(self, verified: Verified) -> None:
        """Extend a text, after its draft was verified."""
        self.drafter.observe(verified)
        self._texts[verified.context.key] += verified.tokens
        self._gained += len(verified.tokens)
        self._ended = time.perf_counter()

    def end(self, key: int) -> None:
        """Free the state of a text that ended or was replaced."""
        self.drafts.pop(key, None)
        self._texts.pop(key, None)
        self._read.discard(key)
        self._end_drafting(key)

    def _end_drafting(self, key: int) -> None:
        self.drafter.end(key)


class _Path(NamedTuple):
    """A path of a draft tree during verification."""

    branch: Branch
    nodes: list[int]
    """From the text's end, -1, to a leaf."""
    read: int
    """Number of leading nodes that another path reads."""


class Speculative(Autoregressive):
    """Decode like `Autoregressive`, but several tokens per step if the draft is right."""

    def __init__(self, job: Job, speculation: Speculation) -> None:
        super().__init__(job)
        self.batch_drafter = self._speculation = speculation
        self._paths: dict[int, list[_Path]] = {}
        """By sample: the path to each leaf of the draft."""
        self._probes: dict[int, list[Branch]] = {}
        """By sample: the branches of the draft's probes."""

    def need(self, tokens: int) -> int:
        return super().need(tokens) + self._speculation.rows * len(self._job.running)

    def turn(self) -> list[DecodingSequence]:
        """Return the samples of this step: samples with a draft, and samples that score choices."""
        drafts = self._speculation.drafts
        return [sequence for sequence in super().turn() if sequence.scorer is not None or sequence.key in drafts]

    def run(self, sequence: DecodingSequence) -> list[Chunk]:
        cache, output, want = self._job.cache, sequence.output, self._speculation.rule.want
        draft = self._speculation.drafts[sequence.key].draft
        start = len(sequence.branch)
        cache.extend(sequence.branch, sequence.pending)
        root = len(sequence.branch)
        chunks: list[Chunk] = []
        paths = self._paths[output.index] = []
        seen: set[int] = set()
        for leaf in draft.leaves() or [-1]:
            nodes = [-1, *draft.path(leaf)]
            read = sum(node in seen for node in nodes)
            branch = cache.fork(sequence.branch) if draft.tokens else sequence.branch
            paths.append(_Path(branch, nodes, read))
            cache.extend(branch, [draft.tokens[node] for node in nodes[1:]])
            draws = [want(output.draw(ahead)) for ahead in range(read, len(nodes))]
            chunks.append(Chunk(branch, root + read - 1 if read else start, len(branch), draws))
            seen.update(nodes)
        probes = self._probes[output.index] = []
        for tokens in draft.probes:
            if root + len(tokens) > self._speculation.engine.runner.context:
                break
            probes.append(cache.fork(sequence.branch))
            cache.extend(probes[-1], tokens)
            chunks.append(Chunk(probes[-1], root, len(probes[-1]), [output.draw(len(tokens))]))
        return chunks

    def take(self, sequence: DecodingSequence, rows: Iterator[list[Sampled]]) -> None:
        """Follow the draft along the tokens that the target drew. The last token drawn is not part of the draft."""
        cache, output, speculation = self._job.cache, sequence.output, self._speculation
        context, draft = speculation.drafts.pop(sequence.key)
        paths, probes = self._paths.pop(output.index), self._probes.pop(output.index)
        root = len(sequence.branch)
        drawn: dict[int, Sampled] = {}
        for path in paths:
            drawn.update(zip(path.nodes[path.read :], next(rows), strict=True))
        probed = [next(rows)[0].token for _ in probes]
        nodes: list[int] = []
        node: int | None = -1
        while node is not None:
            parent = node
            sampled, node = speculation.rule.choose(drawn[parent], output.draw(), draft, parent)
            missed = speculation.learn(context, draft, parent, node)
            if output.add(sampled):
                break
            nodes += [] if node is None else [node]
        accepted = len(nodes)
        sequence.pending = [sampled.token]
        forks = probes
        if draft.tokens:
            followed = next(path.branch for path in paths if path.nodes[1 : accepted + 1] == nodes)
            forks += [path.branch for path in paths if path.branch is not followed]
            cache.commit(sequence.branch, followed, root + accepted)
        for branch in forks:
            cache.rollback(branch, 0)
        output.drafted += len(draft.tokens)
        output.accepted += accepted
        output.reached += accepted + missed
        if speculation.config.trajectory:
            output.trajectory.append((len(output.tokens) - accepted - 1, tuple(draft.tokens)))
        by_node = {node: sampled.token for node, sampled in drawn.items()}
        grown = [*(draft.tokens[node] for node in nodes), sampled.token]
        speculation.observe(Verified(context, draft, by_node, probed, accepted, grown))
        if output.finish_reason is not None:
            speculation.end(sequence.key)

    def release(self) -> None:
        paths = (path.branch for path in itertools.chain(*self._paths.values()))
        for branch in itertools.chain(paths, *self._probes.values()):
            self._job.cache.rollback(branch, 0)
        for sequence in self._sequences or ():
            self._speculation.end(sequence.key)
        super().release()
