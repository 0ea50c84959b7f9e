"""`tot bench packed`: what packing is worth, on the same weights.

Speed against transformers' generate, batched and serial; how much of a prompt is computed again; what attention over
unrelated prompts costs together and apart; how much memory n samples take; how long a search takes to start.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AttentionInterface

from tot.bench.engines import generate, replay
from tot.bench.harness import RATE, Bench, Side, timed
from tot.bench.workloads import branches, few_shot_ids, rotated
from tot.decoders.decoder import load_decoder
from tot.decoders.engine.runner import Chunk, Runner
from tot.decoders.kernels.attention import ATTENTION, packed_attention
from tot.decoders.local import LocalDecoder
from tot.decoders.models.loading import load_model
from tot.decoders.request import Request, Sampling
from tot.evaluation.estimate import spread
from tot.machine import describe

PROMPT, SAMPLES, NEW = 1000, 15, 64
UNRELATED, LENGTH = 16, 300

Row = tuple[str, str, float]
"""What, as it was measured, and the result."""


def run(model: str, rounds: int, out: Path | None, console: Console) -> None:
    """Measure, print the tables and write the numbers to `out`."""
    with load_decoder("ar", model) as decoder:
        loaded = decoder.engine.loaded
        ids = few_shot_ids(decoder.tokenizer, PROMPT)
        machine = describe(loaded.device, loaded.dtype)
        with Bench(console, out, machine, {"model": model, "rounds": rounds}) as bench:
            plain = load_model(model).model
            sides = [
                Side("packed", partial(replay, decoder)),
                Side("generate, batched", partial(generate, plain)),
                Side("generate, serial", partial(generate, plain, serial=True)),
            ]
            bench.compare(
                f"{model}: {SAMPLES} samples of {NEW} new tokens at T=1, one prompt of {len(ids)} tokens",
                sides,
                lambda _, turn: branches(rotated(ids, turn + 1), SAMPLES, NEW),  # prompts that no one has seen
                rounds=rounds,
                warm_up=lambda _: branches(ids, SAMPLES, NEW),
                metrics=[RATE],
                against=[side.name for side in sides[1:]],
            )
            bench.say("prompts again, attention, memory, start …")
            parts: dict[str, Callable[[], Iterator[Row]]] = {
                "reuse": lambda: reuse(decoder, ids),
                "memory": lambda: memory(decoder, ids),
                "attention": lambda: attention(model, ids),
                "start": lambda: start(model),
            }
            table = Table("what", "measured", "result")
            for name, part in parts.items():
                for what, measured, value in bench.once(name, lambda part=part: [list(row) for row in part()]):  # type: ignore[misc]
                    table.add_row(what, measured, f"{value:.4g}")
            bench.show(table)


def reuse(decoder: LocalDecoder, ids: list[int]) -> Iterator[Row]:
    """What is computed of a prompt that was seen before, and of the prompts of a search."""

    def computed(prompt: list[int]) -> int:
        (done,) = decoder.generate([Request(prompt=tuple(prompt), sampling=Sampling(max_tokens=1))])
        return done.usage.prompt_tokens - done.usage.reused_prompt_tokens

    computed(ids)
    again = computed(ids)
    yield "prompt tokens computed again, same prompt", f"{again} of {len(ids)}", again

    # A question in 12 calls: a shared head, 3 branches that grow, each asked 4 times over; the last call repeats one.
    head = [ids[-1], *ids[:400]]
    prompts = [
        head + ids[400 + 50 * branch : 430 + 50 * branch + 15 * level] for branch in range(3) for level in range(4)
    ]
    prompts[-1] = prompts[0]
    spent = sum(map(computed, prompts))
    nodes = len({tuple(p[:i]) for p in prompts for i in range(1, len(p) + 1)})
    seen: set[tuple[int, ...]] = set()
    repeats = 0
    for prompt in map(tuple, prompts):
        repeats += prompt in seen
        seen |= {prompt[:i] for i in range(1, len(prompt) + 1)}
    yield (
        "prompt tokens computed in 12 calls / trie of the prompts + repeats",
        f"{spent} / ({nodes} + {repeats}), of {sum(map(len, prompts))} asked",
        spent / (nodes + repeats),
    )


def memory(decoder: LocalDecoder, ids: list[int]) -> Iterator[Row]:
    """Keys and values at the peak of n samples, against n prompts' worth."""
    cache, slot = decoder.engine.cache, decoder.engine.runner.slot_bytes
    peaks = []
    for count in (1, SAMPLES):
        cache.peak_live = 0
        sampling = Sampling(max_tokens=NEW, temperature=1.0, n=count, ignore_eos=True)
        decoder.generate([Request(prompt=tuple(ids), sampling=sampling)])
        peaks.append(cache.peak_live * slot)
    copies = SAMPLES * (len(ids) + NEW) * slot
    new = (peaks[1] - peaks[0]) / ((SAMPLES - 1) * NEW * slot)
    yield (
        f"bytes of keys and values, {SAMPLES} samples against {SAMPLES} prompts of their own",
        f"{peaks[1]:,} (1 sample: {peaks[0]:,}) / {copies:,}",
        peaks[1] / copies,
    )
    yield f"growth from 1 to {SAMPLES} samples / bytes of their new tokens", f"{peaks[1] - peaks[0]:,} bytes", new


