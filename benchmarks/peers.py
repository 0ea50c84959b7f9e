"""The benchmark `peers`: compare our decoder with llama.cpp and vLLM on branches of a prompt and on whole searches.

All sides use the same weights, prompts and numbers of new tokens. Rates include prefill, then prefill and decoding
follow apart. Peers that are not installed are left out. A failing side is reported, and the others continue. No side
drafts tokens.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import psutil
from pydantic import AfterValidator, Field, PositiveInt
from rich.console import Console

from benchmarks import peer_process as peer
from benchmarks.engines import about
from benchmarks.harness import NOT_AT_ALL, RATE, SECONDS, Bench, BenchOptions, Cells, Measured, Metric, by_column, plain
from benchmarks.waves import Waves, branches, mixed_ids, questions, record, replay, rotated, rows
from tot.decoders.decoder import LocalDecoder, load_decoder
from tot.decoders.errors import TotError
from tot.decoders.machine import describe
from tot.decoders.models.model_names import find_model
from tot.registry import load_task

OURS, LLAMA = "tot", "llama.cpp"
THOUGHTS, BREADTH, DEPTH = (3, 5), 3, 4
BUSY = 20.0
"""CPU usage in percent of all processors above which the machine counts as busy."""
_TRIAL_PROMPT, _TRIAL_NEW = tuple(range(1000, 1256)), 17
"""Prompt and number of new tokens of the trials that choose a setting."""
_WARM_UP_TOKENS, _WARM_UP_WAVES, _WARM_UP_PLACE = 8, 3, 500
"""New tokens and waves of warm-ups, and the rotation of their prompt; rounds use smaller ones."""
_PREFILL = Metric("prefill tokens/s", lambda cell: cell.get("prefilled"))
_DECODING = Metric("decoding tokens/s", lambda cell: cell.get("decoded"))
_MEMORY = Metric("GiB resident", lambda cell: cell["resident"] / 2**30 if "resident" in cell else None, plain(".2f"))
Counts = Annotated[tuple[PositiveInt, ...], AfterValidator(lambda counts: tuple(sorted(set(counts))))]
"""In ascending order, without duplicates."""
Run = Callable[[Waves], Measured]


class BranchesOptions(BenchOptions):
    """Options of benchmarks that decode branches of a prompt, and llama.cpp's side of them."""

    branches: Counts = Field((1, 3, 5, 15, 32, 64), description="Comma-separated numbers of samples of one prompt.")
    prompt_tokens: int = Field(1000, ge=16, description="Tokens of the prompt that branches continue.")
    new_tokens: int = Field(64, ge=1, description="New tokens per branch.")
    rounds: int = Field(3, ge=1, description="Rounds. The sides take turns in each; medians are compared.")
    llama: peer.LlamaPython = peer.LLAMA_PYTHON


class Options(BranchesOptions):
    """Compare branches and whole searches with llama.cpp and vLLM."""

    data: Path | None = Field(None, description="GSM8K problems, as for tot eval; by default the task's own.")
    parts: tuple[Literal["decode", "tree"], ...] = Field(
        ("decode", "tree"), description="Comma-separated: decode, tree."
    )
    sides: tuple[Literal["none", "llama", "vllm"], ...] = Field(
        ("none", "llama", "vllm"),
        description="Comma-separated sides to compare with: none (as --quantize of tot eval), llama, vllm.",
    )
    problems: int = Field(8, ge=1, description="Problems to search, one per round.")
    patience: float = Field(
        60.0,
        ge=0,
        description="Seconds. A cell predicted to take longer runs once; above three times this limit it is skipped.",
    )
    vllm: peer.VLLMPython = peer.VLLM_PYTHON


