"""`tot bench gpu`: what packing and drafting bring on a GPU, on a model of 7B's sizes, in minutes.

Weights are random; `generate` is as it comes: sdpa attention, and a cache that grows with every token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from rich.console import Console

from tot.bench.engines import generate, replay
from tot.bench.gpu_models import SHAPES, build, build_draft, loaded, make_tokenizer, on_a_walk, twin
from tot.bench.harness import RATE, Bench, Metric, Results, Side, by_column, percent
from tot.bench.options import GPUOptions
from tot.bench.workloads import Asked, Waves, branches, rows
from tot.decoders.decoder import load_decoder
from tot.decoders.drafting.opening import make_drafter
from tot.decoders.engine.engine import Engine
from tot.decoders.errors import OptionError
from tot.decoders.models.loading import quiet_transformers, resolve_device
from tot.machine import describe, limit, matrix_rate, read_bandwidth

WARM_UP = 8
"""New tokens of warm-ups, which are all rounds' shapes but for the length."""
DRAFTED, DRAFTED_FOR, ACCEPTANCE = 4, (1, 3, 15), 0.6
"""Tokens of a draft, a chain; branches that are drafted for; and how often a drafted token that is reached is right."""
_SPARE = 16
"""Slots that a branch may take beyond its new tokens, for drafts, and the branches that have them at least."""
_HELD = 1.25
"""Keys and values that transformers holds at most, over those of all branches: it copies a layer's to add to them."""


def run(asked: GPUOptions, console: Console) -> None:
    """Measure, write and print. Raises OptionError without a GPU, but for the tiny model on a CPU."""
    if asked.device != "cpu" and not torch.cuda.is_available():
        raise OptionError("torch finds no CUDA device here: try it on a CPU with --model tiny --device cpu")
    if asked.device == "cpu" and asked.model != "tiny":
        raise OptionError(f"{asked.model} would take hours on a CPU: give --model tiny, or a GPU")
    device = resolve_device(asked.device)
    with Bench(asked, console, describe(device, torch.bfloat16)) as bench, quiet_transformers():
        model = _Model(asked, bench, device)
        for part in asked.parts:
            PARTS[part](model)


class _Model:
    """A model on the device, in modules for us and in others for transformers, over the same weights."""

    def __init__(self, asked: GPUOptions, bench: Bench, device: torch.device) -> None:
        self.asked, self.bench, self.shape = asked, bench, SHAPES[asked.model]
        self.vocabulary = self.shape.sizes["vocab_size"]
        model, tokenizer = build(self.shape.family, self.shape.sizes, device), make_tokenizer(self.vocabulary)
        self.ours, self.theirs = (loaded(each, tokenizer, asked.model) for each in (model, twin(model)))
        self._prompts = 0

    def engine(self) -> Engine:
        """With room for the most branches, and no more: transformers needs the rest."""
        slots = max(*self.asked.branches, _SPARE) * (self.asked.new_tokens + _SPARE)
        return Engine(self.ours, kv_budget=2 * self.shape.prompt + slots)

    def prompt(self) -> tuple[int, ...]:
        """Random token ids, other ones at every call."""
        self._prompts += 1
        generator = torch.Generator().manual_seed(self._prompts)
        return tuple(torch.randint(self.vocabulary, (self.shape.prompt,), generator=generator).tolist())

    def compare(
        self,
        title: str,
        sides: Sequence[Side],
        asking: Callable[[int, int], Waves],
        columns: Sequence[int],
        *also: Metric,
    ) -> None:
        """New tokens a second by branches, and ratios to the last side; what takes too long is done once or left out,
        and so are sides that fail. `asking` is given a number of branches and of new tokens."""
        new, title = self.asked.new_tokens, f"{self.asked.model}: {title}"
        ratios = [(side.name, sides[-1].name) for side in sides[:-1]]

        def table(results: Results) -> Any:
            return by_column(results, RATE, title, head="branches: ", ratios=ratios, others=also)

        self.bench.compare(
            title,
            sides,
            lambda count, turn: asking(count, new),
            columns=columns,
            rounds=self.asked.rounds,
            warm_up=lambda count: asking(count, min(WARM_UP, new)),
            size=rows,
            patience=self.asked.patience,
            failing=True,
            table=table,
        )


