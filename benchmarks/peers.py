"""The benchmark `peers`: compare our decoder with llama.cpp and vLLM on branches of a prompt.

All sides use the same weights, prompts and numbers of new tokens. Rates include prefill, then prefill and decoding
follow apart. Peers that are not installed are left out. A failing side is reported, and the others continue. No side
drafts tokens. With `--busy`, each side also runs beside a program that keeps one core busy.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Annotated, Any, Literal

import psutil
from pydantic import AfterValidator, Field, PositiveInt
from rich.console import Console

from benchmarks import peer_process as peer
from benchmarks.branches import Branches, decoded, mixed_ids, rotated
from benchmarks.engines import about
from benchmarks.harness import RATE, Bench, BenchOptions, Measured, Metric, by_column, plain
from tot.decoders.decoder import LocalDecoder, load_decoder
from tot.decoders.errors import TotError
from tot.decoders.machine import describe
from tot.decoders.models.model_names import find_model

OURS, LLAMA = "tot", "llama.cpp"
BUSY = 20.0
"""CPU usage in percent of all processors above which the machine counts as busy."""
_TRIAL_PROMPT, _TRIAL_NEW = tuple(range(1000, 1256)), 17
"""Prompt and number of new tokens of the trials that choose a setting."""
_METRICS = [
    RATE,
    Metric("prefill tokens/s", lambda cell: cell["prefilled"]),
    Metric("decoding tokens/s", lambda cell: cell.get("decoded")),
    Metric("GiB resident", lambda cell: cell["resident"] / 2**30 if "resident" in cell else None, plain(".2f")),
]
Counts = Annotated[tuple[PositiveInt, ...], AfterValidator(lambda counts: tuple(sorted(set(counts))))]
"""In ascending order, without duplicates."""
Run = Callable[[Branches], Measured]


BESIDE = "beside a busy core"
_LOOP = """
import os, sys
print("busy", flush=True)
while os.getppid() == int(sys.argv[1]):
    for _ in range(10**6):
        pass
