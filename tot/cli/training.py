"""`tot instances`: generate questions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def instances_command(
    task: Annotated[str, typer.Argument(help="A task that can generate questions, such as blocksworld.")],
    out: Annotated[Path, typer.Option(help="The .jsonl file to write.")],
    count: Annotated[int, typer.Option(min=1, help="Number of questions.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the questions.")] = 0,
    without: Annotated[list[Path] | None, typer.Option(help="Exclude the questions of these files.")] = None,
) -> None:
    """Generate distinct questions of a task."""
    from tot.training.instances import make_instances

    make_instances(task, out, count, seed, without or [])
