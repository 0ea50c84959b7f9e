"""Engines that share models: the last models used stay open, and the next call that names them reuses them.

This is the only process-wide state. Loading other models, `close_models()` and exit close the open models.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np

from tot.decoders.engine.engine import Engine
from tot.decoders.engine.last_open import LastOpen
from tot.decoders.engine.runner import default_budget
from tot.decoders.errors import OptionError, TotError, unknown
from tot.decoders.kernels.native.compiling import SAMPLING
from tot.decoders.kernels.native.library import level, library
from tot.decoders.kernels.native.packed_file import open_packed
from tot.decoders.machine import free_memory, give_back, trim
from tot.decoders.models.families import GGUF_FAMILIES
from tot.decoders.models.loading import resolve_device
from tot.decoders.models.memory import Need, check_memory, split_budget
from tot.decoders.models.model_names import KNOWN_MODELS, Quantize, find_model, gguf_text, model_key

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineOptions:
    """How an engine computes, as in `load_decoder`."""

    dtype: str = "auto"
    device: str = "auto"
    kv_budget: int | str | None = None
    quantize: Quantize = "auto"
    threads: int | None = None
    prefix_cache: bool = True

    def device_of(self, model: Any) -> str:
        """Return the device of a model. A model object stays on its device by default."""
        if self.device == "auto" and not isinstance(model, str | Path):
            return str(model.device)
        return resolve_device(self.device)

    def need_of(self, model: str | Path) -> Need:
        """Return the memory that a model needs."""
        integers = self.quantize == "gguf" or (self.quantize == "auto" and _uses_integers(model, self))
        return Need.of(model, self.dtype, resolve_device(self.device), integers)


def open_engine(model: str | Path | Any, tokenizer: Any = None, **options: Any) -> Engine:
    """Load a model and make an engine for it. `options` are EngineOptions by name."""
    chosen = EngineOptions(**options)
    quantize = chosen.quantize
    if quantize == "auto":
        if _uses_integers(model, chosen):
            try:
                return _open(model, tokenizer, chosen, integers=True)
            except OptionError as error:  # unsupported layers, or too little free memory
                log.info("cannot compute with the quantized weights of %s, so they are dequantized: %s", model, error)
    elif quantize == "gguf":
        if (kind := chosen.device_of(model).partition(":")[0]) != "cpu":
            raise OptionError(f"quantize=gguf runs on the CPU only, and the device is {kind}: leave quantize out")
        if not (isinstance(model, str | Path) and find_model(model).is_file()):
            raise OptionError("quantize=gguf uses the integers of a .gguf file: give such a file, or omit quantize")
        return _open(model, tokenizer, chosen, integers=True)
    elif quantize != "none":
        raise OptionError(unknown("quantization", str(quantize), get_args(Quantize)))
    return _open(model, tokenizer, chosen, integers=False)


def _uses_integers(model: Any, options: EngineOptions) -> bool:
    """Return whether to compute with the quantized weights of a .gguf file. Decided before the slow loading."""
    if options.dtype != "auto" or not isinstance(model, str | Path) or options.device_of(model) != "cpu":
        return False
    if str(model) in KNOWN_MODELS:  # of the small model, rounding costs answers
        return False
    path = find_model(model)
    supported = path.suffix == ".gguf" and gguf_text(path, "general.architecture") in GGUF_FAMILIES
    return supported and level() is not None and library(*SAMPLING) is not None


def _open(model: Any, tokenizer: Any, options: EngineOptions, integers: bool) -> Engine:
    loaded = open_packed(model, tokenizer=tokenizer, dtype=options.dtype, device=options.device, integers=integers)
    half = (at := level()) is not None and at.half_store
    if integers and options.dtype == "auto" and loaded.dtype == np.float32 and half:
        loaded.store_dtype = np.dtype(np.float16)
    engine = Engine(
        loaded,
        options.kv_budget,
        owned=isinstance(model, str | Path),
        threads=options.threads,
        prefix_cache=options.prefix_cache,
    )
    trim()  # parsing a tokenizer file takes many times its size
    return engine


@contextmanager
def shared_engines(
    models: Sequence[str | Path | Any], *, tokenizer: Any = None, **options: Any
) -> Iterator[list[Engine]]:
    """Yield an engine for each model, shared by all concurrent users of the same models and options.

    `options` are EngineOptions by name, for each model. Names of the same files share one engine. The engines stay
    open for the next user, with empty caches. Model objects, and models with a given tokenizer, belong to the caller:
    their engines close after use. Raises ModelError before loading if several models do not fit into free memory.
    """
    kept = tokenizer is None and all(isinstance(model, str | Path) for model in models)
    files = [find_model(model).resolve() if kept else id(model) for model in models]
    distinct = dict(zip(files, models, strict=True))
    if len(distinct) > 1 and not kept:
        raise OptionError(
            f"{len(distinct)} models are given, and one is an object or has a given tokenizer: name all of them, or "
            "pass decoder objects, such as decoder={'escalate': load_decoder('ar', model, tokenizer=tokenizer)}"
        )
    chosen = EngineOptions(**options)
    # A fork cannot use its parent's engine, and models that share memory have a smaller cache.
    keys = {file: (model_key(model), chosen, len(distinct), os.getpid()) for file, model in distinct.items() if kept}
    budgets: dict[Any, Any] = dict.fromkeys(distinct, chosen.kv_budget)
    if len(distinct) > 1:
        _engines.close_idle(keys.values())
        needs = {file: chosen.need_of(model) for file, model in distinct.items()}
        new = [needs[file] for file in distinct if keys[file] not in _engines]
        free = free_memory(on := resolve_device(chosen.device))
        check_memory(new, free)
        if chosen.kv_budget is None:
            room = default_budget(free - sum(need.weights for need in new), on)
            budgets = dict(zip(distinct, split_budget(list(needs.values()), room), strict=True))
    with ExitStack() as stack:
        engines = {}
        for file, model in distinct.items():
            make = partial(open_engine, model, tokenizer, **{**options, "kv_budget": budgets[file]})
            opening = _engines.use(keys[file], make, keys.values()) if kept else make()
            engines[file] = engine = stack.enter_context(opening)
            if chosen.kv_budget is None:
                engine.runner.bound_idle()
        yield [engines[file] for file in files]


def close_models() -> None:
    """Close the models that were kept open, and free their memory. Models in use stay open."""
    _engines.close_idle()


def _close(engine: Engine) -> None:
    engine.close()
    give_back()


def _reset(engine: Engine) -> bool:
    """Reset an engine for its next user. Return False if it has failed."""
    try:
        engine.reset()
    except TotError:
        return False
    return True


_engines = LastOpen(_close, _reset)
