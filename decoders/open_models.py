"""The model that was used last stays open: the next call in this process that names it begins without loading it.

The one place with state of the whole process. Loading another model closes it, as `close_models()` and exit do.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tot.decoders.engine.engine import Engine
from tot.decoders.errors import OptionError, TotError
from tot.decoders.last_open import LastOpen
from tot.decoders.memory import give_back
from tot.decoders.models.loading import load_model
from tot.decoders.models.model_names import find_model, model_key

if TYPE_CHECKING:
    from tot.decoders.decoder import Quantize

log = logging.getLogger(__name__)


def open_engine(
    model: str | Path | Any,
    tokenizer: Any = None,
    dtype: str = "auto",
    device: str = "auto",
    kv_budget: int | str | None = None,
    quantize: Quantize = "auto",
) -> Engine:
    """Load a model, and make an engine for it, all as `load_decoder` says. Its number format is chosen before."""
    named = isinstance(model, str | Path)
    if quantize == "auto" and dtype == "auto" and named and find_model(model).suffix == ".gguf":
        try:
            return open_engine(model, tokenizer, dtype, device, kv_budget, "gguf")
        except OptionError as error:
            log.info("%s is not computed with as its file has it: %s", model, error)
    form = None if quantize == "auto" or quantize == "none" else quantize
    loaded = load_model(model, tokenizer=tokenizer, dtype=dtype, device=device, unread=form == "gguf")
    give_back()  # a tokenizer's file is read into many times its size, which room for keys and values would lie in
    return Engine(loaded, kv_budget, quantize=form, owned=named)


@contextmanager
def shared_engine(
    model: str | Path | Any,
    *,
    tokenizer: Any = None,
    dtype: str = "auto",
    device: str = "auto",
    kv_budget: int | str | None = None,
    quantize: Quantize = "auto",
) -> Iterator[Engine]:
    """An engine as `load_decoder` makes it, but shared by all who use the same model in the same way at a time, and
    kept for whoever is next: without what was computed on it, so that it is as if it were new.

    Model objects, and models with a tokenizer given, are the caller's: their engines end with their use.
    """

    named = isinstance(model, str | Path)

    def make() -> Engine:
        give_back()  # what the model before this one had
        return open_engine(model, tokenizer, dtype, device, kv_budget, quantize)

    if tokenizer is not None or not named:
        with make() as engine:
            yield engine
        return
    key = (model_key(model), dtype, device, kv_budget, quantize, os.getpid())  # a fork has its parent's in name only
    with _engines.use(key, make) as engine:
        yield engine


def close_models() -> None:
    """Close the model that was kept open after its last use, and give its memory back. Those in use stay."""
    if _engines.close_idle():
        give_back()


def _as_new(engine: Engine) -> bool:
    try:
        engine.reset()
    except TotError:  # it has failed
        return False
    return True


_engines = LastOpen(Engine.close, _as_new)
