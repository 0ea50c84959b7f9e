"""Speculative decoding against transformers' assisted generation, for `tot bench decoders`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from tot.bench.decoders_sides import Bench, Group
from tot.bench.machine import spread
from tot.decoders.drafting.drafters import Drafter
from tot.decoders.drafting.early_exit import first_layers
from tot.decoders.memory import free_memory
from tot.decoders.models.loading import LoadedModel, load_model
from tot.decoders.models.model_names import draft_folder

_SPARE = 1.5
"""What is needed beside the weights while they are loaded, and by what computes with them."""


def room_for_generate(bench: Bench, drafter: Drafter | None) -> bool:
    """Whether transformers' copies of the models fit beside ours; says so where they don't."""
    models = [bench.engine.loaded.model, *([drafter.runner.model] if drafter is not None and drafter.runner else [])]
    needed = (
        sum(weight.numel() for model in models for weight in model.parameters()) * bench.engine.loaded.dtype.itemsize
    )
    free = free_memory(bench.engine.loaded.device)
    if needed * _SPARE > free:
        bench.console.print(
            f"transformers' copies of the models take {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free: "
            "the comparison with its generate is left out"
        )
    return bool(needed * _SPARE <= free)


def _assistant(draft: Any, target: LoadedModel) -> Any | None:
    """The model that drafts, as transformers can run it: an engine may hold its own as packed numbers only."""
    named = [part.strip() for part in str(draft or "").split(",") if part.strip() not in ("", "lookup")]
    if not named:
        return None
    if named[0].startswith("early-exit"):
        layers = named[0].partition(":")[2]
        return first_layers(target, int(layers) if layers else None).model
    folder = draft_folder(target.name) if named[0] == "trained" else named[0]
    return load_model(folder, dtype=str(target.dtype).removeprefix("torch.")).model


def against_generate(
    bench: Bench, model: str, methods: Sequence[str], thoughts: Sequence[Sequence[Group]], temperature: float
) -> None:
    """One prompt at a time against transformers' assisted generation with the same draft; prefill counts on all."""
    k = len(bench.configs["sd"])
    sides = [bench.side("sd", "sd", serial=True, k=k)]
    if "seed" in methods:
        sides.append(bench.side("seed", "seed", serial=True))
    target = load_model(model, dtype=str(bench.engine.loaded.dtype).removeprefix("torch."))
    theirs: dict[str, Any] = {"prompt_lookup_num_tokens": k}
    if (assistant := _assistant(bench.options.get("draft"), target)) is not None:
        assistant.set_attn_implementation("sdpa")
        assistant.generation_config.num_assistant_tokens = k
        theirs = {"assistant_model": assistant}
    speeds: dict[str, list[float]] = {"transformers": [], **{side.name: [] for side in sides}}
    for number in range(bench.rounds + 1):
        groups = thoughts[0] if not number else thoughts[1 + (number - 1) % (len(thoughts) - 1)]
        sampling = bench.sampling(temperature, number, "generate").model_copy(update={"n": 1})
        tokens, seconds = 0, 0.0
        for group in groups:
            ids = torch.tensor([bench.engine.codec.encode_prompt(group[0])])
            torch.manual_seed(number)
            began = time.perf_counter()
            with torch.inference_mode():
                made = target.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    **({"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}),
                    max_new_tokens=bench.max_tokens,
                    min_new_tokens=bench.max_tokens,
                    **theirs,
                )
            seconds += time.perf_counter() - began
            tokens += made.shape[1] - ids.shape[1]
        found = {"transformers": tokens / seconds}
        for side in sides:
            bench.engine.call(bench.engine.cache.clear)
            found[side.name] = side.turn(groups, sampling)
        if number:
            for name, speed in found.items():
                speeds[name].append(speed)
    bench.numbers[f"against generate, T = {temperature}"] = speeds
    for side in sides:
        ratio = statistics.median(speeds[side.name]) / statistics.median(speeds["transformers"])
        bench.show(
            f"one prompt at a time, T = {temperature}, prefill counted: {side.name} {spread(speeds[side.name])} "
            f"tokens/s, transformers' generate({', '.join(theirs)}) {spread(speeds['transformers'])}: {ratio:.2f}x"
        )
