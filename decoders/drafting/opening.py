"""Open the drafter that the option `draft` names: lookup, a model, or several."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tot.decoders.drafting.draft_model import ModelDrafter, check_vocabulary
from tot.decoders.drafting.drafters import Drafter, DrafterChain
from tot.decoders.drafting.lookup import LookupDrafter
from tot.decoders.engine.engine import Engine
from tot.decoders.errors import REMOVED, OptionError, unknown
from tot.decoders.kernels.native.packed_file import open_packed
from tot.decoders.models.loaded import LoadedModel
from tot.decoders.models.model_names import model_key


def make_drafter(draft: Any, engine: Engine, stack: ExitStack) -> Drafter:
    """Return a drafter for an engine's model. `stack` closes the resources opened for it.

    Args:
        draft: None or "lookup" for prompt lookup; another name, a path or a model object for that model; a list or a
            text with commas for several, each for the texts without a draft so far. A Drafter is returned as it is,
            and its owner closes it.

    Decoders of one engine share the draft models that they name. Warns if the draft is not smaller than its target.
    Raises ModelError if the draft's tokens differ from the target's.
    """
    if isinstance(draft, Drafter):
        return draft
    if isinstance(draft, str) and "," in draft:
        draft = [part.strip() for part in draft.split(",")]
    if isinstance(draft, list | tuple):
        return DrafterChain([make_drafter(part, engine, stack) for part in draft])
    if draft is None or draft == "lookup":
        return LookupDrafter()
    if isinstance(draft, str) and draft.partition(":")[0] in REMOVED:
        raise OptionError(unknown("draft", draft, ()))
    named = isinstance(draft, str | Path)
    if not named and not hasattr(draft, "config"):
        raise OptionError(f"draft={draft!r} is not a model: give a name, a path, a model object or lookup")
    load = partial(_load_drafter, draft, named, engine)
    if named:
        shared: ModelDrafter = stack.enter_context(engine.drafters.use(model_key(draft), load))
        return shared
    own = load()
    stack.callback(own.close)
    return own


def _load_drafter(draft: Any, named: bool, engine: Engine) -> ModelDrafter:
    target = engine.loaded
    loaded = open_packed(
        draft,
        tokenizer=None if named else target.tokenizer,
        dtype=target.dtype.name if named else "auto",
        device=target.device,
        quantize=engine.runner.quantize,
    )
    check_vocabulary(loaded.tokenizer, target.tokenizer)
    drafter = _model_drafter(loaded, engine)
    if (weights := loaded.size) >= (target_weights := target.size):
        warnings.warn(
            f"the draft {loaded.name} has {weights:,} weights and the target {target.name} {target_weights:,}: "
            "drafting will not make it faster; choose a smaller draft",
            stacklevel=4,
        )
    return drafter


def _model_drafter(loaded: LoadedModel, engine: Engine) -> ModelDrafter:
    """Make a drafter with the target's number of cache slots, so that every admitted request has room.

    Its weights are quantized like the target's if possible.
    """
    make = partial(ModelDrafter, loaded, engine.cache.capacity, engine.loaded.config.vocab_size)
    for quantize in dict.fromkeys((engine.runner.quantize, None)):
        try:
            return make(quantize)
        except OptionError as error:
            reason = error
    raise OptionError(f"no room for the draft's keys and values beside the target's: {reason}")
