"""`tot bench packed`: what packing is worth. Both sides in one run, taking turns, on the same weights.

Speed against transformers' generate, batched and serial; how much of a prompt is computed again; what attention over
unrelated prompts costs together and apart; how much memory n samples take; how long a search takes to start.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AttentionInterface

from tot.bench.machine import spread
from tot.decoders.decoder import load_decoder
from tot.decoders.engine.runner import Chunk, Runner
from tot.decoders.files import write_json
from tot.decoders.kernels.attention import ATTENTION, packed_attention
from tot.decoders.local import LocalDecoder
from tot.decoders.models.loading import load_model
from tot.decoders.request import Request, Sampling
from tot.machine import describe
from tot.registry import load_task

PROMPT, SAMPLES, NEW = 1000, 15, 64
UNRELATED, LENGTH = 16, 300


def run(model: str, rounds: int, out: Path | None, console: Console) -> None:
    """Measure, print a table and write the numbers to `out`."""
    numbers: dict[str, Any] = {}
    rows: list[tuple[str, str, str, str]] = []
    with load_decoder("ar", model) as decoder:
        loaded = decoder.engine.loaded
        numbers["machine"] = describe(loaded.device, loaded.dtype)
        ids = few_shot_ids(decoder.tokenizer)
        speeds = speed(decoder, model, ids, rounds, console)
        numbers["tokens_per_second"] = speeds
        packed = statistics.median(speeds["packed"])
        for side, goal in (("generate, batched", 8), ("generate, serial", 12)):
            ratio = packed / statistics.median(speeds[side])
            numbers[f"packed / {side}"] = ratio
            rows.append(
                (
                    f"new tokens/s, packed against {side}",
                    f"{spread(speeds['packed'])} / {spread(speeds[side])}",
                    f"{ratio:.1f}x",
                    f"at least {goal}x",
                )
            )
        console.print("prompts again, attention, memory, start …", style="dim")
        for name, measured, value, goal_text in (
            *reuse(decoder, ids),
            *memory(decoder, ids),
            *attention(model, ids),
            *start(model),
        ):
            numbers[name] = value
            rows.append((name, measured, f"{value:.4g}", goal_text))
    table = Table(
        title=f"{model}: {SAMPLES} samples of {NEW} new tokens at T=1, one prompt of {PROMPT} tokens, {rounds} rounds",
        caption=numbers["machine"],
    )
    for heading in ("what", "measured", "result", "goal"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if out is not None:
        write_json(out, numbers)


def few_shot_ids(tokenizer: Any) -> list[int]:
    """A GSM8K few-shot prompt of PROMPT tokens."""
    ids: list[int] = tokenizer(few_shot_text(30))["input_ids"][:PROMPT]
    return ids


def few_shot_text(examples: int) -> str:
    """The GSM8K task's own demonstrations, again and again where there are fewer."""
    demonstrations = load_task("gsm8k").data("demonstrations")
    return "\n\n".join(
        "\n".join(
            [f"Question: {entry['question']}"]
            + [f"{step['sub_question']} {step['sub_answer']}" for step in entry["steps"]]
            + [f"The answer is {entry['answer']}."]
        )
        for entry in itertools.islice(itertools.cycle(demonstrations), examples)
    )


def speed(decoder: LocalDecoder, model: str, ids: list[int], rounds: int, console: Console) -> dict[str, list[float]]:
    """New tokens a second, prefill counted on all sides. Each round has a prompt that no one has seen."""
    plain = load_model(model).model
    sampling = Sampling(max_tokens=NEW, temperature=1.0, n=SAMPLES, ignore_eos=True)
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "min_new_tokens": NEW, "max_new_tokens": NEW}

    def packed(prompt: list[int]) -> int:
        done = decoder.generate([Request(prompt=tuple(prompt), sampling=sampling)])
        return sum(completion.usage.new_tokens for completion in done)

    def generate(prompt: list[int], count: int) -> int:
        # In a thread of its own, as the engine's is: OpenMP keeps a team a thread, and two teams slow each other down.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(generate_here, prompt, count).result()

    def generate_here(prompt: list[int], count: int) -> int:
        tensor = torch.tensor([prompt], device=plain.device)
        result = plain.generate(tensor, attention_mask=torch.ones_like(tensor), num_return_sequences=count, **options)
        return int((result.shape[1] - len(prompt)) * result.shape[0])

    sides: dict[str, Callable[[list[int]], int]] = {
        "packed": packed,
        "generate, batched": lambda prompt: generate(prompt, SAMPLES),
        "generate, serial": lambda prompt: sum(generate(prompt, 1) for _ in range(SAMPLES)),
    }
    generate(ids, 1)  # warm-ups, of full size: the first use of a shape is slow on every side
    packed(ids)
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(rounds):
        fresh = ids[turn + 1 :] + ids[: turn + 1]
        for side, work in sides.items():
            began = time.perf_counter()
            tokens = work(fresh)
            rates[side].append(tokens / (time.perf_counter() - began))
            console.print(f"round {turn + 1}: {side}: {rates[side][-1]:.1f} tokens/s", style="dim")
    return rates


Row = tuple[str, str, float, str]


def reuse(decoder: LocalDecoder, ids: list[int]) -> Iterator[Row]:
    """What is computed of a prompt that was seen before, and of the prompts of a search."""
    request = Request(prompt=tuple(ids), sampling=Sampling(max_tokens=1))
    decoder.generate([request])
    (again,) = decoder.generate([request])
    computed = again.usage.prompt_tokens - again.usage.reused_prompt_tokens
    yield "prompt tokens computed again, same prompt", f"{computed} of {len(ids)}", computed, "at most 1"

    # A question in 12 calls: a shared head, 3 branches that grow, each asked 4 times over; the last call repeats one.
    head = [ids[-1], *ids[:400]]
    prompts = [
        head + ids[400 + 50 * branch : 430 + 50 * branch + 15 * level] for branch in range(3) for level in range(4)
    ]
    prompts[-1] = prompts[0]
    done = [decoder.generate([Request(prompt=tuple(p), sampling=Sampling(max_tokens=1))])[0] for p in prompts]
    spent = sum(completion.usage.prompt_tokens - completion.usage.reused_prompt_tokens for completion in done)
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
        "1",
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
        "new tokens alone",
    )
    yield "growth from 1 to 15 samples / bytes of their new tokens", f"{peaks[1] - peaks[0]:,} bytes", new, "at most 1"


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
                    spread(ratios, 2),
                    statistics.median(ratios),
                    "at most 1.5",
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

    def timed(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        result = packed_attention(*arguments, **options)
        clock.append(time.perf_counter() - began)
        return result

    AttentionInterface.register(ATTENTION, timed)
    try:
        yield clock
    finally:
        AttentionInterface.register(ATTENTION, packed_attention)


def start(model: str) -> Iterator[Row]:
    """A new process, from its start to its first thoughts: they are valued, and the budget ends the search."""
    options = ["--model", model, "--max-tokens", "16", "--budget-nodes", "1", "--json"]
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "tot.cli.app", "solve", "gsm8k", *options], check=True, capture_output=True
        )
        taken.append(time.perf_counter() - began)
    yield (
        "seconds from start of `tot solve` to the first thoughts and their values",
        spread(taken),
        statistics.median(taken),
        "under 8",
    )
