"""The sides of `tot bench peers`. Sides that are not installed are left out, with a hint on how to install them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tot.bench.engines import SideError, about, generate, replay
from tot.bench.harness import Side
from tot.bench.options import BranchesOptions, PeersOptions
from tot.bench.peers.worker import PeerWorker
from tot.decoders.decoder import LocalDecoder, load_decoder
from tot.decoders.errors import TotError
from tot.decoders.machine import describe, threads
from tot.decoders.models.gguf_cache import cache_folder, cached_model
from tot.decoders.models.loading import load_model, resolve_device, resolve_dtype
from tot.decoders.models.model_names import find_model

OURS, LLAMA = "tot", "llama.cpp"
PRECISIONS = ("BF16", "F16", "Q8_0", "own")
"""Precisions of llama.cpp's weights; "own" is the precision of the model's file."""
_WORKERS = Path(__file__).parent
_SERIAL_MOST = 5
_CELLS, _CONTEXT = 16384, 2048
"""Tokens of llama.cpp's cache in addition to the prompts, and minimum context length of vLLM."""
_VLLM = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}


@dataclass(frozen=True)
class Peer(Side):
    """A side that runs waves of requests."""

    searches: bool = True
    """Whether to run it on searches, which need different numbers of tokens for different prompts."""
    decoder: LocalDecoder | None = None
    """The decoder of our own sides; None for peers."""


def open_sides(asked: PeersOptions, stack: ExitStack, say: Callable[[str], None]) -> list[Peer]:
    """Open our side, then every available peer; the stack closes them. Raises TotError if our side cannot open."""
    sides: list[Peer] = []
    for name, opened in _openers(asked, stack):
        try:
            sides.append(opened(name))
        except TotError as error:
            if name == OURS:
                raise
            say(f"{name} is left out: {error}")
        else:
            say(f"{name}: {sides[-1].about}")
    return sides


def open_ours(model: str, stack: ExitStack, searches: bool, name: str, **options: Any) -> Peer:
    """Open `ar` on its own engine. Every run computes its prompts."""
    decoder = stack.enter_context(load_decoder("ar", find_model(model), prefix_cache=False, **options))
    return Peer(name, partial(replay, decoder), about(decoder.engine), searches=searches, decoder=decoder)


def _openers(options: PeersOptions, stack: ExitStack) -> Iterator[tuple[str, Callable[[str], Peer]]]:
    model, kinds = options.model, set(options.sides)
    yield OURS, partial(open_ours, model, stack, True)
    for quantize in ("none", "int8-dynamic"):
        if quantize in kinds:
            yield f"{OURS}, quantize={quantize}", partial(open_ours, model, stack, False, quantize=quantize)
    if {"batched", "serial"} & kinds:
        plain = load_model(model)  # one for both
        description = describe(plain.device, plain.dtype)
        if "batched" in kinds:
            yield "generate, batched", lambda name: Peer(name, partial(generate, plain.model), description)
        if "serial" in kinds:
            work = partial(generate, plain.model, serial=True)
            yield "generate, serial", lambda name: Peer(name, work, description, _SERIAL_MOST)
    if "llama" in kinds:
        for precision in PRECISIONS:
            quantization = re.search(r"q\d_\w+", find_model(model).stem, re.IGNORECASE)  # Q4_1, say
            own = quantization[0].upper() if quantization else "its own file"
            yield f"{LLAMA}, {own if precision == 'own' else precision}", partial(open_llama, options, stack, precision)
    if "vllm" in kinds:
        yield "vLLM", partial(_vllm, options, stack)


def open_llama(options: BranchesOptions, stack: ExitStack, precision: str, name: str) -> Peer:
    """Open llama.cpp with weights of a precision in PRECISIONS. Raises SideError if it is not available."""
    longest = options.prompt_tokens + options.new_tokens
    worker = llama_process(options.model, options.llama, stack, precision, 2 * longest)
    return Peer(name, worker.run, worker.about)


def llama_process(model: str, python: Path, stack: ExitStack, precision: str, tokens: int) -> PeerWorker:
    """Start llama.cpp with room for `tokens` tokens of prompts and texts. Raises SideError if it is not available."""
    file = find_model(model)
    if file.suffix != ".gguf":
        raise SideError(f"llama.cpp cannot read {model}: pass a .gguf file as --model")
    load: dict[str, Any] = {"model": str(file), "precision": precision, "folder": str(cache_folder() / "peers")}
    return _start(stack, python, "llama", load | {"threads": threads(), "cells": _CELLS + tokens}, {})


def _vllm(options: PeersOptions, stack: ExitStack, name: str) -> Peer:
    worker = vllm_process(options.model, options.vllm, stack, options.prompt_tokens + options.new_tokens)
    return Peer(name, worker.run, worker.about)


def vllm_process(model: str, python: Path, stack: ExitStack, context: int) -> PeerWorker:
    """Start vLLM with a context of at least `context` tokens. Raises SideError if it is not available."""
    path = find_model(model)
    folder = path if path.is_dir() else cached_model(path, cache_folder() / "models").folder
    dtype = resolve_dtype("auto", resolve_device("auto")).name
    return _start(
        stack, python, "vllm", {"model": str(folder), "dtype": dtype, "context": max(_CONTEXT, context)}, _VLLM
    )


def _start(
    stack: ExitStack, python: Path, program: str, load: Mapping[str, Any], environment: Mapping[str, str]
) -> PeerWorker:
    if not python.exists():
        raise SideError(f"{python} does not exist: run `make peers`, or give an interpreter with --{program} PYTHON")
    environment = {"OMP_NUM_THREADS": str(threads()), **environment}
    worker = PeerWorker(python, _WORKERS / f"{program}_worker.py", load, environment=environment)
    stack.callback(worker.close)
    return worker