def limits(model: _Model) -> None:
    """What this device can do at most, and how long a step of one row takes at least."""
    device, weights = model.ours.device, model.ours.model
    size, side = (2**30, 8192) if device.type == "cuda" else (2**24, 256)
    bandwidth, rate = read_bandwidth(device, size), matrix_rate(model.ours.dtype, device, side)
    embeddings: Any = weights.get_input_embeddings().weight  # of which a forward reads a few rows
    read = sum(int(weight.nbytes) for weight in weights.parameters() if weight is not embeddings)
    least = limit(read, read, bandwidth, rate)  # two bytes and two operations a weight
    found = {"weight_bytes": read, "read_bandwidth": bandwidth, "matrix_rate": rate, "seconds_a_step": least}
    model.bench.keep(limits=found)
    model.bench.show(
        f"{read / 1e9:.1f} GB of weights, read at {bandwidth / 1e9:.0f} GB/s; {rate / 1e12:.1f} TFLOP/s: "
        f"{1000 * least:.2f} ms a step at least"
    )


def packed(model: _Model) -> None:
    """Samples of one prompt at T = 1, packed, against `generate` of as many sequences."""
    with model.engine() as engine:
        ours = Side("tot", partial(replay, load_decoder("ar", engine=engine)))
        theirs = Side("generate", partial(generate, model.theirs.model), most=_fitting(model, engine.runner.slot_bytes))
        model.compare(
            "new tokens/s, samples of one prompt at T = 1",
            [ours, theirs],
            lambda count, new: branches(model.prompt(), count, new),
            model.asked.branches,
        )


def _fitting(model: _Model, slot_bytes: int) -> int | None:
    """The most branches whose keys and values, and their prompts' activations, have room beside what is held."""
    if model.ours.device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(model.ours.device)
    kept = _HELD * slot_bytes * (model.shape.prompt + model.asked.new_tokens)
    passing = 4 * model.shape.prompt * model.ours.dtype.itemsize * model.shape.sizes["intermediate_size"]
    return max(1, int(0.95 * free / (kept + passing)))


def seed(model: _Model) -> None:
    """Drafting with a second model, branches of different states, against none.

    The target's weights make token t + 1 follow t, and the draft's say the same after a share of all tokens: so often
    is a drafted token accepted. Every forward, draw and verification really runs.
    """
    with ExitStack() as stack:
        stack.enter_context(on_a_walk(model.ours.model))
        engine = stack.enter_context(model.engine())
        drafter = make_drafter(build_draft(model.shape, model.ours.device, ACCEPTANCE), engine, stack)
        chain: dict[str, Any] = {"engine": engine, "draft": drafter, "k_config": (1,) * DRAFTED}
        decoders = {
            "seed, adapted": load_decoder("seed", **chain),
            "seed, packed": load_decoder("seed", adapt=False, **chain),
            "seed, rounds": load_decoder("seed", adapt=False, policy="rounds", **chain),
            "ar": load_decoder("ar", engine=engine),
        }

        def asking(count: int, new: int) -> Waves:
            """States that differ in their last token: on a walk, their texts differ in all that follows."""
            *head, last = model.prompt()
            apart = model.vocabulary // count
            return (tuple(Asked((*head, (last + i * apart) % model.vocabulary), (new,)) for i in range(count)),)

        model.compare(
            f"new tokens/s by branches, drafts of {DRAFTED} tokens that are right {ACCEPTANCE:.0%} of the time",
            [Side(name, partial(replay, decoder)) for name, decoder in decoders.items()],
            asking,
            DRAFTED_FOR,
            Metric("accepted", lambda took: took.get("acceptance"), percent),
        )


PARTS: dict[str, Callable[[_Model], None]] = {"limits": limits, "packed": packed, "seed": seed}
