"""Where SEED's time goes, for `tot bench decoders`: by purpose, and in pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from tot.bench.decoders_sides import Bench, Group
from tot.decoders.errors import OptionError
from tot.decoders.request import Purpose
from tot.decoders.timeline import Timeline
from tot.report.plots import gantt, save, utilisation


def by_purpose(bench: Bench, thoughts: Sequence[Sequence[Group]], evaluations: Sequence[Sequence[Group]]) -> None:
    """Thought generator and state evaluator apart (SEED v2, RQ2): k_config (2,2,1), T = 1."""
    asked: dict[Purpose, Sequence[Sequence[Group]]] = {"generate": thoughts, "evaluate": evaluations}
    for purpose, prompts in asked.items():
        sides = [bench.side("ar, serial", "ar", serial=True), bench.side("seed, packed", "seed", k_config=(2, 2, 1))]
        bench.compare(f"purpose {purpose}, T = 1", sides, prompts, 1.0, purpose, against=(0,))
    bench.engine.accounts.clear()
    side = bench.side("seed, packed", "seed", k_config=(2, 2, 1), adapt=False)
    found = ("acceptance rate", "by position", "accepted of drafted", "tokens a verification")
    table = Table("purpose", *found, "draft", "verify", "sampling", "else")
    for purpose, prompts in asked.items():
        side.turn(prompts[1], bench.sampling(1.0, 1, purpose), purpose)
        account = bench.engine.accounts[purpose]
        seconds = {name: account.seconds[name] for name in ("draft", "verify", "sampling", "scheduling")}
        total = sum(seconds.values())
        bench.numbers[f"account, {purpose}"] = {
            "acceptance_rate": account.acceptance_rate,
            "by_position": account.by_position,
            "accepted_of_drafted": account.accepted_of_drafted,
            "block_efficiency": account.block_efficiency,
            "seconds": seconds,
        }
        table.add_row(
            purpose,
            f"{100 * account.acceptance_rate:.0f}%",
            ", ".join(f"{100 * rate:.0f}%" for rate in account.by_position),
            f"{100 * account.accepted_of_drafted:.0f}% of {account.drafted}",
            f"{account.block_efficiency:.2f}",
            *(f"{100 * value / total:.0f}%" for value in seconds.values()),
        )
    bench.show("where the time goes: seed, packed, k_config (2,2,1) always drafted whole, T = 1", table)


def pictures(bench: Bench, groups: Sequence[Group]) -> None:
    """A Gantt chart of SEED's rounds, and how busy the target is under each schedule."""
    config = bench.configs["sd"]
    options: dict[str, Any] = {"k_config": config, "adapt": False}
    sides = {
        "sd, serial": bench.side("sd", "sd", serial=True, k=len(config)),
        "seed, rounds without overlap": bench.side("off", "seed", policy="rounds", overlap=False, **options),
        "seed, rounds": bench.side("on", "seed", policy="rounds", **options),
        "seed, packed": bench.side("packed", "seed", **options),
    }
    runs: dict[str, Timeline] = {}
    for name, side in sides.items():
        for _ in range(2):  # what is computed for the first time is not in the picture
            bench.engine.timeline = runs[name] = Timeline()
            side.turn(groups[:1], bench.sampling(0.2, 1, "generate"))
    bench.engine.timeline = None
    rounds = runs["seed, rounds"]
    longest = max((length for _, length in rounds.queue), default=0)
    bench.numbers["longest queue"] = longest
    bench.show(f"seed, rounds: up to {longest} drafts waited in the queue at once")
    try:
        for name, figure in {
            "gantt": gantt(rounds, "SEED, rounds: drafts of three thoughts, verified first come, first served"),
            "utilisation": utilisation(runs),
        }.items():
            path = bench.out.with_name(f"{bench.out.stem}-{name}.png")
            save(figure, path)
            bench.console.print(f"picture: {path}")
    except OptionError as error:  # matplotlib is an extra
        bench.console.print(str(error))
