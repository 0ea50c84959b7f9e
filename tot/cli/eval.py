"""`tot eval` scores the questions of a data set and compares evaluations."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from tot.cli.flags import takes
from tot.config import ModelFlags, SearchConfig
from tot.decoders.errors import OptionError
from tot.evaluation.config import EvaluationOptions, EvaluationRun, read_yaml
from tot.report.terminal import complain, console


@takes(EvaluationOptions, ModelFlags, SearchConfig)
def eval_command(
    context: typer.Context,
    *,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TASK", help="A task's name, or path/to/file.py:ClassName; with --compare, folders instead."
        ),
    ] = None,
    given: dict[str, Any],
    config: Annotated[
        Path | None,
        typer.Option(help="Read options from a YAML file, such as a folder's config.yaml; flags override it."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The results folder; by default a new one in runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in the folder --out.")] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Compare finished folders on their common questions, and show votes and pass@k of their samples.",
        ),
    ] = False,
    task: Annotated[
        str | None,
        typer.Option(
            help="With --compare: the task of the folders, path/to/file.py:ClassName, if it is not an installed one."
        ),
    ] = None,
) -> None:
    """Search all questions of a data set concurrently, and score the answers."""
    names = names or []
    if compare:
        others = {"config": config, "out": out, "resume": resume}
        if unused := [*given, *(name for name, value in others.items() if value)]:
            raise OptionError(f"--compare reads finished folders: leave --{unused[0].replace('_', '-')} out")
        _compare([*dict.fromkeys(map(Path, names))], task)
        return
    if task is not None:
        raise OptionError(f"--task {task} is for --compare: give the task as an argument, tot eval {task}")
    if len(names) > 1:
        raise OptionError(f"more than one task is given ({names[1]!r}): give one, or --compare and folders")
    given |= {"task": names[0]} if names else {}
    evaluation = EvaluationRun.of({**(read_yaml(config, given) if config is not None else {}), **given})

    from tot.evaluation.run import results_folder, run_evaluation

    folder = results_folder(out, resume, evaluation)
    try:
        results = run_evaluation(evaluation, folder, resume)
    except KeyboardInterrupt as interrupt:
        again = [*context.obj, *([] if resume else ["--resume"]), *([] if out else ["--out", str(folder)])]
        kept = f"the finished samples are in {folder}: resume with {shlex.join(['tot', *again])}"
        complain(f"tot: interrupted; {kept if (folder / 'config.yaml').exists() else 'no sample was finished'}")
        raise typer.Exit(128 + next(iter(interrupt.args), signal.SIGINT)) from None
    summary = Table.grid(padding=(0, 2))
    for row in (*results.figures, ("Folder", str(results.folder), "")):
        summary.add_row(*row)
    console().print(summary)
    if results.errors or results.bad_rows:
        raise typer.Exit(1)


def _compare(folders: list[Path], task: str | None) -> None:
    from tot.evaluation.compare import compare, different_options, pool_table, table

    first, runs = compare(folders)
    output = console()
    if len(folders) > 1:
        output.print(table(runs))
        output.print(f"common questions: {len(first)}", different_options(folders), sep="\n")
    for folder in folders:
        try:
            measured = pool_table(folder, first, task)
        except OptionError as error:  # a task that is not installed
            if len(folders) == 1:
                raise
            complain(f"tot: no measures of samples: {error}")
            continue
        if measured is not None:
            output.print(measured)
        elif len(folders) == 1:
            raise OptionError(
                f"{folders[0]} has one sample a question: name another folder to compare it with, or evaluate with "
                "--search self-consistency:samples=8 or --repeats 8"
            )
