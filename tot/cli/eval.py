"""`tot eval`: a task's questions from a data set, searched many at once and scored; and evaluations side by side."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from tot.cli.options import takes, writable
from tot.config import SearchConfig
from tot.decoders.errors import OptionError, unknown
from tot.evaluation.options import EvaluationOptions, EvaluationRun, read_yaml
from tot.report.terminal import complain, console

_PICTURES = (".png", ".svg", ".pdf")


@takes(EvaluationOptions, SearchConfig)
def eval_command(
    *,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TASK", help="A task's name, or path/to/file.py:ClassName; with --compare, folders instead."
        ),
    ] = None,
    given: dict[str, Any],
    config: Annotated[
        Path | None, typer.Option(help="Take options from this YAML file, such as a folder's config.yaml; flags win.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The results folder; by default a new one in runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the folder that --out names.")] = False,
    track: Annotated[str | None, typer.Option(help="Tell wandb or trackio, where installed.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare finished folders on the problems that all of them have.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="With --compare: draw score against tokens and seconds, into this file.")
    ] = None,
) -> None:
    """Search all questions of a data set, many at once, and score the answers."""
    names = names or []
    if compare:
        others = {**given, "config": config, "out": out, "resume": resume, "track": track}
        if unused := [name for name, value in others.items() if value]:
            raise OptionError(f"--compare reads finished folders: leave --{unused[0].replace('_', '-')} out")
        _compare([Path(name) for name in names], plot)
        return
    if plot is not None:
        raise OptionError("--plot draws what --compare compares: give --compare and folders")
    if len(names) > 1:
        raise OptionError(f"there is one task too many, {names[1]!r}: give one, or --compare and folders")
    options = {**(read_yaml(config) if config is not None else {}), **given}
    if names:
        options["task"] = names[0]
    evaluation = EvaluationRun.read(options)

    from tot.evaluation.progress import tracker
    from tot.evaluation.run import results_folder, run_evaluation

    out = results_folder(out, resume, evaluation)
    try:
        results = run_evaluation(evaluation, out, resume, tracker(track))
    except KeyboardInterrupt as interrupt:
        complain(f"tot: interrupted; the finished samples are in {out}: resume with --resume --out {out}")
        raise typer.Exit(128 + next(iter(interrupt.args), signal.SIGINT)) from None
    shown = Table.grid(padding=(0, 2))
    for row in (*results.figures, ("Folder", str(results.folder), "")):
        shown.add_row(*row)
    console().print(shown)
    if results.errors or results.bad_rows:
        raise typer.Exit(1)


def _compare(folders: list[Path], plot: Path | None) -> None:
    from tot.evaluation.compare import compare, picture, table
    from tot.report.plots import save

    if plot is not None and writable(plot, "--plot").suffix not in _PICTURES:
        raise OptionError(f"--plot {plot}: " + unknown("kind of picture", plot.suffix, _PICTURES))
    common, sides = compare(folders)
    shown = console()
    shown.print(table(sides))
    shown.print(f"problems that all have: {common}")
    if plot is not None:
        save(picture(sides), plot)
