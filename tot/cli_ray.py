"""`tot bench ray`: one Ray worker against two."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def bench_command(
    data: Annotated[Path, typer.Option(help="Questions with answers, as for tot eval.")],
    task: Annotated[str, typer.Option(help="What they are questions of.")] = "gsm8k",
    model: Annotated[str, typer.Option(help="A name, a hub id, a folder or a .gguf file.")] = "smollm2-135m",
    search: Annotated[str | None, typer.Option(help="As for tot eval; the task's own by default.")] = None,
    limit: Annotated[int, typer.Option(min=2, help="Questions.")] = 32,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most new tokens of any text.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Searches at once on each worker.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the sides take turns and medians are compared.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Write the numbers to this JSON file.")] = None,
) -> None:
    """Two Ray workers of one core each against one, on the same questions."""
    from tot.bench.ray import run
    from tot.settings import checked

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    place = None if out is None else checked(out)
    run(task, data, model, limit, concurrency, rounds, place, console, search=search, max_tokens=max_tokens)
