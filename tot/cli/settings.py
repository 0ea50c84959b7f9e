"""What `tot solve` was asked, as it is kept in a trace to go on from, and the doing of it: files first, then screen."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tot.checkpoint import Checkpoint
from tot.cli.options import SearchOptions
from tot.data import row as read_row
from tot.decoders.errors import OptionError
from tot.decoders.files import write_json
from tot.registry import load_task
from tot.report.terminal import Progress, show
from tot.search.session import Problem
from tot.solver import conclude, solve

if TYPE_CHECKING:
    from tot.report.profiling import Profile


class Settings(SearchOptions):
    """What `tot solve` was asked, as it is kept in a trace to go on from."""

    task: str
    question: str
    out: str | None = None


def ask(task: str, question: str | None, data: Path | None, row: int) -> str:
    """The question as given, from standard input, from a row of data, or the task's example."""
    chosen = load_task(task)
    if data is not None:
        if question is not None:
            raise OptionError(f"--data and a question: give one of the two, not {question[:40]!r} as well")
        found = read_row(data, row)
        try:
            return chosen.question_of(found)
        except KeyError as error:
            raise OptionError(
                f"{data}, row {row} has no {error} (it has {', '.join(found)}): give another file"
            ) from None
    if question is None:
        return chosen.example()
    return _read_question() if question == "-" else question


def checked(out: Path, flag: str = "--out") -> Path:
    """A file that may be written. Raises OptionError, naming the flag."""
    if not out.resolve().parent.is_dir():
        raise OptionError(f"{flag} {out}: the folder {out.resolve().parent} does not exist: make it first")
    if out.is_dir():
        raise OptionError(f"{flag} {out} is a folder: give a file in it")
    return out


def carry_out(
    settings: Settings, trace: Checkpoint | None, started: float, as_json: bool, profile: Profile | None = None
) -> bool:
    """Run what the settings say; write, then print. True where Ctrl-C ended it."""
    task = load_task(settings.task)
    task.start(settings.question)
    config = settings.config(task)
    out = None if settings.out is None else Path(settings.out)
    if out is not None and trace is None:
        steps = out if out.suffix == ".jsonl" else out.with_name(out.name.removesuffix(".json") + ".jsonl")
        trace = Checkpoint.create(steps, settings=settings.model_dump(mode="json"))

    problems: list[Problem] = []
    try:
        with Progress(problems, started, quiet=as_json):
            solution = solve(
                task,
                settings.question,
                config,
                checkpoint=trace,
                watch=lambda problem: problems.append(problem) if not problems else None,
                profile=profile,
            )
    except BaseException:
        if out is not None and out.suffix != ".jsonl" and problems:  # what was grown until then is kept
            write_json(out, conclude(problems[0]).to_json())
        if trace is not None:
            trace.close()
            if trace.empty:
                trace.path.unlink(missing_ok=True)
        raise
    interrupted = solution.stopped == "interrupted"
    if out is not None and out.suffix != ".jsonl":
        write_json(out, solution.to_json())
    if trace is not None and interrupted:
        trace.close()
    elif trace is not None:
        trace.finish(solution.to_json())
        if out is not None and out.suffix != ".jsonl":
            trace.path.unlink(missing_ok=True)  # all of it is in the run
    if as_json:
        sys.stdout.write(json.dumps(solution.summary()) + "\n")
    else:
        show(solution)
    return interrupted


def _read_question() -> str:
    """All of standard input."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise OptionError(f"standard input is not {error.encoding} text ({error.reason}): convert it first") from None
