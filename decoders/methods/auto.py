"""auto: whichever lossless method pays, text by text and step by step, by measured costs and what was accepted so far.

Every step plans one forward for all texts. For each of them what was looked up, its Jacobi window and a trained draft
model, where there is one, compete by the cost of rows and the share of their kind that was accepted, by purpose; what
promises most is drafted as far as it pays, or nothing. What was learned is kept in the cache folder. Not among the
choices: lookahead, whose windows cost more rows than they have brought, and whatever is not lossless.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, get_args

from pydantic import BaseModel, ConfigDict

from tot.decoders.drafting.drafters import Context, Draft, Drafter, DrafterChain, LookupDrafter
from tot.decoders.drafting.kept import Kept, model_identity, named
from tot.decoders.drafting.latency_model import engine_costs, latency_model
from tot.decoders.drafting.opening import trained_drafter
from tot.decoders.drafting.planner import AcceptanceStatistics, LatencyModel, SpeculationPlanner
from tot.decoders.engine.engine import Engine
from tot.decoders.engine.job import Job
from tot.decoders.engine.sampling import Sampled
from tot.decoders.methods.acceptance import Coupled, Rule
from tot.decoders.methods.autoregressive import DecodingSequence
from tot.decoders.methods.jacobi import Jacobi, Windows
from tot.decoders.methods.method import Method, OpenedMethod
from tot.decoders.methods.speculative import Speculation
from tot.decoders.request import Purpose

if TYPE_CHECKING:
    from tot.decoders.engine.engine import Engine

log = logging.getLogger(__name__)

_LONGEST = 16
"""Tokens of a draft, at most; also of a Jacobi window."""
_LEAST = 0.1
"""A first token that is less likely to be accepted is not drafted, however cheap its row: what drafting itself takes is
in no measured cost."""
_BY_MODEL = ("auto", "model")
"""What is kept under it: how often something was accepted of what the draft model drafted."""
_NAMES = {"lookup": "lookup", "jacobi": "jacobi", "model": "trained draft"}


class AutoOptions(BaseModel):
    """`auto` has nothing to set: chains, under the rule that gives what `ar` gives, as long as pays."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @property
    def k_config(self) -> tuple[int, ...]:
        return (1,) * _LONGEST

    def acceptance(self) -> Rule:
        return Coupled()


class Arms(DrafterChain):
    """For each text the draft that promises most by the plan. A model that drafts is asked for texts for which it has
    been right more often than the others' drafts have."""

    def __init__(self, quick: Sequence[Drafter], model: Drafter | None) -> None:
        super().__init__([*quick, *([] if model is None else [model])])
        self._quick = quick
        self._model = model

    def draft(self, contexts: Sequence[Context], outlook: SpeculationPlanner | None = None) -> list[Draft]:
        assert outlook is not None  # auto always plans
        if self._model is None:
            return [self._best(context, outlook) for context in contexts]
        share = outlook.experience.chance(_BY_MODEL)
        drafts = [self._best(context, outlook, share) for context in contexts]
        left = [i for i, draft in enumerate(drafts) if not draft.tokens]
        for i, draft in zip(left, self._model.draft([contexts[i] for i in left], outlook), strict=True):
            drafts[i] = draft if draft.tokens else self._best(contexts[i], outlook)
        return drafts

    def _best(self, context: Context, outlook: SpeculationPlanner, least: float = 0.0) -> Draft:
        """Nothing where the chance of the first token is less than that, or too small to be worth the trouble."""
        plans = [copy(outlook) for _ in self._quick]
        drafts = [drafter.draft([context], plan)[0] for drafter, plan in zip(self._quick, plans, strict=True)]
        plan, draft = max(zip(plans, drafts, strict=True), key=lambda one: one[0].rate)
        if not draft.tokens or outlook.experience.chance(draft.kinds[0]) < max(least, _LEAST):
            return Draft()
        outlook.take(plan)
        return draft


@dataclass(slots=True)
class _Tally:
    """Drafts of one kind."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0


class Choosing(Speculation):
    """What all requests of one `auto` share; it learns by purpose, keeps that, and can say what it chose."""

    def __init__(
        self,
        engine: Engine,
        options: AutoOptions,
        costs: tuple[LatencyModel, LatencyModel | None],
        trained: Drafter | None = None,
    ) -> None:
        self.windows = Windows(_LONGEST, "prompt")
        super().__init__(Arms([LookupDrafter(), self.windows], trained), options, engine, costs)
        model = engine.loaded.model
        self._kept = Kept("experience", model_identity(model)) if named(model) else None
        self._tallies: dict[Purpose, dict[str, _Tally]] = {}
        """By purpose and kind of draft, "" being none."""
        self._recall()

    def _recall(self) -> None:
        if self._kept is None:
            return
        try:
            learned = {purpose: AcceptanceStatistics.from_json(shares) for purpose, shares in self._kept.read()}
            self.experience.update((purpose, learned[purpose]) for purpose in get_args(Purpose) if purpose in learned)
        except (TypeError, ValueError) as error:
            log.info("%s holds no experience (%s): it is made anew", self._kept.path, error)

    def note(self, purpose: Purpose, draft: Draft, accepted: int) -> None:
        """A sample's step is over; so many tokens of its draft were accepted."""
        kind = _NAMES[draft.kinds[0][0]] if draft.tokens else ""  # type: ignore[index]
        tally = self._tallies.setdefault(purpose, {}).setdefault(kind, _Tally())
        tally.steps += 1
        tally.drafted += len(draft.tokens)
        tally.accepted += accepted
        if kind == _NAMES["model"]:
            self.experience[purpose].learn(_BY_MODEL, accepted > 0)

    def choices(self) -> dict[Purpose, str]:
        """By purpose, in words: "lookup in 40% of steps (3.1 tokens, 62% accepted), else ar"."""
        return {purpose: _said(tallies) for purpose, tallies in list(self._tallies.items())}

    def close(self) -> None:
        if self._kept is not None and self._tallies:
            self._kept.write([[purpose, known.to_json()] for purpose, known in self.experience.items()])


class Auto(Jacobi):
    """Decodes as `Jacobi` does, and notes what was drafted and what came of it."""

    def __init__(self, job: Job, companion: Choosing) -> None:
        super().__init__(job, companion, companion.windows, trajectory=False)
        self._choosing = companion

    def verified(self, sequence: DecodingSequence, draft: Draft, drawn: Mapping[int, Sampled], kept: int) -> None:
        super().verified(sequence, draft, drawn, kept)
        self._choosing.note(self.purpose, draft, kept)


def _said(tallies: Mapping[str, _Tally]) -> str:
    steps = sum(tally.steps for tally in tallies.values())
    drafts = sorted(((tally, kind) for kind, tally in tallies.items() if kind), key=lambda one: -one[0].steps)
    parts = [
        f"{kind} in {tally.steps / steps:.0%} of steps ({tally.drafted / tally.steps:.1f} tokens, "
        f"{tally.accepted / tally.drafted:.0%} accepted)"
        for tally, kind in drafts
    ]
    return ", ".join([*parts, *(["else ar" if parts else "ar"] if "" in tallies else [])])


def _open(engine: Engine, options: AutoOptions, stack: ExitStack) -> OpenedMethod:
    trained = trained_drafter(engine, stack)
    costs = engine_costs(engine), None if trained is None else latency_model(trained.runner)
    choosing = Choosing(engine, options, costs, trained)
    stack.callback(choosing.close)
    return OpenedMethod(partial(Auto, companion=choosing), choosing.drafter, choices=choosing.choices)


METHOD = Method(_open, AutoOptions)
