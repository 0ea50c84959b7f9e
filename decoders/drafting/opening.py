"""Open the drafter that the option `draft` names: lookup, a model, or several."""

from __future__ import annotations

import logging
import warnings
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tot.decoders.drafting.draft_model import ModelDrafter, check_vocabulary
from tot.decoders.drafting.drafters import Drafter, DrafterChain
from tot.decoders.drafting.levels import LevelDrafter
from tot.decoders.drafting.lookup import LookupDrafter
from tot.decoders.drafting.state_drafter import DraftNetwork, StateDrafter, is_trained
from tot.decoders.engine.engine import Engine
from tot.decoders.errors import REMOVED, ModelError, OptionError, TotError, unknown
from tot.decoders.models.loaded import LoadedModel
from tot.decoders.models.loading import open_model
from tot.decoders.models.model_names import draft_folder, model_key

log = logging.getLogger(__name__)


def make_drafter(draft: Any, engine: Engine, stack: ExitStack) -> Drafter:
    """Return a drafter for an engine's model. `stack` closes the resources opened for it.

    Args:
        draft: None or "lookup" for prompt lookup; "trained" for the draft that `tot train-draft` made for this target;
            another name, a path or a model object for that model; a list or a text with commas for several, each for
            the texts without a draft so far. A Drafter is returned as it is, and its owner closes it.

    Decoders of one engine share the draft models that they name. Warns if the draft is not smaller than its target.
    Raises ModelError if the draft's tokens differ from the target's.
    """
    if isinstance(draft, Drafter):
        return draft
    if isinstance(draft, str) and "," in draft:
        draft = [part.strip() for part in draft.split(",")]
    if isinstance(draft, list | tuple):
        drafters = [make_drafter(part, engine, stack) for part in draft]
        if sum(bool(drafter.layers) for drafter in drafters) > 1:
            raise OptionError(f"draft={draft!r} has several drafts made by tot train-draft: give one of them")
        return DrafterChain(drafters)
    if draft is None or draft == "lookup":
        return LookupDrafter()
    target = engine.loaded
    if draft == "trained":
        draft = draft_folder(target.name)
        if not (draft / "config.json").exists():
            raise OptionError(f"no draft was trained for {target.name}: run `tot train-draft`, or give another draft")
    if isinstance(draft, str) and draft.partition(":")[0] in REMOVED:
        raise OptionError(unknown("draft", draft, ()))
    if isinstance(draft, str | Path) and is_trained(Path(draft)):
        return StateDrafter(_network(Path(draft), target))
    named = isinstance(draft, str | Path)
    if not named and not hasattr(draft, "config"):
        raise OptionError(f"draft={draft!r} is not a model: give a name, a path, a model object, lookup, trained")
    load = partial(_load_drafter, draft, named, engine)
    if named:
        shared: ModelDrafter = stack.enter_context(engine.drafters.use(model_key(draft), load))
        return shared
    own = load()
    stack.callback(own.close)
    return own


def _network(folder: Path, target: LoadedModel) -> DraftNetwork:
    """Load a trained draft. Raises ModelError if it was trained for another target."""
    network, config = DraftNetwork(folder), target.config
    ours = int(config.vocab_size), int(config.hidden_size), int(config.num_hidden_layers)
    fits = all(0 <= layer <= ours[2] for layer in network.layers)
    if (network.target_vocabulary, network.hidden) != ours[:2] or not fits:
        raise ModelError(f"the draft in {folder} was trained for {network.target}, not for {target.name}")
    return network


def _load_drafter(draft: Any, named: bool, engine: Engine) -> ModelDrafter:
    target = engine.loaded
    loaded = open_model(
        draft,
        tokenizer=None if named else target.tokenizer,
        dtype=target.dtype.name if named else "auto",
        device=target.device,
        unread=engine.runner.quantize == "gguf",
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


def trained_drafter(engine: Engine, stack: ExitStack) -> LevelDrafter[Any] | None:
    """Return the draft that `tot train-draft` made for the engine's model, or None if no usable one exists."""
    if not (draft_folder(engine.loaded.name) / "config.json").exists():
        return None
    try:
        drafter = make_drafter("trained", engine, stack)
    except TotError as error:
        log.warning("cannot use the trained draft of %s: %s", engine.loaded.name, error)
        return None
    assert isinstance(drafter, LevelDrafter)
    return drafter