"""
"""A program that keeps a core busy. It ends with this process, however that ends."""


class Options(BenchOptions):
    """Compare branches of a prompt with llama.cpp and vLLM, also beside a program that keeps one core busy."""

    branches: Counts = Field((1, 3, 5, 15, 32, 64), description="Comma-separated numbers of samples of one prompt.")
    prompt_tokens: int = Field(1000, ge=16, description="Tokens of the prompt that branches continue.")
    new_tokens: int = Field(64, ge=1, description="New tokens per branch.")
    rounds: int = Field(3, ge=1, description="Rounds. The sides take turns in each; medians are compared.")
    sides: tuple[Literal["none", "llama", "vllm"], ...] = Field(
        ("none", "llama", "vllm"),
        description="Comma-separated sides to compare with: none (as --quantize of tot eval), llama, vllm.",
    )
    busy: bool = Field(False, description="Also run each side beside a program that keeps one core busy.")
    llama: peer.LlamaPython = peer.LLAMA_PYTHON
    vllm: peer.VLLMPython = peer.VLLM_PYTHON


def run(asked: Options, console: Console) -> None:
    """Run the benchmark and print the table. Raises ModelError if our own side cannot load."""
    say = partial(console.print, style="dim")
    with ExitStack() as stack:
        ours = open_ours(asked.model, stack, say)
        alone = "none" not in asked.sides  # in this process, whose memory is then ours
        sides: dict[str, Run] = {OURS: partial(_with_memory if alone else decoded, ours)}
        sides |= open_peers(asked, stack, say)
        pairs = [(name, OURS) if name.startswith(OURS) else (OURS, name) for name in sides if name != OURS]
        if asked.busy:
            pairs += [(f"{name}, {BESIDE}", name) for name in sides]
            sides |= {f"{name}, {BESIDE}": partial(_disturbed, side) for name, side in [*sides.items()]}
        bench = Bench(asked, console, describe(ours.engine.loaded.device, ours.engine.loaded.dtype))
        ids, places = mixed_ids(ours.tokenizer, asked.prompt_tokens), {n: i for i, n in enumerate(asked.branches)}

        def work(count: int, turn: int) -> Branches:
            """Return branches of a new prompt."""
            return Branches(rotated(ids, turn * len(places) + places[count] + 1), count, asked.new_tokens)

        title = f"{asked.model}: new tokens/s, {asked.new_tokens} each after {len(ids)} tokens, by branches"
        bench.compare(
            title,
            {name: partial(settled, partial(_with_rates, side)) for name, side in sides.items()},
            work,
            lambda cells: by_column(cells, _METRICS, title, pairs),
            rounds=asked.rounds,
            columns=asked.branches,
            warm_up=True,
        )


def open_ours(model: str, stack: ExitStack, say: Callable[[str], None], **options: Any) -> LocalDecoder:
    """Open `ar` on its own engine. Every run computes its prompts."""
    decoder = stack.enter_context(load_decoder("ar", find_model(model), prefix_cache=False, **options))
    say(f"{OURS}: {about(decoder.engine)}")
    return decoder


def open_peers(asked: Options, stack: ExitStack, say: Callable[[str], None]) -> dict[str, Run]:
    """Open every available peer with its fastest settings; the stack closes them."""

    context = asked.prompt_tokens + asked.new_tokens
    llama = partial(peer.llama_process, asked.model, asked.llama, cells=2 * context)
    vllm = partial(peer.vllm_process, asked.model, asked.vllm, context=context)
    quantization = re.search(r"q\d_\w+", find_model(asked.model).stem, re.IGNORECASE)  # Q4_1, say
    own_file = quantization[0].upper() if quantization else "its own file"
    sides: dict[str, Run] = {}
    if "none" in asked.sides:
        unquantized = open_ours(asked.model, stack, say, quantize="none")
        sides[f"{OURS}, quantize=none"] = partial(decoded, unquantized)
    for kind, name, start, stages in (
        ("llama", LLAMA, llama, (peer.FILES, peer.FLASH)),
        ("vllm", "vLLM", vllm, (peer.BOUND,)),
    ):
        if kind not in asked.sides:
            continue
        try:
            say(f"{name}: predicted seconds by branches, from trials of {len(_TRIAL_PROMPT)} + {_TRIAL_NEW} tokens …")
            for setting in peer.fastest(stages, partial(_trial, asked, start), say):
                process = start(stack=stack, setting=setting)
                own = [own_file] if name == LLAMA and not {*setting} & {*peer.FILES} else []
                sides[", ".join([name, *own, *setting])] = process.run
                say(f"{name}: {process.about}")
        except TotError as error:
            say(f"{name} is left out: {error}")
    return sides


def _trial(asked: Options, start: Callable[..., peer.PeerProcess], setting: peer.Setting) -> dict[int, float]:
    """Return the seconds that a run of the options' length would take, by branches."""
    with ExitStack() as stack:
        process, seconds = start(stack=stack, setting=setting), {}
        process.run(Branches(_TRIAL_PROMPT, 1, 1))
        for count in asked.branches:
            measured = process.run(Branches(_TRIAL_PROMPT, count, _TRIAL_NEW))
            step = (measured["seconds"] - measured["prefill"]) / (_TRIAL_NEW - 1)
            prefill = measured["prefill"] * asked.prompt_tokens / len(_TRIAL_PROMPT)
            seconds[count] = prefill + step * (asked.new_tokens - 1)
        return seconds


def settled(run: Callable[[Any], Measured], work: Any) -> Measured:
    """Run a side once the machine is idle, after at most 5 seconds.

    Other sides may stay busy after their reply; some servers poll for a second.
    """
    end = time.monotonic() + 5
    while psutil.cpu_percent(interval=0.25) > BUSY and time.monotonic() < end:
        pass
    return run(work)


def _with_memory(ours: LocalDecoder, work: Branches) -> Measured:
    """Decode branches, and add the memory of this process."""
    return {**decoded(ours, work), "resident": psutil.Process().memory_info().rss}


def _with_rates(side: Run, work: Branches) -> Measured:
    """Decode branches, and add the rates of prefill and decoding."""
    cell = side(work)
    cell["prefilled"] = len(work.prompt) / cell["prefill"]
    if work.new > 1:
        cell["decoded"] = (cell["tokens"] - work.count) / (cell["seconds"] - cell["prefill"])
    return cell


@contextmanager
def busy_core() -> Iterator[None]:
    """Keep one core busy with another process."""
    with subprocess.Popen([sys.executable, "-c", _LOOP, str(os.getpid())], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


def _disturbed(side: Run, work: Branches) -> Measured:
    with busy_core():
        return side(work)