def attention(model: str, ids: list[int]) -> Iterator[Row]:
    """Seconds in the attention function: unrelated prompts in one forward against each in its own."""
    runner = Runner(load_model(model).model, kv_budget=2 * UNRELATED * (LENGTH + 8))
    vocabulary = sorted(set(ids))
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(len(vocabulary), (UNRELATED, LENGTH), generator=generator).tolist()
    try:
        with torch.inference_mode(), _timed_attention() as clock:
            for what in ("prompts", "next tokens"):
                ratios = []
                for _ in range(5):
                    alone = sum(_forward(runner, [prompt], vocabulary, what, clock) for prompt in prompts)
                    together = _forward(runner, prompts, vocabulary, what, clock)
                    ratios.append(together / alone)
                yield (
                    f"attention, {UNRELATED} unrelated {what} at {LENGTH} tokens: one forward / each alone",
                    spread(ratios, ".2f"),
                    statistics.median(ratios),
                )
    finally:
        runner.close()


def _forward(runner: Runner, prompts: list[list[int]], vocabulary: list[int], what: str, clock: list[float]) -> float:
    """Seconds of attention in computing the prompts from nothing, or one token after them."""
    branches = [runner.cache.open([vocabulary[i] for i in prompt]) for prompt in prompts]
    clock.clear()
    runner.forward([Chunk(branch, 0, LENGTH) for branch in branches])
    if what == "next tokens":
        for branch in branches:
            runner.cache.extend(branch, vocabulary[:1])
        clock.clear()
        runner.forward([Chunk(branch, LENGTH, LENGTH + 1, [0]) for branch in branches])
    seconds = sum(clock)
    for branch in branches:
        runner.cache.rollback(branch, 0)
    return seconds


@contextmanager
def _timed_attention() -> Iterator[list[float]]:
    clock: list[float] = []

    def timed_attention(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        result = packed_attention(*arguments, **options)
        clock.append(time.perf_counter() - began)
        return result

    AttentionInterface.register(ATTENTION, timed_attention)
    try:
        yield clock
    finally:
        AttentionInterface.register(ATTENTION, packed_attention)


def start(model: str) -> Iterator[Row]:
    """A new process, from its start to its first thoughts: they are valued, and the budget ends the search."""
    options = ["--model", model, "--max-tokens", "16", "--budget-nodes", "1", "--json"]
    command = [sys.executable, "-m", "tot.cli.app", "solve", "gsm8k", *options]
    taken = [timed(lambda: subprocess.run(command, check=True, capture_output=True))[0] for _ in range(3)]
    what = "seconds from start of `tot solve` to the first thoughts and their values"
    yield what, spread(taken), statistics.median(taken)
