"""`tot calibrate`: fit the curves that give an answer's certainty."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tot.cli.flags import writable


def calibrate_command(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER", help="Folders of tot eval, on rows that are not for testing.")
    ],
    out: Annotated[Path, typer.Option(help="The .json file to write, for --certainty.")],
    task: Annotated[
        str | None,
        typer.Option(help="The task of the folders, path/to/file.py:ClassName, if it is not an installed one."),
    ] = None,
) -> None:
    """Fit curves for the certainty of answers on evaluations of votes, by task and model."""
    from rich.table import Table

    from tot.decoders.files import write_json
    from tot.evaluation.calibration import calibrate
    from tot.report.terminal import console
    from tot.search.certainty import to_json

    writable(out)
    found = calibrate(folders, task)
    title = "cross-validated by question"
    table = Table("task", "model", "questions", "votes", "calibration error", "surer half", "other half", title=title)
    for curve, measured in found:
        surer, whole = (measured.score_at_coverage[share] for share in (50, 100))
        halves = f"{surer:.1%}", f"{2 * whole - surer:.1%}"
        sizes = f"{curve.questions:,}", f"{measured.samples:,}"
        table.add_row(curve.task, curve.model or "not local", *sizes, f"{measured.error:.1%}", *halves)
    console().print(table)
    write_json(out, to_json([curve for curve, _ in found]))
