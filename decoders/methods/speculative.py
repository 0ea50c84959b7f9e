"""Speculative decoding: a drafter guesses several tokens, the target verifies all of them in one forward.

SD (Leviathan et al., 2023) drafts a chain; MCSD (Yang et al., 2024; SEED, section 3.2) drafts a tree, k_config being
how many candidates each position has. What is accepted is decided in `acceptance.py`.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from tot.decoders.drafting.drafters import Context, Draft, Drafter
from tot.decoders.drafting.opening import make_drafter
from tot.decoders.drafting.planner import AcceptanceStatistics, LatencyModel, SpeculationPlanner
from tot.decoders.drafting.trial import Trial
from tot.decoders.engine.engine import Engine
from tot.decoders.engine.job import Job
from tot.decoders.engine.radix_cache import Branch
from tot.decoders.engine.runner import Chunk
from tot.decoders.engine.sampling import Draw, Sampled
from tot.decoders.methods.acceptance import Coupled, Rejection, Rule
from tot.decoders.methods.autoregressive import Autoregressive, DecodingSequence
from tot.decoders.methods.method import Method, OpenedMethod
from tot.decoders.request import Purpose

if TYPE_CHECKING:
    from tot.decoders.engine.engine import Engine

_keys = itertools.count()
_DRAFT_SEED = 0x3C6EF372FE94F82B
"""Keeps the noise of a draft apart from the target's, where they are not coupled."""
KConfig = Annotated[
    tuple[Annotated[int, Field(ge=1, le=64)], ...],
    Field(min_length=1, max_length=16),
    BeforeValidator(lambda given: given.split(",") if isinstance(given, str) else given),
]


class DraftingOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    draft: Any = None
    """None looks tokens up in what was written so far, which gives a single chain; "early-exit:6" drafts with the
    target's first layers; else a draft model: a name, a hub id, a folder or a GGUF file. Several, with commas, each for
    texts that those before had nothing for."""
    draft_temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Of the draft's candidates under a rejection rule; None is the request's own."""

    @model_validator(mode="after")
    def _consistent(self) -> DraftingOptions:
        given = {
            "draft_temperature": self.draft_temperature is not None,
            "replacement": getattr(self, "replacement", 0),
        }
        for name, is_given in given.items():
            if is_given and getattr(self, "rule", None) == "coupled":
                raise ValueError(f"{name} is for rejection rules: leave it out, or give a rule other than coupled")
        return self


class SDOptions(DraftingOptions):
    """Options of `sd`."""

    k: Annotated[int, Field(ge=1, le=16)] = 4
    """Tokens drafted a step."""
    rule: Literal["coupled", "leviathan"] = "coupled"
    """coupled gives what `ar` gives, token for token; leviathan only its distribution."""

    @property
    def k_config(self) -> tuple[int, ...]:
        return (1,) * self.k

    def acceptance(self) -> Rule:
        return Coupled() if self.rule == "coupled" else Rejection(replacement=False)


class MCSDOptions(DraftingOptions):
    """Options of `mcsd`."""

    k_config: KConfig = (2, 2, 1)
    """Candidates at each position drafted, after each candidate of the position before."""
    rule: Literal["coupled", "mcsd"] = "coupled"
    """coupled gives what `ar` gives, token for token; mcsd, recursive rejection, only its distribution."""
    replacement: bool = False
    """mcsd: candidates are drawn independently of each other, rather than each from what the others left."""

    def acceptance(self) -> Rule:
        return Coupled() if self.rule == "coupled" else Rejection(self.replacement)


class Speculation:
    """What all requests of one decoder share: the drafter, which drafts for all of them at once, and the rule.

    With costs, drafts are as long and as broad as pays by what was accepted so far of requests with the same purpose;
    else always as k_config says.
    """

    def __init__(
        self,
        drafter: Drafter,
        options: Any,
        engine: Engine,
        costs: tuple[LatencyModel, LatencyModel | None] | None = None,
    ) -> None:
        self.drafter = drafter
        self.engine = engine
        self.experience: defaultdict[Purpose, AcceptanceStatistics] = defaultdict(AcceptanceStatistics)
        self._costs = costs
        self.drafts = True
        """False in a step in which nothing is drafted, since that is faster."""
        self._trials: dict[tuple[int, frozenset[Purpose]], Trial] = {}
        """By the number of branches, in powers of two, and what they are decoded for."""
        self._begun: tuple[Trial, int, float] | None = None
        """The step under way: its trial, branches and beginning."""
        self._ended = 0.0
        self._gained = 0
        self._pace = 1.0
        """How many times as long drafting takes as its forwards do."""
        self.k_config: tuple[int, ...] = options.k_config
        self.rule: Rule = options.acceptance()
        self.temperature: float | None = getattr(options, "draft_temperature", None)
        self.nodes: int = sum(math.prod(self.k_config[: depth + 1]) for depth in range(len(self.k_config)))
        """Tokens of one full draft."""

    def prepare(self, policies: Sequence[Any]) -> None:
        """Draft for every sample that is about to go on."""
        asked = [(policy, sequence) for policy in policies for sequence in policy.decoding()]
        if not asked:
            return
        began = time.perf_counter()
        purposes = {policy.purpose for policy, _ in asked}
        for purpose in purposes:
            self.experience[purpose].step += 1
        length = sum(len(sequence.branch) for _, sequence in asked) / len(asked)
        self.drafts = self._settle(len(asked), length, frozenset(purposes), began)
        if not self.drafts:
            return
        outlook = self.outlook(len(asked), length)
        asked.sort(key=_purpose)
        groups = [asked] if outlook is None else [list(group) for _, group in itertools.groupby(asked, _purpose)]
        drafts: list[Draft] = []
        with self.span("draft"):
            for group in groups:  # one plan for all, by what is known of each purpose
                if outlook is not None:
                    outlook.experience = self.experience[_purpose(group[0])]
                drafts += self.drafter.draft([policy.context(sequence) for policy, sequence in group], outlook)
        seconds = time.perf_counter() - began
        if outlook is not None and outlook.drafting:
            self._pace *= 1 + 0.2 * (min(seconds / outlook.drafting, 3.0) - 1)
            self._pace = min(max(self._pace, 1.0), 5.0)
        for (policy, sequence), draft in zip(asked, drafts, strict=True):
            policy.drafts[sequence.output.index] = draft
            policy.account.seconds["draft"] += seconds / len(asked)

    def _settle(self, branches: int, length: float, purposes: frozenset[Purpose], now: float) -> bool:
        """Book what the step before brought; whether to draft in this one."""
        if self._costs is None:
            return True
        if self._begun is not None and self._gained:
            trial, before, began = self._begun
            trial.step(self._gained / before, self._ended - began)
        self._gained = 0
        plain = self._costs[0].at(length).of(branches)
        trial = self._trials.setdefault((branches.bit_length(), purposes), Trial(plain))
        self._begun = trial, branches, now
        return trial.drafts

    def gained(self, tokens: int) -> None:
        """A sample has got so many tokens in this step."""
        self._gained += tokens
        self._ended = time.perf_counter()

    def outlook(self, branches: int, length: float, purpose: Purpose = "generate") -> SpeculationPlanner | None:
        """The plan for a forward of so many branches, of that length on average, to be drafted for."""
        if self._costs is None:
            return None
        target, draft = (None if costs is None else costs.at(length) for costs in self._costs)
        assert target is not None
        return SpeculationPlanner(self.experience[purpose], target, draft, branches, self._pace)

    def span(self, lane: str, branch: int | None = None) -> AbstractContextManager[None]:
        """Drafting, on the engine's timeline if it has one."""
        timeline = self.engine.timeline
        return nullcontext() if timeline is None else timeline.span(lane, "draft", branch)

    def end(self, key: int) -> None:
        """That text will not be continued."""
        self.drafter.end(key)