def run(asked: Options, console: Console) -> None:
    """Run the benchmark and print the tables.

    Raises OptionError for a file without questions and ModelError if our own side cannot load.
    """
    task, say = load_task("gsm8k"), partial(console.print, style="dim")
    problems = questions(task, asked.data, asked.problems)
    with ExitStack() as stack:
        ours = open_ours(asked.model, stack, say)
        alone = "none" not in asked.sides  # in this process
        run_ours = partial(_with_memory, partial(replay, ours)) if alone else partial(replay, ours)
        sides: dict[str, Run] = {OURS: run_ours, **open_peers(asked, stack, say)}
        bench = Bench(asked, console, describe(ours.engine.loaded.device, ours.engine.loaded.dtype))
        ids = mixed_ids(ours.tokenizer, asked.prompt_tokens)
        metrics = [RATE, _PREFILL, _DECODING, _MEMORY]
        decoded = None
        if "decode" in asked.parts:
            decoded = decode(asked, bench, sides, ids, metrics, _pairs, asked.patience)
        if "tree" in asked.parts:
            recorded = partial(record, ours, task, breadth=BREADTH, depth=DEPTH)
            tree(asked, bench, sides, recorded, problems, decoded)
        bench.show(
            f"Medians (and ranges) of rounds. Cells predicted to take more than {asked.patience:g} s ran once; cells "
            f"predicted to take more than {NOT_AT_ALL * asked.patience:g} s were skipped."
        )


def open_ours(model: str, stack: ExitStack, say: Callable[[str], None], **options: Any) -> LocalDecoder:
    """Open `ar` on its own engine. Every run computes its prompts."""
    decoder = stack.enter_context(load_decoder("ar", find_model(model), prefix_cache=False, **options))
    say(f"{OURS}: {about(decoder.engine)}")
    return decoder


def open_llama(asked: BranchesOptions, stack: ExitStack, setting: peer.Setting = ()) -> peer.PeerProcess:
    """Start llama.cpp. Raises SideError if it is not available."""
    cells = peer.CELLS + 2 * (asked.prompt_tokens + asked.new_tokens)
    return peer.llama_process(asked.model, asked.llama, stack, setting, cells=cells)


def open_peers(asked: Options, stack: ExitStack, say: Callable[[str], None]) -> dict[str, Run]:
    """Open every available peer with its fastest settings; the stack closes them."""

    def vllm(own: ExitStack, setting: peer.Setting) -> peer.PeerProcess:
        context = asked.prompt_tokens + asked.new_tokens
        return peer.vllm_process(asked.model, asked.vllm, own, setting, context=context)

    quantization = re.search(r"q\d_\w+", find_model(asked.model).stem, re.IGNORECASE)  # Q4_1, say
    own_file = quantization[0].upper() if quantization else "its own file"
    sides: dict[str, Run] = {}
    if "none" in asked.sides:
        unquantized = open_ours(asked.model, stack, say, quantize="none")
        sides[f"{OURS}, quantize=none"] = partial(replay, unquantized)
    for kind, name, start, stages in (
        ("llama", LLAMA, partial(open_llama, asked), (peer.FILES, peer.FLASH)),
        ("vllm", "vLLM", vllm, (peer.BOUND,)),
    ):
        if kind not in asked.sides:
            continue
        try:
            say(f"{name}: predicted seconds by branches, from trials of {len(_TRIAL_PROMPT)} + {_TRIAL_NEW} tokens …")
            for setting in peer.fastest(stages, partial(_trial, asked, start), say):
                process = start(stack, setting)
                own = [own_file] if name == LLAMA and not {*setting} & {*peer.FILES} else []
                sides[", ".join([name, *own, *setting])] = process.run
                say(f"{name}: {process.about}")
        except TotError as error:
            say(f"{name} is left out: {error}")
    return sides


def _trial(asked: Options, start: Callable[..., peer.PeerProcess], setting: peer.Setting) -> dict[int, float]:
    """Return the seconds that a run of the options' length would take, by branches."""
    with ExitStack() as stack:
        process, seconds = start(stack, setting), {}
        process.run(branches(_TRIAL_PROMPT, 1, 1))
        for count in asked.branches:
            measured = process.run(branches(_TRIAL_PROMPT, count, _TRIAL_NEW))
            step = (measured["seconds"] - measured["prefill"]) / (_TRIAL_NEW - 1)
            prefill = measured["prefill"] * asked.prompt_tokens / len(_TRIAL_PROMPT)
            seconds[count] = prefill + step * (asked.new_tokens - 1)
        return seconds


