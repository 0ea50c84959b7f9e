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
from tot.decoders.engine.last_open import LastOpen
from tot.decoders.errors import OptionError, TotError
from tot.decoders.kernels.native.compiling import SAMPLING
from tot.decoders.kernels.native.forward import Quantization
from tot.decoders.kernels.native.library import level, library
from tot.decoders.machine import give_back
from tot.decoders.models.loading import open_model, resolve_device
from tot.decoders.models.model_names import find_model, gguf_text, model_key
from tot.decoders.models.supported import LLAMA_LIKE

if TYPE_CHECKING:
    import torch

    from tot.decoders.models.model_names import Quantize

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
    if quantize == "auto":
        if _keeps_numbers(model, dtype, device):
            try:
                return _open(model, tokenizer, dtype, device, kv_budget, "gguf")
            except OptionError as error:  # it has layers that the kernels do not compute, or too little memory is free
                log.info("%s is not computed with as its file has it: %s", model, error)
        return _open(model, tokenizer, dtype, device, kv_budget, None)
    if quantize != "none" and (kind := _device(model, device).type) != "cpu":
        raise OptionError(f"quantize={quantize} is computed on the CPU, and the device is {kind}: leave quantize out")
    return _open(model, tokenizer, dtype, device, kv_budget, None if quantize == "none" else quantize)


def _keeps_numbers(model: Any, dtype: str, device: str) -> bool:
    """Whether to compute with a .gguf file's whole numbers: decided before the model is loaded, which takes long."""
    if dtype != "auto" or not isinstance(model, str | Path) or _device(model, device).type != "cpu":
        return False
    path = find_model(model)
    known = path.suffix == ".gguf" and gguf_text(path, "general.architecture") in LLAMA_LIKE
    return known and level() is not None and library(*SAMPLING) is not None


def _device(model: Any, device: str) -> torch.device:
    """Where a model is to run. A model object stays where it is, by default."""
    if device == "auto" and not isinstance(model, str | Path):
        return model.device  # type: ignore[no-any-return]
    return resolve_device(device)


def _open(
    model: str | Path | Any,
    tokenizer: Any,
    dtype: str,
    device: str,
    kv_budget: int | str | None,
    form: Quantization | None,
) -> Engine:
    loaded = open_model(model, tokenizer=tokenizer, dtype=dtype, device=device, unread=form == "gguf")
    give_back()  # a tokenizer's file is read into many times its size, which room for keys and values would lie in
    return Engine(loaded, kv_budget, quantize=form, owned=isinstance(model, str | Path))


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
