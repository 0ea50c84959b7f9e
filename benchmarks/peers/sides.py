"""The sides of the benchmark `peers`. Sides that are not installed are left out, with a hint on how to install them.

llama.cpp and vLLM run with their fastest settings, which short trials find for each number of branches.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engines import SideError, about, generate, replay
from benchmarks.harness import Side
from benchmarks.options import BranchesOptions, PeersOptions
from benchmarks.peers.settings import BOUND, FILES, FLASH, Setting, Stage, fastest
from benchmarks.peers.worker import PeerWorker
from benchmarks.workloads import branches
from tot.decoders.cache import cache_folder, hash_file
from tot.decoders.decoder import LocalDecoder, load_decoder
from tot.decoders.errors import TotError
from tot.decoders.machine import describe, threads
from tot.decoders.models.loading import load_model, resolve_device, resolve_dtype
from tot.decoders.models.model_names import find_model

OURS, LLAMA = "tot", "llama.cpp"
_WORKERS = Path(__file__).parent
_SERIAL_MOST = 5
_CELLS, _CONTEXT = 16384, 2048
"""Tokens of llama.cpp's cache in addition to the prompts, and minimum context length of vLLM."""
_TRIAL_PROMPT, _TRIAL_NEW = tuple(range(1000, 1256)), 17
"""Prompt and number of new tokens of the trials that choose a setting."""


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
    for name, opened in _openers(asked, stack, say):
        try:
            new = opened(name)
        except TotError as error:
            if name == OURS:
                raise
            say(f"{name} is left out: {error}")
        else:
            sides += new if isinstance(new, list) else [new]
    for side in sides:
        say(f"{side.name}: {side.about}")
    return sides


def open_ours(model: str, stack: ExitStack, searches: bool, name: str, **options: Any) -> Peer:
    """Open `ar` on its own engine. Every run computes its prompts."""
    decoder = stack.enter_context(load_decoder("ar", find_model(model), prefix_cache=False, **options))
    return Peer(name, partial(replay, decoder), about(decoder.engine), searches=searches, decoder=decoder)


def _openers(
    options: PeersOptions, stack: ExitStack, say: Callable[[str], None]
) -> Iterator[tuple[str, Callable[[str], Peer | list[Peer]]]]:
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
        llama = partial(llama_process, model, options.llama, tokens=2 * (options.prompt_tokens + options.new_tokens))
        yield LLAMA, partial(_fastest_sides, options, stack, say, llama, (FILES, FLASH))
    if "vllm" in kinds:
        vllm = partial(vllm_process, model, options.vllm, context=options.prompt_tokens + options.new_tokens)
        yield "vLLM", partial(_fastest_sides, options, stack, say, vllm, (BOUND,))


def _fastest_sides(
    options: PeersOptions,
    stack: ExitStack,
    say: Callable[[str], None],
    start: Callable[[ExitStack, Setting], PeerWorker],
    stages: Sequence[Stage],
    name: str,
) -> list[Peer]:
    """Open a peer with its fastest setting for each number of branches. Raises SideError if it is not available."""

    def measure(setting: Setting) -> dict[int, float]:
        with ExitStack() as trial:
            worker = start(trial, setting)
            worker.run(branches(_TRIAL_PROMPT, 1, 1))
            return {count: _predicted(options, worker, count) for count in options.branches}

    say(f"{name}: predicted seconds by branches, from trials of {len(_TRIAL_PROMPT)} + {_TRIAL_NEW} tokens …")
    workers = [(setting, start(stack, setting)) for setting in fastest(stages, measure, say)]
    quantization = re.search(r"q\d_\w+", find_model(options.model).stem, re.IGNORECASE)  # Q4_1, say
    own = quantization[0].upper() if quantization else "its own file"
    sides = []
    for setting, worker in workers:
        parts = [name, own if name == LLAMA and setting.file == "own" else "", setting.label]
        sides.append(Peer(", ".join(filter(None, parts)), worker.run, worker.about))
    return sides


def _predicted(options: PeersOptions, worker: PeerWorker, count: int) -> float:
    """Run a trial with `count` branches, and return the seconds that a run of the options' length would take."""
    measured = worker.run(branches(_TRIAL_PROMPT, count, _TRIAL_NEW))
    prefill = measured["prefill"]
    decoding = (measured["seconds"] - prefill) * (options.new_tokens - 1) / (_TRIAL_NEW - 1)
    return float(prefill * options.prompt_tokens / len(_TRIAL_PROMPT) + decoding)


def open_llama(options: BranchesOptions, stack: ExitStack, name: str) -> Peer:
    """Open llama.cpp with the model's own file. Raises SideError if it is not available."""
    tokens = 2 * (options.prompt_tokens + options.new_tokens)
    worker = llama_process(options.model, options.llama, stack, Setting(), tokens=tokens)
    return Peer(name, worker.run, worker.about)


def llama_process(model: str, python: Path, stack: ExitStack, setting: Setting, *, tokens: int) -> PeerWorker:
    """Start llama.cpp with room for `tokens` tokens of prompts and texts. Raises SideError if it is not available."""
    file = find_model(model)
    if file.suffix != ".gguf":
        raise SideError(f"llama.cpp cannot read {model}: pass a .gguf file as --model")
    load: dict[str, Any] = {"model": str(file), "precision": setting.file, "folder": str(cache_folder() / "peers")}
    load |= {"flash": setting.flash, "lookup": setting.lookup, "threads": threads(), "cells": _CELLS + tokens}
    return _start(stack, python, "llama", load, {})


def vllm_process(model: str, python: Path, stack: ExitStack, setting: Setting, *, context: int) -> PeerWorker:
    """Start vLLM with a context of at least `context` tokens. Raises SideError if it is not available."""
    path = find_model(model)
    folder = path if path.is_dir() else _as_folder(path)
    dtype = resolve_dtype("auto", resolve_device("auto")).name
    load = {"model": str(folder), "dtype": dtype, "context": max(_CONTEXT, context), "lookup": setting.lookup}
    processors = sorted(os.sched_getaffinity(0))[: threads()] if setting.bound else []
    bind = ",".join(map(str, processors)) or "nobind"
    environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": bind, "VLLM_LOGGING_LEVEL": "ERROR"}
    return _start(stack, python, "vllm", load, environment)


def _as_folder(path: Path) -> Path:
    """Write the model of a .gguf file once as a folder in transformers format."""
    folder = cache_folder() / "peers" / f"{path.stem}-{hash_file(path)[:16]}"
    if not folder.exists():
        loaded, unfinished = load_model(path, device="cpu"), folder.with_suffix(".tmp")
        loaded.model.save_pretrained(unfinished)
        loaded.tokenizer.save_pretrained(unfinished)
        unfinished.rename(folder)
    return folder


def _start(
    stack: ExitStack, python: Path, program: str, load: Mapping[str, Any], environment: Mapping[str, str]
) -> PeerWorker:
    if not python.exists():
        raise SideError(f"{python} does not exist: run `make peers`, or give an interpreter with --{program} PYTHON")
    environment = {"OMP_NUM_THREADS": str(threads()), **environment}
    worker = PeerWorker(python, _WORKERS / f"{program}_worker.py", load, environment=environment)
    stack.callback(worker.close)
    return worker
