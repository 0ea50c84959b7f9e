"""The tables: a row a side and a column a count; the goals; what was left out, and why."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from tot.bench.machine import spread
from tot.bench.peers.goals import Goal
from tot.bench.peers.side import Side
from tot.bench.peers.turns import Results

_WIDE = 400


def cells(results: Results, side: str, rounds: int, seconds: bool) -> list[str]:
    """A side's row: medians with what was seen, how often if not in every round, or why there is nothing."""
    shown = []
    for column in results.columns:
        values = results.seconds(side, column) if seconds else results.rates(side, column)
        if values:
            few = f", {len(values)} of {rounds}" if len(values) < rounds else ""
            shown.append(spread(values) + few)
        elif side in results.failed:
            shown.append("failed")
        elif predicted := results.skipped.get(side, {}).get(column):
            shown.append(f"(over {predicted:.0f} s)")
        else:
            shown.append("")
    return shown


def of_results(
    title: str, results: Results, sides: Sequence[Side], rounds: int, what: str = "", *, seconds: bool = False
) -> Table:
    """A row a side that was asked; new tokens a second or `seconds`."""
    table = Table("", *(f"{what}{column}" for column in results.columns), title=title)
    for side in sides:
        if side.name in results.works or side.name in results.failed or side.name in results.skipped:
            table.add_row(side.name, *cells(results, side.name, rounds, seconds))
    return table


def of_goals(goals: Sequence[Goal]) -> Table:
    """What was to be reached, and whether it was."""
    table = Table("what", "measured", "ratio", "goal", "", title="goals; ratios are medians of those in each round")
    for goal in goals:
        ratio, least = ("" if one is None else goal.shown(one) for one in (goal.ratio, goal.least))
        table.add_row(goal.what, goal.measured, ratio, least, goal.verdict)
    return table


def show(console: Console, table: Table, markdown: bool) -> None:
    """In boxes, or as Markdown with the title above it, a row a line however wide the console is."""
    for column in table.columns:
        column.overflow = "fold"
    if not markdown:
        console.print(table)
        return
    console.print(f"\n{table.title}:\n", soft_wrap=True)
    table.title, table.box = None, box.MARKDOWN
    width, console.width = console.width, _WIDE
    console.print(table)
    console.width = width
