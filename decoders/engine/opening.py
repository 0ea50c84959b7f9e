"""An engine for a model that is named: what it computes in is chosen here, before the model is loaded for that."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tot.decoders.engine.engine import Engine
from tot.decoders.errors import OptionError, unknown
from tot.decoders.kernels.forward import Quantization
from tot.decoders.models.loading import load_model
from tot.decoders.models.model_names import find_model

if TYPE_CHECKING:
    from tot.decoders.decoder import Quantize

log = logging.getLogger(__name__)
_FORMS: dict[Quantize, list[Quantization | None]] = {
    "none": [None],
    "int8-dynamic": ["int8-dynamic"],
    "gguf": ["gguf"],
}


def open_engine(
    model: str | Path | Any,
    tokenizer: Any = None,
    dtype: str = "auto",
    device: str = "auto",
    kv_budget: int | str | None = None,
    quantize: Quantize = "auto",
) -> Engine:
    """Load a model, and make an engine for it, all as `load_decoder` says."""
    forms: list[Quantization | None]
    if quantize == "auto":
        named = isinstance(model, str | Path) and dtype == "auto"
        forms = ["gguf", None] if named and find_model(model).suffix == ".gguf" else [None]
    elif quantize in _FORMS:
        forms = _FORMS[quantize]
    else:
        raise OptionError(unknown("quantization", str(quantize), ["auto", *_FORMS]))
    for form in forms[:-1]:
        try:
            return _open(model, tokenizer, dtype, device, kv_budget, form)
        except OptionError as error:
            log.info("%s is computed with in %s: %s", model, dtype, error)
    return _open(model, tokenizer, dtype, device, kv_budget, forms[-1])


def _open(
    model: Any, tokenizer: Any, dtype: str, device: str, kv_budget: int | str | None, form: Quantization | None
) -> Engine:
    loaded = load_model(model, tokenizer=tokenizer, dtype=dtype, device=device, unread=form == "gguf")
    return Engine(loaded, kv_budget, quantize=form, owned=isinstance(model, str | Path))
