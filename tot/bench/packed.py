"""`tot bench packed`: what packing is worth, on the same weights.

Speed against transformers' generate, batched and serial; how much of a prompt is computed again; how much memory n
samples take.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from rich.console import Console
from rich.table import Table

from tot.bench.engines import generate, replay
from tot.bench.harness import RATE, Bench, Side
from tot.bench.options import PackedOptions
from tot.bench.workloads import branches, few_shot_ids, rotated
from tot.decoders.decoder import load_decoder
from tot.decoders.local import LocalDecoder
from tot.decoders.models.loading import load_model
from tot.decoders.request import Request, Sampling
from tot.machine import describe

PROMPT, SAMPLES, NEW = 1000, 15, 64

Row = tuple[str, str, float]
"""What, as it was measured, and the result."""


def run(asked: PackedOptions, console: Console) -> None:
    """Measure, and print the tables."""
    with load_decoder("ar", asked.model) as decoder:
        loaded = decoder.engine.loaded
        ids = few_shot_ids(decoder.tokenizer, PROMPT)
        with Bench(asked, console, describe(loaded.device, loaded.dtype)) as bench:
            theirs = load_model(asked.model).model
            sides = [
                Side("packed", partial(replay, decoder)),
                Side("generate, batched", partial(generate, theirs)),
                Side("generate, serial", partial(generate, theirs, serial=True)),
            ]
            bench.compare(
                f"{asked.model}: {SAMPLES} samples of {NEW} new tokens at T=1, one prompt of {len(ids)} tokens",
                sides,
                lambda _, turn: branches(rotated(ids, turn + 1), SAMPLES, NEW),  # prompts that no one has seen
                rounds=asked.rounds,
                warm_up=lambda _: branches(ids, SAMPLES, NEW),
                metrics=[RATE],
                against=[side.name for side in sides[1:]],
            )
            rows = [*reuse(decoder, ids), *memory(decoder, ids)]
            table = Table("what", "measured", "result")
            for what, measured, value in rows:
                table.add_row(what, measured, f"{value:.4g}")
            bench.keep(parts=rows)
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
