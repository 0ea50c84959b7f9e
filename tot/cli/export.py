"""`tot export` writes the scored paths of evaluations as training data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tot.report.terminal import console


def export_command(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Finished folders of tot eval.")],
    out: Annotated[Path, typer.Option(help="The folder to create.")],
    held_out: Annotated[
        float,
        typer.Option(help="Share of the questions to hold out, the same ones in every export."),
    ] = 0.1,
    task: Annotated[
        str | None,
        typer.Option(help="The folders' task, path/to/file.py:ClassName, if it is not an installed one."),
    ] = None,
) -> None:
    """Write right paths, pairs of right and wrong ones, and labelled steps as training data for TRL."""
    from tot.evaluation.export import export

    counts = Table.grid(padding=(0, 2))
    for name, lines in export(folders, out, task, held_out).items():
        counts.add_row(str(out / name), f"{lines:,}", "lines")
    console().print(counts)
