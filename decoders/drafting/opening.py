"""What the option `draft` may name, opened for an engine: a lookup, a model, the target's first layers, or several."""

from __future__ import annotations

import logging
import re
import warnings
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tot.decoders.drafting.draft_model import ModelDrafter, check_vocabulary
from tot.decoders.drafting.drafters import Drafter, DrafterChain
from tot.decoders.drafting.early_exit import first_layers
from tot.decoders.drafting.lookup import LookupDrafter
from tot.decoders.engine.engine import Engine
from tot.decoders.errors import OptionError, TotError
from tot.decoders.kernels.backend import Backend
from tot.decoders.models.loaded import LoadedModel
from tot.decoders.models.loading import open_model
from tot.decoders.models.model_names import draft_folder, model_key

log = logging.getLogger(__name__)


def make_drafter(draft: Any, engine: Engine, stack: ExitStack) -> Drafter:
    """A drafter for an engine's model, from what the option `draft` may be; what is opened for it the stack closes.

    None and "lookup" look up; "early-exit" or "early-exit:6" drafts with the target's first layers; other names, paths
    and model objects with that model, "trained" with the one that `tot train-draft` made for this target; several, in a
    list or with commas, each for texts that those before had nothing for. A drafter is itself, and whose it is closes
    it. Decoders of one engine share the draft models that they name. Warns of a draft that is slower than its target.
    Raises ModelError where the draft's tokens are not the target's.
    """
    if isinstance(draft, Drafter):
        return draft
    if isinstance(draft, str) and "," in draft:
        draft = [part.strip() for part in draft.split(",")]
    if isinstance(draft, list | tuple):
        return DrafterChain([make_drafter(part, engine, stack) for part in draft])
    if draft is None or draft == "lookup":
        return LookupDrafter()
    target = engine.loaded
    if isinstance(draft, str) and re.fullmatch(r"early-exit(:\d{1,4})?", draft):
        layers = draft.partition(":")[2]
        first = first_layers(target, int(layers) if layers else None)
        shallow = _model_drafter(first, engine, shared=engine.runner.backend)
        stack.callback(shallow.close)
        return shallow
    if draft == "trained":
        draft = draft_folder(target.name)
        if not (draft / "config.json").exists():
            raise OptionError(f"no draft was trained for {target.name}: run `tot train-draft`, or give another draft")
    named = isinstance(draft, str | Path)
    if not named and not hasattr(draft, "config"):
        raise OptionError(
            f"draft={draft!r} is no model: give a name, a path, a model object, lookup, trained or early-exit:N"
        )
    load = partial(_load_drafter, draft, named, engine)
    if named:
        shared: ModelDrafter = stack.enter_context(engine.drafters.use(model_key(draft), load))
        return shared
    own = load()
    stack.callback(own.close)
    return own


def _load_drafter(draft: Any, named: bool, engine: Engine) -> ModelDrafter:
    target = engine.loaded
    loaded = open_model(
        draft,
        tokenizer=None if named else target.tokenizer,
        dtype=str(target.dtype).removeprefix("torch.") if named else "auto",
        device=str(target.device),
        unread=engine.runner.quantize == "gguf",
    )
    check_vocabulary(loaded.tokenizer, target.tokenizer)
    made = _model_drafter(loaded, engine)
    if (weights := loaded.size) >= (most := target.size):
        warnings.warn(
            f"the draft {loaded.name} has {weights:,} weights and the target {target.name} {most:,}: drafting will not "
            "make it faster; choose a smaller draft",
            stacklevel=4,
        )
    return made


def _model_drafter(loaded: LoadedModel, engine: Engine, shared: Backend | None = None) -> ModelDrafter:
    """With a store for as many tokens as the target has: whatever is admitted there has room here. Its weights are
    quantized as the target's, where they can be: what is drafted only has to be likely."""
    wanted = None if shared is not None else engine.runner.quantize
    make = partial(ModelDrafter, loaded, engine.cache.capacity, engine.loaded.config.vocab_size)
    for quantize in dict.fromkeys((wanted, None)):
        try:
            return make(quantize, shared)
        except OptionError as error:
            why = error
    raise OptionError(f"no room for the draft's keys and values beside the target's: {why}")


def trained_drafter(engine: Engine, stack: ExitStack) -> ModelDrafter | None:
    """The draft that `tot train-draft` made for the engine's model, where there is one that can be used."""
    if not (draft_folder(engine.loaded.name) / "config.json").exists():
        return None
    try:
        drafter = make_drafter("trained", engine, stack)
    except TotError as error:
        log.warning("the draft that was trained for %s is not used: %s", engine.loaded.name, error)
        return None
    assert isinstance(drafter, ModelDrafter)
    return drafter
