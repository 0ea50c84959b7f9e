"""Open the drafter that the option `draft` names: lookup or a model."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tot.decoders.drafting.draft_model import ModelDrafter
from tot.decoders.drafting.drafters import Drafter
from tot.decoders.drafting.lookup import LookupDrafter
from tot.decoders.engine.engine import Engine
from tot.decoders.errors import REMOVED, ModelError, OptionError, unknown
from tot.decoders.kernels.native.packed_file import open_packed
from tot.decoders.models.model_names import model_key


def make_drafter(draft: Any, engine: Engine, stack: ExitStack) -> Drafter:
    """Return a drafter for an engine's model. `stack` closes the resources opened for it.

    Args:
        draft: None or "lookup" for prompt lookup; another name, a path or a model object for that model. A Drafter is
            returned as it is, and its owner closes it.

    Decoders of one engine share the draft models that they name. Warns if the draft is not smaller than its target.
    Raises ModelError if the draft's tokens differ from the target's.
    """
    if isinstance(draft, Drafter):
        return draft
    if draft is None or draft == "lookup":
        return LookupDrafter()
    named = isinstance(draft, str | Path)
    if isinstance(draft, str) and draft.partition(":")[0] in REMOVED:
        raise OptionError(unknown("draft", draft, ()))
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
    """Load a draft model with the target's number of cache slots, so that every admitted request has room.

    Its weights are quantized like the target's if possible.
    """
    target = engine.loaded
    for integers in dict.fromkeys((target.weights.integers, False)):
        loaded = open_packed(
            draft,
            tokenizer=None if named else target.tokenizer,
            dtype=target.dtype.name if named else "auto",
            device=target.device,
            integers=integers,
        )
        check_vocabulary(loaded.tokenizer, target.tokenizer)
        try:
            drafter = ModelDrafter(loaded, engine.cache.capacity, target.config.vocab_size)
            break
        except OptionError as error:
            reason = error
    else:
        raise OptionError(f"no room for the draft's keys and values beside the target's: {reason}")
    if loaded.size >= target.size:
        warnings.warn(
            f"the draft {loaded.name} has {loaded.size:,} weights and the target {target.name} {target.size:,}: "
            "drafting will not make it faster; choose a smaller draft",
            stacklevel=4,
        )
    return drafter


def check_vocabulary(draft: Any, target: Any) -> None:
    """Raise ModelError unless both tokenizers have the same tokens. Embeddings may be padded to different sizes."""
    draft_ids, target_ids = draft.get_vocab(), target.get_vocab()
    different = sorted(
        token for token in draft_ids.keys() | target_ids.keys() if draft_ids.get(token) != target_ids.get(token)
    )
    if different:
        examples = ", ".join(
            f"{token!r} ({draft_ids.get(token)} and {target_ids.get(token)})" for token in different[:3]
        )
        raise ModelError(
            f"the draft's tokenizer differs from the target's in {len(different)} of {len(target_ids)} tokens, such as "
            f"{examples}: choose a draft of the same family, or draft=None for lookup"
        )
