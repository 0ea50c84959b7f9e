"""`tot report`: export a run as a page, a picture or a graph, or an evaluation as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tot.decoders.errors import OptionError, TaskError, unknown
from tot.report.terminal import console


def report_command(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="A run, a trace or a tree (tot solve --out, tree.save), or a folder of tot eval."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write: .html, .svg, .png or .graphml; by default an .html page beside each "
            "run or in its folder."
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="The task of a folder, path/to/file.py:ClassName, if it is not an installed one."),
    ] = None,
) -> None:
    """Export a run's tree as a self-contained page, a picture or a graph, or an evaluation as a page."""
    for run in runs:
        if not run.exists():
            raise TaskError(f"{run} does not exist: give a run that `tot solve --out` wrote, or a folder of `tot eval`")
    if len(runs) > 1 and out is not None:
        raise OptionError(f"--out {out} is for one run, not {len(runs)}: leave --out out, or give one run")
    for run in runs:
        _report(run, out or (run / "report.html" if run.is_dir() else run.with_suffix(".html")), task)


def _report(run: Path, out: Path, task: str | None) -> None:
    """Write the page, the picture or the graph of one run or evaluation."""
    from tot.decoders.files import write_text
    from tot.evaluation.overview import evaluation_page
    from tot.report.graphs import graphml
    from tot.report.page import tree_page
    from tot.report.picture import save
    from tot.tree.saved import read_run
    from tot.tree.tree import ThoughtTree

    kind, kinds = out.suffix.lower(), (".html", ".png", ".svg", ".graphml")
    if kind not in kinds:
        raise OptionError(f"--out {out}: " + unknown("kind of report", kind, kinds))
    if run.is_dir():
        if kind != ".html":
            raise OptionError(f"--out {out}: an evaluation needs a .html file: give one, or export one of {run}/trees")
        write_text(out, evaluation_page(run, task))
    else:
        saved = read_run(run)
        tree = ThoughtTree.from_json(saved.pop("tree"))
        if kind == ".html":
            write_text(out, tree_page(tree, saved))
        elif kind == ".graphml":
            write_text(out, graphml(tree))
        else:
            save(tree, out)
    console().print(f"report: {out}")
