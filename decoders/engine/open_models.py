"""Engines that share models: the last models used stay open, and the next call that names them reuses them.

This is the only process-wide state. Loading other models, `close_models()` and exit close the open models.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tot.decoders.engine.engine import Engine
from tot.decoders.engine.runner import default_budget
from tot.decoders.errors import OptionError, TotError, validated
from tot.decoders.kernels.native.compiling import SAMPLING
from tot.decoders.kernels.native.library import level, library
from tot.decoders.kernels.native.packed_file import open_packed
from tot.decoders.machine import free_memory, give_back, trim
from tot.decoders.models.engine_options import EngineOptions
from tot.decoders.models.families import GGUF_FAMILIES
from tot.decoders.models.loading import resolve_device
from tot.decoders.models.memory import Need, check_memory, split_budget
from tot.decoders.models.model_names import KNOWN_MODELS, find_model, gguf_text, model_key

log = logging.getLogger(__name__)


def open_engine(model: str | Path | Any, tokenizer: Any = None, **options: Any) -> Engine:
    """Load a model and make an engine for it. `options` are EngineOptions by name."""
    chosen = validated(EngineOptions, options, "engine")
    quantize = chosen.quantize
    if quantize == "auto":
        if _uses_integers(model, chosen):
            try:
                return _open(model, tokenizer, chosen, integers=True)
            except OptionError as error:  # unsupported layers, or too little free memory
                log.info("cannot compute with the quantized weights of %s, so they are dequantized: %s", model, error)
    elif quantize == "gguf":
        if (kind := _device(model, chosen).partition(":")[0]) != "cpu":
            raise OptionError(f"quantize=gguf runs on the CPU only, and the device is {kind}: leave quantize out")
        if not (isinstance(model, str | Path) and find_model(model).is_file()):
            raise OptionError("quantize=gguf uses the integers of a .gguf file: give such a file, or omit quantize")
        return _open(model, tokenizer, chosen, integers=True)
    return _open(model, tokenizer, chosen, integers=False)


def _device(model: Any, options: EngineOptions) -> str:
    """Return the device of a model. A model object stays on its device by default."""
    if options.device == "auto" and not isinstance(model, str | Path):
        return str(model.device)
    return resolve_device(options.device)


def _uses_integers(model: Any, options: EngineOptions) -> bool:
    """Return whether to compute with the quantized weights of a .gguf file. Decided before the slow loading."""
    if options.dtype != "auto" or not isinstance(model, str | Path) or _device(model, options) != "cpu":
        return False
    if str(model) in KNOWN_MODELS:  # of the small model, rounding costs answers
        return False
    path = find_model(model)
    supported = path.is_file() and gguf_text(path, "general.architecture") in GGUF_FAMILIES
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
        think_tags=options.think_tags,
    )
    trim()  # parsing a tokenizer file takes many times its size
    return engine


@contextmanager
def shared_engines(models: Sequence[tuple[Any, Any, EngineOptions]]) -> Iterator[list[Engine]]:
    """Yield an engine for each model, tokenizer and options, shared by all concurrent users of the same ones.

    Names of the same files share one engine. The engines stay open for the next user, with empty caches. Model objects,
    and models with a given tokenizer, belong to the caller: their engines close after use. Raises ModelError before
    loading if several models do not fit into free memory.
    """
    kept = all(tokenizer is None and isinstance(model, str | Path) for model, tokenizer, _ in models)
    keys = [(find_model(model).resolve() if kept else id(model), options) for model, _, options in models]
    distinct = dict(zip(keys, models, strict=True))
    if len(distinct) > 1 and not kept:
        raise OptionError(
            f"{len(distinct)} models are given, and one is an object or has a given tokenizer: name all of them, or "
            "pass decoder objects, such as model={'escalate': Model(decoder=load_decoder('ar', model, "
            "tokenizer=tokenizer))}"
        )
    # A fork cannot use its parent's engine, and models that share memory have a smaller cache.
    open_as: dict[Any, Hashable] = {}
    if kept:
        open_as = {key: (model_key(one[0]), key[1], len(distinct), os.getpid()) for key, one in distinct.items()}
    budgets: dict[Any, Any] = {key: key[1].kv_budget for key in distinct}
    if len(distinct) > 1:
        _open_engines.close_idle(open_as.values())
        for on in {resolve_device(options.device) for _, options in distinct}:
            needs = {key: _need(*one) for key, one in distinct.items() if resolve_device(key[1].device) == on}
            new = [need for key, need in needs.items() if open_as[key] not in _open_engines]
            free = free_memory(on)
            check_memory(new, free)
            if unbounded := {key: need for key, need in needs.items() if budgets[key] is None}:
                room = default_budget(free - sum(need.weights for need in new), on)
                budgets |= zip(unbounded, split_budget(list(unbounded.values()), room), strict=True)
    with ExitStack() as stack:
        engines = {}
        for key, (model, tokenizer, options) in distinct.items():
            chosen = options.model_dump() | {"kv_budget": budgets[key]}
            make = partial(open_engine, model, tokenizer, **chosen)
            opening = _open_engines.use(open_as[key], make, open_as.values()) if kept else make()
            engines[key] = engine = stack.enter_context(opening)
            if options.kv_budget is None and budgets[key] is not None:
                engine.runner.bound_idle()
        yield [engines[key] for key in keys]


def _need(model: str | Path, tokenizer: Any, options: EngineOptions) -> Need:
    """Return the memory that a model needs."""
    integers = options.quantize == "gguf" or (options.quantize == "auto" and _uses_integers(model, options))
    return Need.of(model, options.dtype, resolve_device(options.device), integers)


class LastOpen:
    """Engines in use by key, and those used last. Thread-safe."""

    def __init__(self) -> None:
        self._engines: dict[Hashable, Engine] = {}
        self._users: Counter[Hashable] = Counter()
        self._lock = threading.RLock()

    @contextmanager
    def use(self, key: Hashable, make: Callable[[], Engine], beside: Collection[Hashable]) -> Iterator[Engine]:
        """Yield the engine of this key, or close the idle ones, except those `beside`, and make it."""
        with self._lock:  # other users of this key wait until it is open
            if key not in self._engines:
                self.close_idle(beside)
                self._engines[key] = make()
            engine = self._engines[key]
            self._users[key] += 1
        try:
            yield engine
        finally:
            with self._lock:
                self._users[key] -= 1
                if not self._users[key] and not sys.is_finalizing():  # at exit, closing may need freed modules
                    self.close_idle((*beside, key))
                    try:
                        engine.reset()
                    except TotError:  # it has failed
                        self.close_idle(self._engines.keys() - {key})

    def __contains__(self, key: Hashable) -> bool:
        return key in self._engines

    def close_idle(self, but: Collection[Hashable] = ()) -> None:
        """Close the idle engines, except those under the keys `but`."""
        with self._lock:
            for key in [key for key in self._engines if not self._users[key] and key not in but]:
                self._engines.pop(key).close()
                give_back()


_open_engines = LastOpen()


def close_models() -> None:
    """Close the models that were kept open, and free their memory. Models in use stay open."""
    _open_engines.close_idle()
