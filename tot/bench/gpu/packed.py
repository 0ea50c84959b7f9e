"""What the device can do, and packed decoding beside transformers' `generate`: same weights, prompts, new tokens.

Sides take turns, warm-ups are not counted, and the time of prompts is, on both sides. `generate` is as it comes: sdpa
attention, and a cache that grows with every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch

from tot.bench.gpu.gauge import Watched
from tot.bench.gpu.sides import PATIENCE, WARM_UP, Bench, Found, Method, Stages, compared
from tot.bench.peers.here import Generate
from tot.bench.peers.side import branches
from tot.bench.peers.turns import Turns
from tot.bench.peers.waves import Wave
from tot.decoders.decoder import load_decoder
from tot.decoders.models.loading import quiet_transformers
from tot.machine import limit, matrix_rate, read_bandwidth

_HELD = 1.25
"""Keys and values that transformers holds at most, over those of all branches: it copies a layer's to add to them."""


def limits(bench: Bench) -> Stages:
    """What this device can do at most, and how long a step of one row takes at least."""
    device, dtype = bench.ours.device, bench.ours.dtype
    size, side = (2**30, 8192) if device.type == "cuda" else (2**24, 256)
    bandwidth = read_bandwidth(device, size)
    yield {"read_bandwidth": bandwidth}
    rate = matrix_rate(dtype, device, side)
    least = limit(bench.weight_bytes, bench.weight_bytes, bandwidth, rate)  # two bytes and two operations a weight
    return {
        "weight_bytes": bench.weight_bytes,
        "read_bandwidth": bandwidth,
        "matrix_rate": rate,
        "seconds_a_step": least,
    }


def packed(bench: Bench) -> Stages:
    """Samples of one prompt at T = 1, packed, against `generate` of as many sequences."""
    amounts, new = bench.amounts, bench.amounts.new_tokens
    with ExitStack() as stack:
        stack.enter_context(quiet_transformers())
        engine = stack.enter_context(bench.engine())
        ours = Method("tot", load_decoder("ar", engine=engine))
        theirs = Generate("generate", bench.theirs, most=_fitting(bench, engine.runner.slot_bytes))
        sides = [Watched(ours, bench.gauge), Watched(theirs, bench.gauge)]
        turns = Turns(sides, amounts.branches, PATIENCE, bench.say)

        def asking(new: int, count: int, turn: int) -> Sequence[Wave]:
            return branches(bench.prompt(), count, new)

        def found() -> Found:
            return compared(turns.results, sides) | {
                "new_tokens": new,
                "prompt_tokens": bench.shape.prompts[0],
                "generate_not_asked": [count for count in amounts.branches if count > (theirs.most or count)],
            }

        turns.warm_up(partial(asking, min(WARM_UP, new)))
        for turn in range(amounts.rounds):
            yield found()
            turns.round(turn, partial(asking, new))
        return found()


def _fitting(bench: Bench, slot_bytes: int) -> int | None:
    """The most branches whose keys and values, and their prompts' activations, have room beside what is held."""
    if bench.ours.device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(bench.ours.device)
    prompt = bench.shape.prompts[0]
    kept = _HELD * slot_bytes * (prompt + bench.amounts.new_tokens)
    passing = 4 * prompt * bench.ours.dtype.itemsize * bench.shape.sizes["intermediate_size"]
    return max(1, int(0.95 * free / (kept + passing)))
