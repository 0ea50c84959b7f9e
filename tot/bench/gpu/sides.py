"""What a model is measured with: engines on it, decoders as sides, prompts no one has seen, what sides took."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from tot.bench.gpu.gauge import Gauge, Watched
from tot.bench.gpu.models import SHAPES, Shape, build, loaded, make_tokenizer, twin
from tot.bench.peers.here import requests
from tot.bench.peers.side import Work
from tot.bench.peers.turns import Results
from tot.bench.peers.waves import Wave
from tot.decoders.drafting.draft_model import ModelDrafter
from tot.decoders.engine.engine import Engine
from tot.decoders.local import LocalDecoder
from tot.decoders.metrics import Metrics
from tot.decoders.models.loading import LoadedModel
from tot.decoders.request import Completion, Request
from tot.machine import describe

Found = dict[str, Any]
Stages = Generator[Found, None, Found]
"""A part: gives what it knows before every further round, and may be stopped there; returns all of it at its end."""
PATIENCE = 45.0
"""Seconds, of one side at one number of branches: see `Turns`."""
WARM_UP = 8
"""New tokens of warm-ups, which are all rounds' shapes but for the length."""
_SPARE = 16
"""Slots that a branch may take beyond its new tokens: for drafts."""
_BLOCK = 2048
"""Slots for parallel steps and prompts."""


@dataclass(frozen=True)
class Amounts:
    """How much is done, the same for every model."""

    branches: tuple[int, ...] = (1, 4, 16, 64, 128, 256)
    new_tokens: int = 64
    rounds: int = 3
    acceptance: float = 0.6
    """Of a drafted token that is reached."""


@dataclass
class Bench:
    """A model on the device, in modules for us and in others for transformers, over the same weights."""

    name: str
    shape: Shape
    ours: LoadedModel
    theirs: LoadedModel
    amounts: Amounts
    gauge: Gauge
    say: Callable[[str], None]
    _asked: int = field(default=0, init=False)
    """Prompts made so far."""

    @classmethod
    def open(cls, name: str, device: torch.device, amounts: Amounts, gauge: Gauge, say: Callable[[str], None]) -> Bench:
        """Make the model of that name."""
        shape = SHAPES[name]
        model, tokenizer = build(shape.family, shape.sizes, device), make_tokenizer(shape.sizes["vocab_size"])
        theirs = loaded(twin(model), tokenizer, name)
        return cls(name, shape, loaded(model, tokenizer, name), theirs, amounts, gauge, say)

    def engine(self) -> Engine:
        """With room for the most branches, and no more: transformers needs the rest."""
        longest = max(self.shape.prompts)
        slots = longest + _BLOCK + max(*self.amounts.branches, _SPARE) * (self.amounts.new_tokens + _SPARE)
        return Engine(self.ours, kv_budget=slots)

    def prompt(self, length: int | None = None) -> tuple[int, ...]:
        """Random token ids, other ones at every call. By default as many as the shape's prompts have."""
        self._asked += 1
        generator = torch.Generator().manual_seed(self._asked)
        ids = torch.randint(self.shape.sizes["vocab_size"], (length or self.shape.prompts[0],), generator=generator)
        return tuple(ids.tolist())

    @property
    def weight_bytes(self) -> int:
        """Of what a forward reads: all but the embeddings, of which it takes a few rows."""
        model: Any = self.ours.model
        embeddings = model.get_input_embeddings().weight
        return sum(int(weight.nbytes) for weight in model.parameters() if weight is not embeddings)


class Method:
    """A decoder on a shared engine, as a side. What it drafted is kept by number of samples."""

    most: int | None = None
    searches = True

    def __init__(self, name: str, decoder: LocalDecoder) -> None:
        self.name = name
        self.about = describe(decoder.engine.loaded.device, decoder.engine.loaded.dtype)
        self.accounts: dict[int, list[Metrics]] = {}
        self._decoder = decoder

    def run(self, waves: Sequence[Wave]) -> Work:
        engine, drafter = self._decoder.engine, self._decoder.drafter
        asked = [request for wave in waves for request in requests(wave)]  # one wave: there is nothing to wait for
        engine.call(engine.cache.clear)
        if isinstance(drafter, ModelDrafter):
            engine.call(drafter.runner.cache.clear)
        engine.accounts.clear()
        began = time.perf_counter()
        done = self._decoder.generate(asked)
        took = time.perf_counter() - began
        self.accounts.setdefault(len(done), []).append(engine.accounts["generate"])
        return Work(took, sum(len(completion.tokens) for completion in done))

    def close(self) -> None:
        self._decoder.close()


def compared(results: Results, sides: Sequence[Watched]) -> Found:
    """Medians, and ratios of all sides to the last one, by number of samples; and all that they are made of."""
    *names, base = (side.name for side in sides)
    rates = {
        name: {count: statistics.median(rates) for count in results.columns if (rates := results.rates(name, count))}
        for name in (*names, base)
    }
    ratios = {
        f"{name} / {base}": {
            count: statistics.median(pairs) for count in results.columns if (pairs := results.ratios(name, base, count))
        }
        for name in names
    }
    return {
        "tokens_per_second": rates,
        "ratio": ratios,
        "gpu_percent": {
            side.name: {count: statistics.fmean(seen) for count, seen in side.percent.items() if seen} for side in sides
        },
        "failed": dict(results.failed),
        "predicted_too_long": {name: dict(cells) for name, cells in results.skipped.items()},
        "rounds": asdict(results)["works"],
    }


def seconds(decoder: LocalDecoder, request: Request) -> tuple[float, Completion]:
    """What one request takes, from an empty store, and its completion."""
    engine = decoder.engine
    engine.call(engine.cache.clear)
    engine.accounts.clear()
    began = time.perf_counter()
    (done,) = decoder.generate([request])
    return time.perf_counter() - began, done
