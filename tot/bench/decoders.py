"""`tot bench decoders`: decoding methods side by side on one engine, one request at a time and packed.

The prompts are those of real searches: the first thought after a task's example question, n samples of it. All sides
take turns in one run, on other seeds every round; prompts are computed beforehand, so only decoding is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tot.bench.machine import describe, spread
from tot.decoders.decoder import METHODS, LocalDecoder, load_decoder
from tot.decoders.engine.engine import Engine
from tot.decoders.errors import OptionError, unknown
from tot.decoders.request import Request, Sampling
from tot.named import load_task
from tot.tree import write_json

TASKS = ("gsm8k", "creative_writing", "blocksworld")
NEW = 48


@dataclass
class Side:
    """A method on a schedule, and what was measured of it."""

    method: str
    serial: bool
    speeds: list[float] = field(default_factory=list)
    """New tokens a second, by round."""
    drafted: int = 0
    accepted: int = 0

    @property
    def name(self) -> str:
        return f"{self.method}, {'one at a time' if self.serial else 'packed'}"

    @property
    def speed(self) -> float:
        return statistics.median(self.speeds)


def run(
    methods: Sequence[str],
    model: str,
    options: dict[str, Any],
    temperatures: Sequence[float],
    samples: int,
    rounds: int,
    out: Path | None,
    console: Console,
) -> None:
    """Measure, print a table for each temperature, and write the numbers to `out`."""
    for method in methods:
        if method not in METHODS:
            raise OptionError(unknown("decoder", method, METHODS))
    named = list(dict.fromkeys(("ar", *methods)))
    numbers: dict[str, Any] = {}
    with load_decoder("ar", model) as plain:
        engine = plain.engine
        prompts = [task.prompt(task.thought[0], task.start(task.example())) for task in map(load_task, TASKS)]
        numbers["machine"] = describe(engine.loaded.device, engine.loaded.dtype)
        what = f"{', '.join(TASKS)}; {samples} samples of {NEW} tokens; {rounds} rounds"
        console.print(f"{model}; {numbers['machine']}; {what}")
        plain.generate([Request(prompt=prompt, sampling=Sampling(max_tokens=1)) for prompt in prompts])
        for temperature in temperatures:
            sides = [Side(method, serial) for method in named for serial in (True, False)]
            for seed in range(-1, rounds):  # the first is a warm-up
                for side in sides:
                    with _decoder(side.method, engine, options) as decoder:
                        _measure(side, decoder, prompts, temperature, samples, seed)
            table = Table("decoder", "new tokens/s", "against ar one at a time", "against ar packed", "accepted")
            for side in sides:
                ratios = [side.speed / other.speed for other in sides[:2]]
                numbers[f"{side.name}, T={temperature}"] = {"speeds": side.speeds, "ratios": ratios}
                share = f"{100 * side.accepted / side.drafted:.0f}% of {side.drafted}" if side.drafted else ""
                table.add_row(side.name, spread(side.speeds), *(f"{ratio:.2f}x" for ratio in ratios), share)
            console.print(f"T = {temperature}")
            console.print(table)
    if out is not None:
        write_json(out, numbers)


def _decoder(method: str, engine: Engine, options: dict[str, Any]) -> LocalDecoder:
    """A new one for every turn: a lookup drafter would remember what it saw in earlier ones."""
    known = METHODS[method].options.model_fields
    return load_decoder(method, engine=engine, **{name: value for name, value in options.items() if name in known})


def _measure(
    side: Side, decoder: LocalDecoder, prompts: Sequence[Any], temperature: float, samples: int, seed: int
) -> None:
    """One turn: every prompt's samples, together or one after another."""
    tokens, seconds = 0, 0.0
    for prompt in prompts:
        sampling = Sampling(max_tokens=NEW, temperature=temperature, seed=seed + 1, n=samples, ignore_eos=True)
        alone = [sampling.model_copy(update={"n": 1, "seed": 1000 * seed + i + 1000}) for i in range(samples)]
        for turn in alone if side.serial else [sampling]:
            began = time.perf_counter()
            completions = decoder.generate([Request(prompt=prompt, sampling=turn)])
            seconds += time.perf_counter() - began
            tokens += sum(completion.usage.new_tokens for completion in completions)
            if seed >= 0:
                side.drafted += sum(completion.usage.drafted for completion in completions)
                side.accepted += sum(completion.usage.accepted for completion in completions)
    if seed >= 0:
        side.speeds.append(tokens / seconds)
