"""llama.cpp and vLLM, each in a process with its own Python interpreter, with their fastest settings.

A process reads one JSON command per line and replies to each with one JSON object. Other lines are library output and
are ignored. A process that dies, hangs or replies with an error raises SideError with the reason.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any

import psutil
from pydantic import Field

from benchmarks.branches import Branches
from benchmarks.harness import Measured, SideError
from tot.decoders.cache import cache_folder, hash_file
from tot.decoders.machine import threads
from tot.decoders.models.loading import load_model, resolve_device, resolve_dtype
from tot.decoders.models.model_names import find_model

LlamaPython = Annotated[Path, Field(description="Python interpreter with llama-cpp-python (make peers installs it).")]
VLLMPython = Annotated[Path, Field(description="Python interpreter with vLLM (make peers installs it).")]
LLAMA_PYTHON, VLLM_PYTHON = Path(".venv-llama/bin/python"), Path(".venv-vllm/bin/python")
CELLS, _CONTEXT = 16384, 2048
"""Tokens of llama.cpp's cache in addition to the prompts and new tokens, and minimum context length of vLLM."""
_LINES = 3
"""Lines of a failed worker's log to report."""


class PeerProcess:
    """A process with a loaded model."""

    def __init__(
        self, python: Path, worker: str, load: Mapping[str, Any], environment: Any = None, patience: float = 600.0
    ) -> None:
        """Start a module of `workers` and load its model; each reply may take `patience` seconds. Raises SideError."""
        self._patience = patience
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
        try:
            self._process = subprocess.Popen(
                [str(python.absolute()), str(Path(__file__).parent / "workers" / "serve.py"), worker],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # Ctrl-C does not reach it, and its children end with it
            )
        except OSError as error:
            self._log.close()
            raise SideError(f"{python} can't be started ({error.strerror}): give another interpreter") from None
        try:
            self.about = str(self.ask(load).get("about", ""))
        except BaseException:
            self.close()
            raise

    def run(self, work: Branches) -> Measured:
        """Decode branches with an empty cache, and add the memory of the process. Raises SideError."""
        reply = self.complete(work.prompt, work.count, max_tokens=work.new, ends=[], temperature=1.0)
        process = psutil.Process(self._process.pid)
        resident = sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))
        return {**work.measured(reply["seconds"], reply["prefill"], reply["samples"]), "resident": resident}

    def complete(self, prompt: Sequence[int], n: int, **options: Any) -> dict[str, Any]:
        """Sample n texts of a prompt with an empty cache. Raises SideError.

        Return the "samples" (token ids), the "seconds", and those until every text had its first token ("prefill").
        """
        reply = self.ask({"prompt": list(prompt), "n": n, **options})
        if len(reply["samples"]) != n:
            raise SideError(f"it sampled {len(reply['samples'])} texts instead of {n}")
        return reply

    def ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to one command. A process that does not reply in time is killed. Raises SideError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        replies = filter(None, map(_parsed, self._process.stdout))
        with ThreadPoolExecutor(1) as reader:
            try:
                self._process.stdin.write(json.dumps(command).encode() + b"\n")
                self._process.stdin.flush()
                reply = reader.submit(next, replies, None).result(self._patience)
            except TimeoutError:
                self._kill()  # which ends the reader
                raise SideError(f"no reply within {self._patience:.0f} s") from None
            except OSError:
                reply = None
        if reply is None:
            raise SideError(self._last_lines())
        if "error" in reply:
            raise SideError(str(reply["error"]))
        return dict(reply)

    def _last_lines(self) -> str:
        status = self._process.wait()
        self._log.seek(0)
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return " | ".join([f"it ended with status {status}", *lines[-_LINES:]])

    def close(self) -> None:
        self._kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # unsent commands
                pipe.close()
        self._log.close()

    def _kill(self) -> None:
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        reply = json.loads(line)
    except ValueError:
        return None
    return reply if isinstance(reply, dict) else None


Setting = tuple[str, ...]
"""Names of changes of the default setting, which is the model's own file with flash attention and without drafts."""
EXACT = ("Q8_0", "F16", "BF16")
"""Precisions that keep the weights of a 4-bit file."""
FILES = (*EXACT, "Q4_0", "IQ4_NL")
FLASH, BOUND, LOOKUP = ("no flash attention",), ("bound threads",), ("2 lookup drafts", "5 lookup drafts")
SCHEMAS = "JSON schemas"
_CHANGES: dict[str, dict[str, Any]] = {
    FLASH[0]: {"flash": False},
    SCHEMAS: {"schemas": True},
    LOOKUP[0]: {"lookup": 2},
    LOOKUP[1]: {"lookup": 5},
}
"""Options of a worker. Other names are precisions of llama.cpp."""


def fastest(
    stages: Sequence[Sequence[str]], measure: Callable[[Setting], Mapping[Any, float]], say: Callable[[str], None]
) -> list[Setting]:
    """Return the fastest settings, one for each column at most. Every stage changes the fastest settings so far.

    `measure` returns the seconds of a setting at each column. A setting for which it raises SideError is left out.
    Raises SideError if the default setting does not work.
    """
    tried: dict[Setting, Mapping[Any, float]] = {(): measure(())}
    say(f"default setting: {_shown(tried[()])}")
    best: list[Setting] = [()]
    for stage in stages:
        for setting in [(*one, change) for one in best for change in stage]:
            try:
                tried[setting] = measure(setting)
            except SideError as error:
                say(f"{', '.join(setting)}: left out, {error}")
            else:
                say(f"{', '.join(setting)}: {_shown(tried[setting])}")
        best = list(dict.fromkeys(min(tried, key=lambda one: tried[one][column]) for column in tried[()]))
    return best


def _shown(seconds: Mapping[Any, float]) -> str:
    return ", ".join(f"{column}: {value:.2f} s".removeprefix(": ") for column, value in seconds.items())


def llama_process(model: str, python: Path, stack: ExitStack, setting: Setting, *, cells: int) -> PeerProcess:
    """Start llama.cpp with a cache of `cells` tokens. Raises SideError if it is not available."""
    file = find_model(model)
    if file.suffix != ".gguf":
        raise SideError(f"llama.cpp cannot read {model}: pass a .gguf file as --model")
    load: dict[str, Any] = {"model": str(file), "folder": str(cache_folder() / "peers")}
    load |= {"threads": threads(), "cells": CELLS + cells}
    for name in setting:
        load |= _CHANGES.get(name, {"precision": name})
    return _start(stack, python, "llama", load, {})


def vllm_process(model: str, python: Path, stack: ExitStack, setting: Setting, *, context: int) -> PeerProcess:
    """Start vLLM with a context of at least `context` tokens. Raises SideError if it is not available."""
    path = find_model(model)
    folder = path if path.is_dir() else _as_folder(path)
    dtype = resolve_dtype("auto", resolve_device("auto")).name
    load = {"model": str(folder), "dtype": dtype, "context": max(_CONTEXT, context)}
    for name in setting:
        load |= _CHANGES.get(name, {})
    processors = sorted(os.sched_getaffinity(0))[: threads()] if {*setting} & {*BOUND} else []
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


def _start(stack: ExitStack, python: Path, program: str, load: Mapping[str, Any], environment: Any) -> PeerProcess:
    if not python.exists():
        raise SideError(f"{python} does not exist: run `make peers`, or give an interpreter with --{program} PYTHON")
    process = PeerProcess(python, f"{program}_worker", load, {"OMP_NUM_THREADS": str(threads()), **environment})
    stack.callback(process.close)
    return process
