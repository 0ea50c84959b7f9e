"""auto: choose the fastest lossless method for each text and step, from measured costs and acceptance rates.

Every step plans one forward for all texts. For each text, prompt lookup, its Jacobi window and a draft model, if any,
compete by the cost of rows and the acceptance rate of their kind and purpose. The best one drafts as far as it pays, or
nothing is drafted. Lookahead is excluded, because its windows cost more than they gain. So are methods that are not
lossless.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from copy import copy
from typing import Any

from tot.decoders.drafting.draft_model import ModelDrafter, level, make_drafter
from tot.decoders.drafting.drafters import Draft, DraftContext, Drafter, Verified
from tot.decoders.drafting.lookup import LookupDrafter
from tot.decoders.drafting.planner import SpeculationPlanner
from tot.decoders.engine.engine import Engine
from tot.decoders.errors import OptionError
from tot.decoders.methods.jacobi import JacobiDrafter
from tot.decoders.methods.method import Method, MethodOptions, OpenedMethod
from tot.decoders.methods.speculative import SpeculativeConfig, speculate

_LONGEST = 16
"""Maximum number of tokens in a draft, and the size of a Jacobi window."""
_MIN_CHANCE = 0.1
"""Minimum acceptance chance of a draft's first token. The measured costs do not include the time of drafting itself."""


class AutoDrafter(Drafter):
    """Drafts for each text with the drafter of the highest planned rate.

    The draft model drafts for a text if its acceptance so far is higher than the chance of the other drafts.
    """

    def __init__(self, model: ModelDrafter | None) -> None:
        self._model = model
        self._quick: list[Drafter] = [LookupDrafter(), JacobiDrafter(_LONGEST)]
        self._drafters = [*self._quick, *([] if model is None else [model])]
        self.runner = None if model is None else model.runner

    def draft(self, contexts: Sequence[DraftContext], planner: SpeculationPlanner | None = None) -> list[Draft]:
        assert planner is not None  # auto always plans
        if self._model is None:
            return [self._best(context, planner) for context in contexts]
        drafts = []
        for context in contexts:
            minimum = planner.statistics.chance(level(context, 0)) if context.widths else 0.0
            drafts.append(self._best(context, planner, minimum))
        missing = [i for i, draft in enumerate(drafts) if not draft.tokens]
        for i, draft in zip(missing, self._model.draft([contexts[i] for i in missing], planner), strict=True):
            drafts[i] = draft if draft.tokens else self._best(contexts[i], planner)
        return drafts

    def _best(self, context: DraftContext, planner: SpeculationPlanner, minimum: float = 0.0) -> Draft:
        """Return the best draft without a model, or an empty one if its first token's chance is too small."""
        plans = [(copy(planner), drafter) for drafter in self._quick]
        plan, draft = max(
            ((plan, drafter.draft([context], plan)[0]) for plan, drafter in plans), key=lambda pair: pair[0].rate
        )
        if not draft.tokens or planner.statistics.chance(draft.kinds[0]) < max(minimum, _MIN_CHANCE):
            return Draft()
        planner.take(plan)
        return draft

    def observe(self, verified: Verified) -> None:
        for drafter in self._drafters:
            drafter.observe(verified)

    def end(self, key: int) -> None:
        for drafter in self._drafters:
            drafter.end(key)


class AutoOptions(MethodOptions):
    """Whatever pays by the measured costs: prompt lookup, a Jacobi window, a draft model, or plain decoding."""

    draft: Any = None
    """A draft model, used for texts where it is best: a name, a hub id, a folder or a GGUF file."""


def _open(engine: Engine, options: AutoOptions, stack: ExitStack) -> OpenedMethod:
    draft = options.draft
    model = None if draft is None else make_drafter(draft, engine, stack)
    if model is not None and not isinstance(model, ModelDrafter):
        raise OptionError(f"draft={draft!r} is not a model: auto includes lookup; give a model, or leave draft out")
    return speculate(engine, AutoDrafter(model), SpeculativeConfig((1,) * _LONGEST, adapt=True))


METHOD = Method(_open, AutoOptions)
