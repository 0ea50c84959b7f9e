"""An engine for a model that is named: what it computes in is chosen here, before the model is loaded for that."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tot.decoders.engine.engine import Engine
from tot.decoders.errors import OptionError
from tot.decoders.kernels.forward import Quantization
from tot.decoders.memory import give_back
from tot.decoders.models.loading import load_model
from tot.decoders.models.model_names import find_model

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
    """Load a model, and make an engine for it, all as `load_decoder` says."""
    if quantize == "auto" and dtype == "auto" and isinstance(model, str | Path) and find_model(model).suffix == ".gguf":
        try:
            return _open(model, tokenizer, dtype, device, kv_budget, "gguf")
        except OptionError as error:
            log.info("%s is not computed with as its file has it: %s", model, error)
    form = None if quantize == "auto" or quantize == "none" else quantize
    return _open(model, tokenizer, dtype, device, kv_budget, form)


def _open(
    model: Any, tokenizer: Any, dtype: str, device: str, kv_budget: int | str | None, form: Quantization | None
) -> Engine:
    loaded = load_model(model, tokenizer=tokenizer, dtype=dtype, device=device, unread=form == "gguf")
    give_back()  # a tokenizer's file is read into many times its size, which room for keys and values would lie in
    return Engine(loaded, kv_budget, quantize=form, owned=isinstance(model, str | Path))