def settled(run: Callable[[Any], Measured]) -> Callable[[Any], Measured]:
    """Make a side wait until the machine is idle, at most 5 seconds.

    Other sides may stay busy after their reply; some servers poll for a second.
    """

    def settled_run(work: Any) -> Measured:
        end = time.monotonic() + 5
        while psutil.cpu_percent(interval=0.25) > BUSY and time.monotonic() < end:
            pass
        return run(work)

    return settled_run


def decode(
    asked: BranchesOptions,
    bench: Bench,
    sides: Mapping[str, Run],
    ids: Sequence[int],
    metrics: Sequence[Metric],
    pairs: Callable[[Cells], Any],
    patience: float = math.inf,
) -> Cells:
    """Decode branches of a prompt; every cell has a new one. Add the rates of prefill and decoding."""
    places = {count: i for i, count in enumerate(asked.branches)}

    def work(count: int, turn: int) -> Waves:
        return branches(rotated(ids, turn * len(places) + places[count] + 1), count, asked.new_tokens)

    def warm_up(count: int) -> Waves:
        return branches(rotated(ids, _WARM_UP_PLACE + places[count]), count, min(_WARM_UP_TOKENS, asked.new_tokens))

    def measured(side: Run, waves: Waves) -> Measured:
        cell = side(waves)
        cell["prefilled"] = len(ids) / cell["prefill"]
        if asked.new_tokens > 1:
            cell["decoded"] = (cell["tokens"] - len(waves[0][0].new)) / (cell["seconds"] - cell["prefill"])
        return cell

    title = f"{asked.model}: new tokens/s, {asked.new_tokens} each after {len(ids)} tokens, by branches"
    return bench.compare(
        title,
        {name: settled(partial(measured, side)) for name, side in sides.items()},
        work,
        lambda cells: by_column(cells, metrics, title, pairs(cells)),
        rounds=asked.rounds,
        columns=asked.branches,
        warm_up=warm_up,
        size=rows,
        patience=patience,
    )


def _with_memory(side: Run, waves: Waves) -> Measured:
    """Run our side, and add the memory of this process."""
    cell = side(waves)
    return cell | {"resident": psutil.Process().memory_info().rss}


def _pairs(cells: Cells) -> list[tuple[str, str]]:
    """Pair our side with all others, and our other sides with our side."""
    return [(name, OURS) if name.startswith(OURS) else (OURS, name) for name in cells.sides if name != OURS]


def tree(
    asked: Options,
    bench: Bench,
    sides: Mapping[str, Run],
    recorded: Callable[[str, int], Waves],
    problems: Sequence[str],
    decoded: Cells | None,
) -> None:
    """Search one problem per round, and replay its requests on every side.

    The other sides sample one token per evaluation; ours scores all choices. llama.cpp runs with the setting that
    decoded fastest at the largest number of branches.
    """
    llamas = [name for name in sides if name.startswith(LLAMA)]
    rates = {name: decoded.values(RATE, name, decoded.columns[-1]) if decoded else [] for name in llamas}
    best = max(llamas, key=lambda name: median(rates[name] or [0.0]), default="")
    names = [name for name in sides if name in (OURS, best) or not name.startswith((OURS, LLAMA))]
    warm_up = recorded(problems[-1], min(THOUGHTS))[:_WARM_UP_WAVES]
    title = f"seconds a GSM8K search, T = {DEPTH}, b = {BREADTH}, {len(problems)} problems"
    bench.compare(
        title,
        {name: settled(sides[name]) for name in names},
        lambda thoughts, turn: recorded(problems[turn], thoughts),
        lambda cells: by_column(cells, [SECONDS], title, _pairs(cells), head="n = "),
        columns=THOUGHTS,
        rounds=len(problems),
        warm_up=lambda _: warm_up,
        size=rows,
        patience=asked.patience,
    )
