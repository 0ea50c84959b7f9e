"""What was measured, as tables: medians of each part; all else is in the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

_COMPARED = {"packed": "samples of one prompt at T = 1", "seed": "branches, drafted for"}


def show(numbers: Mapping[str, Any], console: Console) -> None:
    """Print the tables, then what is missing and why."""
    console.print(numbers["machine"])
    for shape, parts in numbers["models"].items():
        for part, title in _COMPARED.items():
            if parts.get(part, {}).get("tokens_per_second"):
                console.print(_compared(f"{shape}: new tokens/s, {title}", parts[part]))
        if (pdos := parts.get("pdos", {})).get("ratio"):
            inside = pdos["inside_the_block"]["ratio"]
            ratios = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in pdos["ratio"].items())
            console.print(f"{shape}: {pdos['steps']} parallel steps: {ratios}; tokens/s inside the block {inside:.2f}x")
        if "windows" in (figure := parts.get("figure_2", {})):
            console.print(_figure(shape, figure))
        if (cut := parts.get("caps", {})).get("medians"):
            seconds = ", ".join(f"{name} {value:.2f}" for name, value in cut["medians"].items())
            console.print(f"{shape}: seconds of a rationale and its answer, by cap (window {cut['window']}): {seconds}")
    for name, why in (numbers["left_out"] | numbers["failed"]).items():
        console.print(f"{name}: {why}")


def _compared(title: str, part: Mapping[str, Any]) -> Table:
    columns = sorted({count for rates in part["tokens_per_second"].values() for count in rates})
    table = Table("", *map(str, columns), title=title)
    for name, rates in part["tokens_per_second"].items():
        table.add_row(name, *(f"{rates[count]:.0f}" if count in rates else "" for count in columns))
    for name, ratios in part["ratio"].items():
        table.add_row(name, *(f"{ratios[count]:.2f}x" if count in ratios else "" for count in columns))
    for name, percent in part["gpu_percent"].items():
        if percent:
            table.add_row(f"{name}: GPU", *(f"{percent[count]:.0f}%" if count in percent else "" for count in columns))
    for name, drafts in part.get("drafts", {}).items():
        accepted = {count: each["acceptance"] for count, each in drafts.items() if each["acceptance"] is not None}
        if accepted:
            row = (f"{100 * accepted[count]:.0f}%" if count in accepted else "" for count in columns)
            table.add_row(f"{name}: accepted", *row)
    return table


def _figure(shape: str, figure: Mapping[str, Any]) -> Table:
    table = Table("window", *map(str, figure["windows"]), title=f"{shape}: milliseconds a forward (FastCoT, figure 2)")
    for name, curve in figure.items():
        if name.startswith("prompt"):
            table.add_row(name, *(f"{1000 * seconds:.1f}" for seconds in curve["seconds"]))
    return table
