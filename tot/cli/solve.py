"""`tot solve`: one question, answered; the run is kept in files as it goes, and taken up again from them."""

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
        str | None, typer.Argument(help="The question; - reads standard input; none: an example.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Take the question from this file: .jsonl, .json, .csv, .parquet or .txt.")
    ] = None,
    row: Annotated[int, typer.Option(min=0, help="Which row of --data, counted from 0.")] = 0,
    given: dict[str, Any],
    out: Annotated[
        Path | None,
        typer.Option(help="Write the run (answer, usage, tree) to this .json file, and each step to a .jsonl beside."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with a killed run from its .jsonl, as it was started.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Print where the time went; on standard error with --json.")
    ] = False,
    profile_out: Annotated[
        Path | None,
        typer.Option(help="Write that to this .json file, too, as a trace for Perfetto or chrome://tracing."),
    ] = None,
) -> None:
    """Grow a tree of thoughts about a question and answer it."""
    started = time.monotonic()
    from tot.search.checkpoint import Checkpoint

    checkpoint: Checkpoint | None = None
    if resume is not None:
        for name in context.params:
            if name not in _WITH_RESUME and is_given(context, name):
                raise OptionError(f"--resume goes on as the run was started: leave {name.replace('_', '-')!r} out")
        checkpoint = Checkpoint.resume(resume)
        if "settings" not in checkpoint.header:
            raise OptionError(f"{resume} was not written by `tot solve`: resume it with solve(..., checkpoint=...)")
        settings = checkpoint.header["settings"]
    else:
        if task is None:
            raise OptionError("there is no task: give its name, such as gsm8k, or path/to/file.py:ClassName")
        place = None if out is None else str(writable(out))
        settings = {"task": task, "question": _question(task, question, data, row), "out": place, **given}
    recorded = None
    if profile or profile_out is not None:
        from tot.report.profile import Profile, show_profile

        recorded = Profile()
    if profile_out is not None:
        writable(profile_out, "--profile-out")
    interrupted = _run(settings, checkpoint, started, as_json, recorded)
    if recorded is not None:
        show_profile(recorded, as_json)
        if profile_out is not None:
            recorded.save(profile_out)
    if interrupted:
        raise typer.Exit(130)


def _question(task: str, question: str | None, data: Path | None, row: int) -> str:
    """The question as given, from standard input, from a row of data, or the task's example."""
    from tot.evaluation.data import row as read_row
    from tot.evaluation.questions import question_of
    from tot.registry import load_task

    chosen = load_task(task)
    if data is not None:
        if question is not None:
            raise OptionError(f"--data and a question: give one of the two, not {question[:40]!r} as well")
        try:
            return question_of(chosen, read_row(data, row))
        except TaskError as error:
            raise OptionError(f"{data}, row {row} {error}; give another row or file") from None
    if question is None:
        return chosen.example()
    try:
        return sys.stdin.read() if question == "-" else question
    except UnicodeDecodeError as error:
        raise OptionError(f"standard input is not {error.encoding} text ({error.reason}): convert it first") from None


def _run(
    settings: Mapping[str, Any], checkpoint: Checkpoint | None, started: float, as_json: bool, profile: Profile | None
) -> bool:
    """Do what the settings say; write, then print. True where Ctrl-C ended it."""
    from tot.cli.output import search_line, show
    from tot.decoders.files import write_json
    from tot.report.terminal import progress
    from tot.search.checkpoint import Checkpoint
    from tot.solver import conclude, solve

    about = {name: settings[name] for name in ("task", "question", "out")}
    config = SearchConfig.of(None, {name: value for name, value in settings.items() if name not in about})
    task = config.suited(about["task"])
    config.parts(task)  # what does not fit is refused before a file is written
    task.start(about["question"])
    config = config.model_copy(update={"prompts": task.prompts})
    out = None if about["out"] is None else Path(about["out"])
    if out is not None and checkpoint is None:
        steps = out if out.suffix == ".jsonl" else out.with_name(out.name.removesuffix(".json") + ".jsonl")
        checkpoint = Checkpoint.create(steps, settings={**about, **config.to_json(secrets=True)})
    if out is not None and out.suffix == ".jsonl":
        out = None  # the checkpoint ends in the run

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
        if out is not None and sessions:  # what was grown until then is kept
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
            checkpoint.path.unlink(missing_ok=True)  # all of it is in the run
    if as_json:
        sys.stdout.write(json.dumps(solution.summary()) + "\n")
    else:
        show(solution)
    return interrupted