def _purpose(asked: tuple[Any, DecodingSequence]) -> Purpose:
    purpose: Purpose = asked[0].purpose
    return purpose


class Speculative(Autoregressive):
    """Decodes as `Autoregressive` does, several tokens a step where the draft is right."""

    def __init__(self, job: Job, companion: Speculation) -> None:
        super().__init__(job, companion)
        self._speculation = companion
        self.account = job.account
        self.purpose = job.request.purpose
        self.keys = [next(_keys) for _ in job.outputs]
        """By sample: what its text is known by to the drafter."""
        self.drafts: dict[int, Draft] = {}
        """By sample: what is to be verified next."""
        self._paths: dict[int, list[tuple[Branch, list[int], int]]] = {}
        """By sample: a branch for each leaf of the draft, its nodes, and how many of them an earlier one reads."""
        self._texts: dict[int, list[int]] = {}
        """By sample: prompt and what was drawn or given, as far as drafters were told."""

    def growth(self) -> int:
        return super().growth() + self._speculation.nodes * len(self._job.running)

    def context(self, sequence: DecodingSequence) -> Context:
        """What a drafter needs to know. Drafts end one token early: the target always adds one of its own."""
        output, config = sequence.output, self._speculation.k_config
        widths = config[: max(0, output.room - 1)]
        if output.index not in self._texts:
            self._texts[output.index] = [*self._job.cache.tokens(sequence.branch), *sequence.pending]
        return Context(
            key=self.keys[output.index],
            prompt=self._job.prompt,
            tokens=self._texts[output.index],
            draws=[self._draft_draw(output.draw(ahead)) for ahead in range(len(widths))],
            widths=widths,
            weigh=not self._speculation.rule.coupled,
            replacement=self._speculation.rule.replacement,
        )

    def _draft_draw(self, draw: Draw) -> Draw:
        """How the draft draws: with the target's noise where they are coupled, else with noise of its own."""
        if self._speculation.rule.coupled:
            return draw
        temperature = self._speculation.temperature
        return draw._replace(
            seed=draw.seed ^ _DRAFT_SEED, temperature=draw.temperature if temperature is None else temperature
        )

    def run(self, sequence: DecodingSequence) -> list[Chunk]:
        cache, output = self._job.cache, sequence.output
        start = len(sequence.branch)
        cache.extend(sequence.branch, sequence.pending)
        root, want = len(sequence.branch), self._speculation.rule.want
        draft = self.drafts.setdefault(output.index, Draft())
        if not draft.tokens:
            return [Chunk(sequence.branch, start, root, [want(output.draw())])]
        feeds: list[Chunk] = []
        paths = self._paths[output.index] = []
        read: set[int] = set()
        for leaf in draft.leaves():
            nodes = draft.path(leaf)
            branch = cache.fork(sequence.branch)
            shared = sum(node in read for node in nodes)
            paths.append((branch, nodes, shared))
            cache.extend(branch, [draft.tokens[node] for node in nodes])
            draws = [want(output.draw(ahead)) for ahead in range(shared + 1, len(nodes) + 1)]
            if not feeds:  # the first also reads what follows the text itself
                feeds.append(Chunk(branch, start, len(branch), [want(output.draw()), *draws]))
            else:
                feeds.append(Chunk(branch, root + shared, len(branch), draws))
            read.update(nodes)
        return feeds

    def take(self, sequence: DecodingSequence, rows: Iterator[list[Sampled]]) -> None:
        """Go down the draft along what the target drew; what it drew last is no part of the draft."""
        cache, output = self._job.cache, sequence.output
        draft, paths = self.drafts.pop(output.index), self._paths.pop(output.index, [])
        root = len(sequence.branch)
        drawn: dict[int, Sampled] = {}
        if not paths:
            (drawn[-1],) = next(rows)
        for _, nodes, shared in paths:
            first, *rest = reads = next(rows)
            if not drawn:
                drawn[-1], reads = first, rest
            drawn.update(zip(nodes[shared:], reads, strict=True))
        accepted: list[int] = []
        node: int | None = -1
        while node is not None:
            sampled, chosen = self._speculation.rule.choose(drawn[node], output.draw(), draft, node)
            missed = self._learn(draft, node, chosen)
            node = chosen
            if output.add(sampled):
                break
            accepted += [] if node is None else [node]
        sequence.pending = [sampled.token]
        if (text := self._texts.get(output.index)) is not None:
            text += [*(draft.tokens[node] for node in accepted), sampled.token]
        self._speculation.gained(1 + len(accepted))
        output.drafted += len(draft.tokens)
        output.accepted += len(accepted)
        output.reached += len(accepted) + missed
        self.account.verifications += 1
        self.account.drafted += len(draft.tokens)
        self.account.accepted += len(accepted)
        self.account.reached.update(range(len(accepted) + missed))
        self.account.taken.update(range(len(accepted)))
        along = next((branch for branch, nodes, _ in paths if nodes[: len(accepted)] == accepted), None)
        for branch, *_ in paths:
            if branch is along:
                cache.commit(sequence.branch, branch, root + len(accepted))
            else:
                cache.rollback(branch, 0)
        self.verified(sequence, draft, drawn, len(accepted))
        if output.finish_reason is not None:
            self._speculation.end(self.keys[output.index])

    def _go_on_to_answer(self, sequence: DecodingSequence) -> None:
        super()._go_on_to_answer(sequence)
        self._texts.pop(sequence.output.index, None)

    def verified(self, sequence: DecodingSequence, draft: Draft, drawn: Mapping[int, Sampled], kept: int) -> None:
        """A draft was verified: what was drawn after each of its nodes, and how many of them were kept."""

    def _learn(self, draft: Draft, node: int, chosen: int | None) -> bool:
        """What came of the candidates after a node that was reached. Whether there were some, and all were rejected."""
        learn = self._speculation.experience[self.purpose].learn
        if level := draft.levels.get(node):
            learn(level, chosen is not None)
        children = draft.children(node)
        for child in children:
            learn(draft.kinds[child], child == chosen)
        return bool(children) and chosen is None

    def release(self) -> None:
        for paths in self._paths.values():
            for branch, *_ in paths:
                self._job.cache.rollback(branch, 0)
        for key in self.keys:
            self._speculation.end(key)
        super().release()


def _open(engine: Engine, options: SDOptions | MCSDOptions, stack: ExitStack) -> OpenedMethod:
    drafter = make_drafter(options.draft, engine, stack)
    shared = Speculation(drafter, options, engine)
    return OpenedMethod(partial(Speculative, companion=shared), drafter)


SD = Method(_open, SDOptions)
MCSD = Method(_open, MCSDOptions)
