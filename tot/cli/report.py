"""`tot report`: export a run's tree as a page, a picture or a graph, or an evaluation as a page with all trees."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tot.decoders.errors import OptionError, TaskError, unknown
from tot.report.terminal import console


def report_command(
    run: Annotated[
        Path, typer.Argument(help="A run, a trace or a tree (tot solve --out, tree.save), or a folder of tot eval.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write: .html, .svg, .png, .graphml, .dot or .gv; by default an .html page beside the run "
            "or in the folder."
        ),
    ] = None,
) -> None:
    """Export a run's tree as a self-contained page, a picture or a graph, or an evaluation as a page."""
    from tot.decoders.files import write_text
    from tot.evaluation.overview import evaluation_page
    from tot.report.graphs import GRAPHS
    from tot.report.page import tree_page
    from tot.report.picture import save
    from tot.tree.saved import read_run
    from tot.tree.tree import ThoughtTree

    if not run.exists():
        raise TaskError(f"{run} does not exist: give a run that `tot solve --out` wrote, or a folder of `tot eval`")
    evaluation = run.is_dir()
    out = out or (run / "report.html" if evaluation else run.with_suffix(".html"))
    kind = out.suffix.lower()
    kinds = (".html", ".png", ".svg", *GRAPHS)
    if kind not in kinds:
        raise OptionError(f"--out {out}: " + unknown("kind of report", kind, kinds))
    if evaluation and kind != ".html":
        raise OptionError(f"--out {out}: an evaluation needs a .html file: give one, or export one of {run}/trees")
    if evaluation:
        write_text(out, evaluation_page(run))
    else:
        saved = read_run(run)
        tree = ThoughtTree.from_json(saved.pop("tree"))
        if kind == ".html":
            write_text(out, tree_page(tree, saved))
        elif kind in GRAPHS:
            write_text(out, GRAPHS[kind](tree))
        else:
            save(tree, out)
    console().print(f"report: {out}")
