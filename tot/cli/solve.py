"""`tot solve`: answer one question; the run is saved in files, from which it can resume."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tot.cli.options import is_given, takes, writable
from tot.config import SearchConfig
from tot.decoders.errors import OptionError, TaskError

if TYPE_CHECKING:
    from tot.report.profile import Profile
    from tot.search.checkpoint import Checkpoint
    from tot.search.session import SearchSession

_WITH_RESUME = ("resume", "as_json", "profile", "profile_out")


@takes(SearchConfig)
def solve_command(
    context: typer.Context,
    *,
    task: Annotated[
        str | None, typer.Argument(help="A task's name, such as gsm8k, or path/to/file.py:ClassName.")
    ] = None,
    question: Annotated[
        str | None, typer.Argument(help="The question; - reads standard input; by default the task's example.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Read the question from this file: .jsonl, .json, .csv, .parquet or .txt.")
    ] = None,
    row: Annotated[int, typer.Option(min=0, help="Row of --data, counted from 0.")] = 0,
    given: dict[str, Any],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the run (answer, usage, tree) to this .json file, and its steps to a .jsonl beside it."
        ),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Resume an interrupted run from its .jsonl file, with its own options.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Print a profile of the time; on standard error with --json.")
    ] = False,
    profile_out: Annotated[
        Path | None,
        typer.Option(help="Write the profile to this .json file, as a trace for Perfetto or chrome://tracing."),
    ] = None,
) -> None:
    """Answer a question by tree-of-thought search."""
    started = time.monotonic()
    from tot.search.checkpoint import Checkpoint

    checkpoint: Checkpoint | None = None
    if resume is not None:
        for name in context.params:
            if name not in _WITH_RESUME and is_given(context, name):
                raise OptionError(f"--resume uses the options of the run: leave {name.replace('_', '-')!r} out")
        checkpoint = Checkpoint.resume(resume)
        if "settings" not in checkpoint.header:
            raise OptionError(f"{resume} was not written by `tot solve`: resume it with solve(..., checkpoint=...)")
        settings = checkpoint.header["settings"]
    else:
        if task is None:
            raise OptionError("no task is given: give its name, such as gsm8k, or path/to/file.py:ClassName")
        path = None if out is None else str(writable(out))
        settings = {"task": task, "question": _question(task, question, data, row), "out": path, **given}
    recording = None
    if profile or profile_out is not None:
        from tot.report.profile import Profile, show_profile

        recording = Profile()
    if profile_out is not None:
        writable(profile_out, "--profile-out")
    interrupted = _run(settings, checkpoint, started, as_json, recording)
    if recording is not None:
        show_profile(recording, as_json)
        if profile_out is not None:
            recording.save(profile_out)
    if interrupted:
        raise typer.Exit(130)


def _question(task: str, question: str | None, data: Path | None, row: int) -> str:
    """Return the question: the argument, standard input, a row of data, or the task's example."""
    from tot.evaluation.data import row as read_row
    from tot.evaluation.questions import question_of
    from tot.registry import load_task

    loaded = load_task(task)
    if data is not None:
        if question is not None:
            raise OptionError(f"both --data and a question are given: leave --data or {question[:40]!r} out")
        try:
            return question_of(loaded, read_row(data, row))
        except TaskError as error:
            raise OptionError(f"{data}, row {row} {error}; give another row or file") from None
    if question is None:
        return loaded.example()
    try:
        return sys.stdin.read() if question == "-" else question
    except UnicodeDecodeError as error:
        raise OptionError(f"standard input is not {error.encoding} text ({error.reason}): convert it first") from None


def _run(
    settings: Mapping[str, Any], checkpoint: Checkpoint | None, started: float, as_json: bool, profile: Profile | None
) -> bool:
    """Run a search with these settings, and write and print the solution. Return whether Ctrl-C interrupted it."""
    from tot.cli.output import search_line, show
    from tot.decoders.files import write_json
    from tot.report.terminal import progress
    from tot.search.checkpoint import Checkpoint
    from tot.solver import conclude, solve

    about = {name: settings[name] for name in ("task", "question", "out")}
    config = SearchConfig.of(None, {name: value for name, value in settings.items() if name not in about})
    task = config.suited(about["task"])
    config.parts(task)  # raises for incompatible options before a file is written
    task.start(about["question"])
    config = config.model_copy(update={"prompts": task.prompts})
    out = None if about["out"] is None else Path(about["out"])
    if out is not None and checkpoint is None:
        steps = out if out.suffix == ".jsonl" else out.with_name(out.name.removesuffix(".json") + ".jsonl")
        checkpoint = Checkpoint.create(steps, settings={**about, **config.to_json(secrets=True)})
    if out is not None and out.suffix == ".jsonl":
        out = None  # the checkpoint will contain the run

    sessions: list[SearchSession] = []
    try:
        with progress(lambda: search_line(sessions, started), quiet=as_json):
            solution = solve(
                task,
                about["question"],
                config,
                checkpoint=checkpoint,
                watch=lambda session: sessions.append(session) if not sessions else None,
                profile=profile,
            )
    except BaseException:
        if out is not None and sessions:  # save the partial tree
            write_json(out, conclude(sessions[0]).to_json())
        if checkpoint is not None:
            checkpoint.close()
            if checkpoint.empty:
                checkpoint.path.unlink(missing_ok=True)
        raise
    interrupted = solution.stopped == "interrupted"
    if out is not None:
        write_json(out, solution.to_json())
    if checkpoint is not None and interrupted:
        checkpoint.close()
    elif checkpoint is not None:
        checkpoint.finish(solution.to_json())
        if out is not None:
            checkpoint.path.unlink(missing_ok=True)  # the run has all of its data
    if as_json:
        sys.stdout.write(json.dumps(solution.summary()) + "\n")
    else:
        show(solution)
    return interrupted
