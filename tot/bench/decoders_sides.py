"""Sides of `tot bench decoders`, and what they are measured on: one engine, in turns at every prompt."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tot.bench.machine import spread
from tot.decoders.decoder import load_decoder, options_of
from tot.decoders.drafting.drafters import Drafter
from tot.decoders.engine.engine import Engine
from tot.decoders.files import write_json
from tot.decoders.local import LocalDecoder
from tot.decoders.methods.options import MCSDOptions, SDOptions
from tot.decoders.request import Message, Purpose, Request, Sampling, Usage
from tot.machine import describe

CONFIGS = {"sd": (1, 1, 1), "mcsd": (2, 2, 1)}
"""k_config of each method in SEED's tables; the options k and k_config take their places."""
NOTHING = Usage()
Group = list[tuple[Message, ...]]
"""Prompts that a search asks at once."""


@dataclass
class Side:
    """A method on a schedule, and what was measured of it."""

    name: str
    decoder: LocalDecoder
    serial: bool = False
    speeds: list[float] = field(default_factory=list)
    """New tokens a second, by prompt."""
    usage: Usage = NOTHING
    """Of all that was measured."""

    @property
    def acceptance(self) -> tuple[str, str]:
        """The acceptance rate, of positions that were reached; and what was accepted of all drafted tokens."""
        usage = self.usage
        if usage.acceptance_rate is None:
            return "", ""
        return f"{100 * usage.acceptance_rate:.0f}%", f"{100 * usage.accepted / usage.drafted:.0f}% of {usage.drafted}"

    def turn(self, groups: Sequence[Group], sampling: Sampling, purpose: Purpose = "generate") -> float:
        """Decode the samples of every group of prompts, packed or one after another. Returns new tokens a second."""
        alone = [sampling.model_copy(update={"n": 1, "seed": 1000 * sampling.seed + i}) for i in range(sampling.n)]
        tokens, seconds = 0, 0.0
        for group in groups:
            together = [Request(prompt=prompt, sampling=sampling, purpose=purpose) for prompt in group]
            one_by_one = [[Request(prompt=p, sampling=each, purpose=purpose)] for p in group for each in alone]
            for requests in one_by_one if self.serial else [together]:
                began = time.perf_counter()
                completions = self.decoder.generate(requests)
                seconds += time.perf_counter() - began
                spent = sum((completion.usage for completion in completions), NOTHING)
                tokens += spent.new_tokens
                self.usage += spent
        return tokens / seconds


class Bench:
    """What all sections measure on: one engine, the prompts of each round, and the numbers found."""

    def __init__(
        self,
        engine: Engine,
        options: dict[str, Any],
        samples: int,
        max_tokens: int,
        rounds: int,
        console: Console,
        out: Path,
    ) -> None:
        self.engine = engine
        self.options = options
        self.samples = samples
        self.max_tokens = max_tokens
        self.rounds = rounds
        self.console = console
        self.out = out
        self.numbers: dict[str, Any] = {"machine": describe(engine.loaded.device, engine.loaded.dtype)}
        self.stack = ExitStack()
        self.configs: dict[str, tuple[int, ...]] = dict(CONFIGS)
        if "k" in options:
            self.configs["sd"] = SDOptions(k=options["k"]).k_config
        if "k_config" in options:
            self.configs["mcsd"] = MCSDOptions(k_config=options["k_config"]).k_config

    def side(self, name: str, method: str, serial: bool = False, **options: Any) -> Side:
        known = options_of(method).model_fields
        given = {option: value for option, value in self.options.items() if option in known}
        decoder = self.stack.enter_context(load_decoder(method, engine=self.engine, **given | options))
        return Side(name, decoder, serial)

    def forget(self, drafter: Drafter | None) -> None:
        """No side finds what the draft model computed for another."""
        if drafter is not None and drafter.runner is not None:
            self.engine.call(drafter.runner.cache.clear)

    def sampling(self, temperature: float, seed: int, purpose: Purpose) -> Sampling:
        """n thoughts after a state; one evaluation of each of its n thoughts."""
        n = self.samples if purpose == "generate" else 1
        return Sampling(max_tokens=self.max_tokens, temperature=temperature, seed=seed, n=n, ignore_eos=True)

    def compare(
        self,
        title: str,
        sides: Sequence[Side],
        prompts: Sequence[Sequence[Group]],
        temperature: float,
        purpose: Purpose = "generate",
        against: Sequence[int] = (0, 1),
    ) -> None:
        """Rounds of all sides in turns, and a table with their ratios to the sides numbered in `against`."""
        warm_up, *rest = prompts
        for number, groups in enumerate([warm_up, *(rest[i % len(rest)] for i in range(self.rounds))]):
            for turn, group in enumerate(groups):
                one = Sampling(max_tokens=1)
                sides[0].decoder.generate([Request(prompt=prompt, sampling=one) for prompt in group])
                first = (number + turn * (len(sides) // len(groups) or 1)) % len(sides)
                for side in (*sides[first:], *sides[:first]):
                    self.forget(side.decoder.drafter)
                    speed = side.turn([group], self.sampling(temperature, number, purpose), purpose)
                    if number:
                        side.speeds.append(speed)
                    else:
                        side.usage = NOTHING
        compared = [f"against {sides[i].name}" for i in against]
        table = Table(
            "decoder", "new tokens/s", *compared, "tokens a forward", "acceptance rate", "accepted of drafted"
        )
        for side in sides:
            ratios = [
                statistics.median(ours / theirs for ours, theirs in zip(side.speeds, sides[i].speeds, strict=True))
                for i in against
            ]
            self.numbers[f"{title}: {side.name}"] = {
                "speeds": side.speeds,
                "ratios": ratios,
                "drafted": side.usage.drafted,
                "accepted": side.usage.accepted,
                "reached": side.usage.reached,
                "tokens_per_forward": side.usage.new_tokens / side.usage.forwards,
            }
            shown = (*(f"{ratio:.2f}x" for ratio in ratios), f"{side.usage.new_tokens / side.usage.forwards:.2f}")
            table.add_row(side.name, spread(side.speeds), *shown, *side.acceptance)
        self.show(title, table)

    def show(self, *shown: str | Table) -> None:
        """Print what was found, and write down all numbers so far: whatever ends the run, they are there."""
        for one in shown:
            self.console.print(one)
        write_json(self.out, self.numbers)
