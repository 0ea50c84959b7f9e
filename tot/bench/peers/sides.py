"""Which sides there are, and how each is opened: what isn't installed is left out, with a word on how to get it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tot.bench.peers.goals import BATCHED, DYNAMIC, INT8, LLAMA, OURS, VLLM
from tot.bench.peers.here import LOOKED_UP, Generate, GenerateBatch, Tot
from tot.bench.peers.side import Side, SideError
from tot.bench.peers.worker import Worker
from tot.decoders.errors import OptionError, TotError, unknown
from tot.decoders.models.gguf_cache import cache_folder, cached_model
from tot.decoders.models.loading import load_model, resolve_device, resolve_dtype
from tot.decoders.models.model_names import find_model

PRECISIONS = ("BF16", "F16", "Q8_0", "own")
"""Of llama.cpp's weights; the last is that of the model's own file."""
SERIAL, ASSISTED, CONTINUOUS = "generate, serial", "generate, assisted", "generate_batch"
KINDS = ("int8", "batched", "serial", "assisted", "continuous", "llama", "vllm")
"""What our own side is compared with."""
_HERE = Path(__file__).parent
_SERIAL_MOST = 5
_CELLS, _CONTEXT = 16384, 2048
"""Tokens that llama.cpp keeps in all, and that vLLM takes of one sequence."""
_VLLM = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}


@dataclass(frozen=True)
class Plan:
    """What is compared: a model, its number format ("auto": what it is loaded in here), and the peers."""

    model: str = "smollm2-135m"
    dtype: str = "auto"
    vllm: Path = Path(".venv-vllm/bin/python")
    llama: Path = Path(".venv-llama/bin/python")
    kinds: Sequence[str] = KINDS


def open_sides(plan: Plan, stack: ExitStack, say: Callable[[str], None]) -> list[Side]:
    """Ours, then whatever else can be had; the stack closes them. Raises what keeps our own from being opened."""
    for kind in plan.kinds:
        if kind not in KINDS:
            raise OptionError(unknown("side", kind, KINDS))
    sides: list[Side] = []
    for name, opened in _openers(plan):
        try:
            side = opened()
        except TotError as error:
            if name == OURS:
                raise
            say(f"{name} is left out: {error}")
            continue
        stack.callback(side.close)
        sides.append(side)
        say(f"{name}: {side.about}")
    return sides


def open_exact(plan: Plan, stack: ExitStack, say: Callable[[str], None]) -> list[Tot]:
    """Ours in float32, if it can be had; the stack closes it."""
    name = f"{OURS}, float32"
    try:
        exact = Tot(name, plan.model, dtype="fp32")
    except TotError as error:
        say(f"{name} is left out: {error}")
        return []
    stack.callback(exact.close)
    return [exact]


def _openers(plan: Plan) -> Iterator[tuple[str, Callable[[], Side]]]:
    model, dtype, kinds = plan.model, plan.dtype, plan.kinds
    yield OURS, lambda: Tot(OURS, model, dtype=dtype)
    if "int8" in kinds:
        yield INT8, lambda: Tot(INT8, model, searches=False, dtype=dtype, quantize="int8")
        yield DYNAMIC, lambda: Tot(DYNAMIC, model, searches=False, dtype=dtype, quantize="int8-dynamic")
    if {"batched", "serial", "assisted"} & set(kinds):
        plain = load_model(model, dtype=dtype)  # one for all three
        if "batched" in kinds:
            yield BATCHED, lambda: Generate(BATCHED, plain)
        if "serial" in kinds:
            yield SERIAL, lambda: Generate(SERIAL, plain, serial=True, most=_SERIAL_MOST)
        if "assisted" in kinds:
            lookup = {"prompt_lookup_num_tokens": LOOKED_UP}
            yield ASSISTED, lambda: Generate(ASSISTED, plain, serial=True, most=1, searches=False, **lookup)
    if "continuous" in kinds:
        yield CONTINUOUS, lambda: GenerateBatch(CONTINUOUS, load_model(model, dtype=dtype))
    if "llama" in kinds:
        for precision in PRECISIONS:
            shown = _own_precision(model) if precision == "own" else precision
            name = f"{LLAMA}, {shown}"
            yield name, partial(_llama, plan, name, precision)
    if "vllm" in kinds:
        yield VLLM, lambda: _vllm(plan)


def _llama(plan: Plan, name: str, precision: str) -> Side:
    file = find_model(plan.model)
    if file.suffix != ".gguf":
        raise SideError(f"llama.cpp reads .gguf files, and {plan.model} is none: give one as --model")
    load = {
        "model": str(file),
        "precision": precision,
        "folder": str(cache_folder() / "peers"),
        "threads": torch.get_num_threads(),
        "cells": _CELLS,
    }
    return _worker(name, plan.llama, "llama", load, {})


def _vllm(plan: Plan) -> Side:
    found = find_model(plan.model)
    folder = found if found.is_dir() else cached_model(found, cache_folder() / "models").folder
    dtype = str(resolve_dtype(plan.dtype, resolve_device("auto"))).removeprefix("torch.")
    load = {"model": str(folder), "dtype": dtype, "context": _CONTEXT}
    return _worker(VLLM, plan.vllm, "vllm", load, _VLLM)


def _worker(name: str, python: Path, program: str, load: Mapping[str, Any], environment: Mapping[str, str]) -> Side:
    if not python.exists():
        raise SideError(f"there is no {python}: `make peers` installs it, or say where it is with --{program} PYTHON")
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    return Worker(name, python, _HERE / f"{program}_worker.py", load, environment={**threads, **environment})


def _own_precision(model: str) -> str:
    """Q4_1, say: what a .gguf file's name ends in."""
    return find_model(model).stem.rpartition(".")[2]
