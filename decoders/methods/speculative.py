"""sd and mcsd, speculative decoding: a drafter guesses several tokens, the target verifies all of them in one forward.

SD (Leviathan et al., 2023) drafts a chain; MCSD (Yang et al., 2024; SEED, section 3.2) drafts a tree with k_config
candidates at each position. `acceptance.py` decides which tokens are accepted.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from tot.decoders.drafting.acceptance import Coupled, Rejection
from tot.decoders.drafting.draft_model import make_drafter
from tot.decoders.drafting.drafters import Draft, DraftContext, Drafter, Verified
from tot.decoders.drafting.latency_model import latency_model
from tot.decoders.drafting.planner import AcceptanceStatistics, SpeculationPlanner
from tot.decoders.engine.engine import Engine
from tot.decoders.engine.output import Output
from tot.decoders.engine.radix_cache import Branch
from tot.decoders.engine.runner import Chunk
from tot.decoders.engine.sampling import Sampled
from tot.decoders.engine.sequence import DecodingSequence, Job
from tot.decoders.methods.autoregressive import Autoregressive
from tot.decoders.methods.method import Method, MethodOptions, OpenedMethod
from tot.decoders.models.shapes import Array
from tot.decoders.request import Purpose

_DRAFT_SEED = 0x3C6EF372FE94F82B
"""Separates the noise of a draft from the target's noise if they are not coupled."""


class SpeculativeConfig(NamedTuple):
    """How much a speculative method drafts, and how drafts are verified."""

    k_config: tuple[int, ...]
    """Number of candidates at each position, per candidate of the position before."""
    rule: str = "coupled"
    adapt: bool = False
    """Adapt drafts to the measured latency and to the acceptance so far of requests with the same purpose."""
    probes: int = 0
    """Maximum number of rows of a draft's probes."""
    trajectory: bool = False
    """Keep the draft of every step in `Completion.trajectory`."""


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

    def draft_all(self, sequences: Sequence[DecodingSequence]) -> None:
        """Draft for all sequences that are about to draw tokens."""
        if not sequences:
            return
        contexts = [self.context(sequence) for sequence in sequences]
        self._count_step(sequences)
        planner = self.planner(contexts, len({(sequence.branch.tip, *sequence.pending) for sequence in sequences}))
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

    def planner(self, contexts: Sequence[DraftContext], distinct: int | None = None) -> SpeculationPlanner | None:
        """Return a plan for a forward of these texts, or None if drafts do not adapt. `distinct`: as in the plan."""
        if not self.config.adapt:
            return None
        mean = sum(len(context.tokens) for context in contexts) / len(contexts)
        target = latency_model(self.engine.runner).at(mean)
        draft = self.drafter.latency(mean)
        return SpeculationPlanner(self.statistics[contexts[0].purpose], target, draft, len(contexts), distinct)

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

    def end(self, key: int) -> None:
        """Free the state of a text that ended or was replaced."""
        self.drafts.pop(key, None)
        self._texts.pop(key, None)
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
        """Return the samples of this step, which have a draft."""
        return [sequence for sequence in super().turn() if sequence.key in self._speculation.drafts]

    def run(self, sequence: DecodingSequence) -> list[Chunk]:
        cache, output, want = self._job.cache, sequence.output, self._speculation.rule.want
        draft = self._speculation.drafts[sequence.key].draft
        masks = _masks(output, draft) if self._speculation.rule.coupled else {}
        start = len(sequence.branch)
        cache.extend(sequence.branch, sequence.pending)
        root = len(sequence.branch)
        chunks: list[Chunk] = []
        paths = self._paths[output.index] = []
        seen: set[int] = set()
        for leaf in draft.leaves() or [-1]:
            nodes = [node for node in (-1, *draft.path(leaf)) if node in masks or not masks]
            read = sum(node in seen for node in nodes)
            if read == len(nodes):  # the constraint allows no more of it than another path has
                continue
            branch = cache.fork(sequence.branch) if draft.tokens else sequence.branch
            paths.append(_Path(branch, nodes, read))
            cache.extend(branch, [draft.tokens[node] for node in nodes[1:]])
            draws = [want(output.draw(ahead, masks.get(nodes[ahead]))) for ahead in range(read, len(nodes))]
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
        grown: list[int] = []
        node: int | None = -1
        while node is not None:
            parent = node
            sampled, node = speculation.rule.choose(drawn[parent], output.draw(), draft, parent)
            missed = speculation.learn(context, draft, parent, node)
            grown.append(sampled.token)
            if output.add(sampled):
                break
            nodes += [] if node is None else [node]
            for token in output.force():
                grown.append(token)
                node = None if node is None else draft.child(node, token)
                nodes += [] if node is None else [node]
            if output.finish_reason is not None:
                break
        accepted = len(nodes)
        sequence.pending = grown[accepted:]
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


def _masks(output: Output, draft: Draft) -> dict[int, Array]:
    """Return the mask after each node of a draft up to which the constraint allows it; empty without a constraint."""
    if output.matcher is None:
        return {}
    states = {-1: output.matcher}
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if parent in states and states[parent].allows(token):
            states[node] = states[parent].fork()
            states[node].advance(token)
    return {node: state.mask for node, state in states.items()}


def speculate(engine: Engine, drafter: Drafter, config: SpeculativeConfig) -> OpenedMethod:
    """Return the method that verifies the drafts of a drafter."""
    shared = Speculation(engine, drafter, config)
    return OpenedMethod(partial(Speculative, speculation=shared), drafter, draft_rows=shared.rows)


KConfig = Annotated[
    tuple[Annotated[int, Field(ge=1, le=64)], ...],
    Field(min_length=1, max_length=16),
    BeforeValidator(lambda given: given.split(",") if isinstance(given, str) else given),
]


class DraftingOptions(MethodOptions):
    """Options of methods with a drafter."""

    draft: Any = None
    """None uses prompt lookup, which drafts a single chain; otherwise a draft model: a name, a hub id, a folder or a
    GGUF file."""


class SDOptions(DraftingOptions):
    """Speculative decoding (Leviathan et al., 2023): verify k drafted tokens in one forward pass."""

    k: Annotated[int, Field(ge=1, le=16)] = 4
    """Tokens drafted per step."""
    rule: Literal["coupled", "leviathan"] = "coupled"
    """coupled gives the output of `ar`, token for token; leviathan keeps only its distribution."""


class MCSDOptions(DraftingOptions):
    """Multi-candidate speculative decoding (Yang et al., 2024): verify a tree of drafted tokens."""

    k_config: KConfig = (2, 2, 1)
    """Number of candidates at each drafted position, per candidate of the position before."""
    rule: Literal["coupled", "mcsd"] = "coupled"
    """coupled gives the output of `ar`, token for token; mcsd, recursive rejection, keeps only its distribution."""


def _open(engine: Engine, options: SDOptions | MCSDOptions, stack: ExitStack) -> OpenedMethod:
    k_config = options.k_config if isinstance(options, MCSDOptions) else (1,) * options.k
    return speculate(engine, make_drafter(options.draft, engine, stack), SpeculativeConfig(k_config, options.rule))


SD = Method(_open, SDOptions)
MCSD = Method(_open, MCSDOptions)
