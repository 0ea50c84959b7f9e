"""auto: whichever lossless method pays, text by text and step by step, by measured costs and what was accepted so far.

Every step plans one forward for all texts. For each of them what was looked up, its Jacobi window and a draft model,
where there is one, compete by the cost of rows and the share of their kind that was accepted, by purpose; what
promises most is drafted as far as it pays, or nothing. Not among the choices: lookahead, whose windows cost more
rows than they have brought, and whatever is not lossless.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from copy import copy
from typing import Any

from tot.decoders.drafting.draft_model import ModelDrafter, level
from tot.decoders.drafting.drafters import Draft, DraftContext, Drafter, DrafterChain
from tot.decoders.drafting.lookup import LookupDrafter
from tot.decoders.drafting.opening import make_drafter, trained_drafter
from tot.decoders.drafting.planner import SpeculationPlanner
from tot.decoders.engine.engine import Engine
from tot.decoders.errors import OptionError
from tot.decoders.methods.jacobi import JacobiDrafter
from tot.decoders.methods.options import LONGEST

_LEAST = 0.1
"""A first token that is less likely to be accepted is not drafted, however cheap its row: what drafting itself takes is
in no measured cost."""


class AutoDrafter(DrafterChain):
    """For each text the draft that promises most by the plan. A model that drafts is asked for texts for which it has
    been right more often than the others' drafts have."""

    def __init__(self, model: ModelDrafter | None) -> None:
        self._quick: list[Drafter] = [LookupDrafter(), JacobiDrafter(LONGEST)]
        super().__init__([*self._quick, *([] if model is None else [model])])
        self._model = model

    def draft(self, contexts: Sequence[DraftContext], planner: SpeculationPlanner | None = None) -> list[Draft]:
        assert planner is not None  # auto always plans
        if self._model is None:
            return [self._best(context, planner) for context in contexts]
        drafts = []
        for context in contexts:
            least = planner.statistics.chance(level(context, 0)) if context.widths else 0.0
            drafts.append(self._best(context, planner, least))
        left = [i for i, draft in enumerate(drafts) if not draft.tokens]
        for i, draft in zip(left, self._model.draft([contexts[i] for i in left], planner), strict=True):
            drafts[i] = draft if draft.tokens else self._best(contexts[i], planner)
        return drafts

    def _best(self, context: DraftContext, planner: SpeculationPlanner, least: float = 0.0) -> Draft:
        """Nothing where the chance of the first token is less than that, or too small to be worth the trouble."""
        plans = [copy(planner) for _ in self._quick]
        drafts = [drafter.draft([context], plan)[0] for drafter, plan in zip(self._quick, plans, strict=True)]
        plan, draft = max(zip(plans, drafts, strict=True), key=lambda one: one[0].rate)
        if not draft.tokens or planner.statistics.chance(draft.kinds[0]) < max(least, _LEAST):
            return Draft()
        planner.take(plan)
        return draft


def make_auto_drafter(draft: Any, engine: Engine, stack: ExitStack) -> AutoDrafter:
    """Raises OptionError for a draft that is no model: this drafter looks up by itself."""
    named = None if draft is None else make_drafter(draft, engine, stack)
    if named is not None and not isinstance(named, ModelDrafter):
        raise OptionError(f"draft={draft!r}: auto looks up by itself, and takes one model that drafts besides")
    return AutoDrafter(trained_drafter(engine, stack) if named is None else named)
