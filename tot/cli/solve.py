"""`tot solve`: answer one question. With --out, the run is saved step by step and can be resumed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tot.cli.flags import is_given, takes, writable
from tot.config import ModelFlags, SearchConfig
from tot.decoders.errors import OptionError, TaskError

if TYPE_CHECKING:
    from tot.search.checkpoint import Checkpoint
    from tot.task.task import Task

_WITH_RESUME = ("resume", "as_json", "live")
_FILES = ("score", "start", "best")
_CODE = ("task", *_FILES, "tools", "search", "generator", "evaluator", "decoder")
"""Options that may name files, which a resumed run uses only if the user names them again."""


@takes(ModelFlags, SearchConfig)
def solve_command(
    context: typer.Context,
    *,
    task: Annotated[
        str | None,
        typer.Argument(help="A task's name, such as gsm8k, or path/to/file.py:ClassName; or a question to `ask`."),
    ] = None,
    question: Annotated[
        str | None, typer.Argument(help="The question; - reads standard input; an example by default.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Take the question from this file: .jsonl, .json, .csv, .parquet or .txt.")
    ] = None,
    row: Annotated[int, typer.Option(min=0, help="Which row of --data, counted from 0.")] = 0,
    score: Annotated[
        str | None, typer.Option(help="optimize: a script that prints the score of the module `candidate`.")
    ] = None,
    start: Annotated[str | None, typer.Option(help="optimize: the first program.")] = None,
    best: Annotated[str | None, typer.Option(help="optimize: write the best program so far to this file.")] = None,
    given: dict[str, Any],
    out: Annotated[
        Path | None,
        typer.Option(help="Write the run (answer, usage, tree) to this .json file, and each step to a .jsonl beside."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file of --out.")] = False,
    resume: Annotated[Path | None, typer.Option(help="Resume a killed run from its .jsonl file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    live: Annotated[
        bool, typer.Option("--live", help="Show the tree in a browser while it grows, at an address of this machine.")
    ] = False,
) -> None:
    """Grow a tree of thoughts about a question and answer it."""
    files = {name: one for name, one in zip(_FILES, (score, start, best), strict=True) if one is not None}
    from tot.search.checkpoint import Checkpoint

    checkpoint: Checkpoint | None = None
    if resume is not None:
        for name in context.params:
            if name not in (*_WITH_RESUME, *_CODE) and is_given(context, name):
                raise OptionError(f"--resume uses the options of the run: leave {name.replace('_', '-')!r} out")
        checkpoint = Checkpoint.resume(resume)
        context.call_on_close(checkpoint.close)
        settings = _resumed(resume, checkpoint, ({} if task is None else {"task": _with_files(task, files)}) | given)
    else:
        if task is None:
            raise OptionError(
                "no task is given: give its name, such as gsm8k, or path/to/file.py:ClassName, or a question in quotes"
            )
        if question is None and data is None and _is_question(task):
            task, question = "ask", task
        task = _with_files(task, files)
        place = None if out is None else str(writable(out))
        if out is not None and out.suffix != ".jsonl" and out.exists() and not overwrite:
            raise OptionError(f"--out {out} exists: give another file, or add --overwrite")
        asked = _question(task, question, data, row)
        settings = {"task": task, "question": asked[0], "reference": asked[1], "out": place, **given}
    if _run(settings, checkpoint, overwrite, as_json, live):
        raise typer.Exit(130)


@takes(ModelFlags, SearchConfig)
def ask_command(
    *,
    question: Annotated[list[str], typer.Argument(help="The question; quotes are not needed.")],
    given: dict[str, Any],
) -> None:
    """Answer a question: `tot solve ask`, without its options for files."""
    settings = {"task": "ask", "question": " ".join(question), **given}
    if _run(settings, None, overwrite=False, as_json=False, live=False):
        raise typer.Exit(130)


def _is_question(text: str) -> bool:
    """Return whether the only argument is a question: not a task, and not one word, which may be a mistyped task."""
    from tot.registry import TASKS

    named = re.fullmatch(r"[\w./-]+(?::[\w-]+(?:[=,]\S.*)?)?", text, re.ASCII) and text != "-"
    return text not in TASKS and not named and not text.rpartition(":")[0].endswith(".py")


def _resumed(path: Path, checkpoint: Checkpoint, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run, with the code that the user names again; the run is written beside its trace.

    Raises OptionError if the trace names other code, or if it would overwrite a file that is not a run.
    """
    from tot.registry import refuse_code
    from tot.tree.tree import ThoughtTree

    recorded = checkpoint.header.get("settings")
    if not isinstance(recorded, dict) or not all(isinstance(recorded.get(name), str) for name in ("task", "question")):
        raise OptionError(f"{path} was not written by `tot solve`: resume it with solve(..., checkpoint=...)")
    named = {{"tools": "tool"}.get(name, name): value for name, value in named.items()}
    refuse_code({name: value for name, value in recorded.items() if name not in named}, path)
    out = path.with_suffix(".json")
    if out == path or str(recorded.get("out")).endswith(".jsonl"):
        return {**recorded, **named, "out": None}  # the trace ends in the run
    if out.exists():
        ThoughtTree.load(out)
    return {**recorded, **named, "out": str(out)}


def _with_files(task: str, files: Mapping[str, str]) -> str:
    """Return the task with these files as options, as absolute paths, so that a run can be resumed anywhere."""
    if not files:
        return task
    named = {name: str(Path(path).resolve()) for name, path in files.items()}
    for name, path in named.items():
        if "," in path:
            raise OptionError(f"--{name} {path} contains a comma, which separates options: rename it")
    options = ",".join(f"{name}={path}" for name, path in named.items())
    return f"{task}{',' if '=' in task else ':'}{options}"


def _question(task: str, question: str | None, data: Path | None, row: int) -> tuple[str, Any]:
    """The question as given, from standard input, from a row of data, or the task's example; and the row's reference,
    if it has one."""
    from tot.evaluation.data import row as read_row
    from tot.evaluation.questions import question_of
    from tot.registry import load_task

    try:
        chosen = load_task(task)
    except OptionError as error:
        one_word = question is None and data is None and re.fullmatch(r"[\w-]+", task)
        raise OptionError(f"{error}; if it is a question, type tot solve ask {task}") if one_word else error from None
    if data is not None:
        if question is not None:
            raise OptionError(f"both --data and a question are given: leave --data or {question[:40]!r} out")
        try:
            found = read_row(data, row)
            text = question_of(chosen, found)
        except TaskError as error:
            raise OptionError(f"{data}, row {row} {error}; give another row or file") from None
        try:
            return text, chosen.reference_of(found)
        except Exception:  # a row without an answer can be asked  # noqa: BLE001
            return text, None
    if question is None:
        return chosen.example(), None
    try:
        return (sys.stdin.read() if question == "-" else question), None
    except UnicodeDecodeError as error:
        raise OptionError(f"standard input is not {error.encoding} text ({error.reason}): convert it first") from None


def _run(
    settings: Mapping[str, Any],
    checkpoint: Checkpoint | None,
    overwrite: bool,
    as_json: bool,
    live: bool,
) -> bool:
    """Solve, save and print. Returns whether Ctrl-C ended the search."""
    from tot.api import run_search
    from tot.cli.live_view import watched
    from tot.cli.output import show
    from tot.decoders.files import write_json
    from tot.report.terminal import complain
    from tot.running import run_to_end
    from tot.search.checkpoint import Checkpoint
    from tot.serving.live import LiveSearches

    about: dict[str, Any] = {name: settings.get(name) for name in ("task", "question", "reference", "out")}
    config = SearchConfig.of(None, {name: value for name, value in settings.items() if name not in about})
    task = config.suited(about["task"])
    config.parts(task)  # refuse parts that do not fit before a file is written
    task.start(about["question"])
    config = config.model_copy(update={"prompts": task.prompts.kind})
    stack, runs = ExitStack(), LiveSearches()
    out = None if about["out"] is None else Path(about["out"])
    resumed = checkpoint is not None
    if out is not None and checkpoint is None:
        steps = out if out.suffix == ".jsonl" else out.with_name(out.name.removesuffix(".json") + ".jsonl")
        checkpoint = Checkpoint.create(steps, overwrite, settings={**about, **config.to_json(secrets=True)})
    if out is not None and out.suffix == ".jsonl":
        out = None  # the checkpoint ends in the run

    if live:
        from tot.serving.pages import served

        address = stack.enter_context(served(runs, "Searches"))
    search = stack.enter_context(watched(about["question"], "tot solve", quiet=as_json, runs=runs))
    if live:
        search.votes = True
        complain(f"tot solve: the tree is shown at {address}#run-{search.id}")

    with stack:
        try:
            running = run_search(
                task, about["question"], config, checkpoint=checkpoint, watch=search.watch, keep_best=True
            )
            solution = search.solution = run_to_end(running)
        except BaseException:
            if checkpoint is not None:
                checkpoint.close()
                if checkpoint.empty and not resumed:
                    checkpoint.path.unlink(missing_ok=True)
            if out is not None and search.run is not None:  # keep the unfinished tree
                with suppress(TaskError):  # the disk may be full, and this error is not the first
                    write_json(out, search.run.solution().to_json())
            raise
    interrupted = solution.stopped == "interrupted"
    saved = solution.to_json() | {"task": about["task"], "model": config.to_json()["model"]}
    if out is not None and checkpoint is not None:
        write_json(out, saved, otherwise=f"free disk space, then continue with --resume {checkpoint.path}")
    if checkpoint is not None and interrupted:
        checkpoint.close()
    elif checkpoint is not None:
        checkpoint.finish(saved)
        if out is not None:
            checkpoint.path.unlink(missing_ok=True)  # the run has all of it
    scored = {} if about["reference"] is None else _scored(task, solution.answer, about["reference"])
    if as_json:
        sys.stdout.write(json.dumps({**solution.summary(), **scored}) + "\n")
    else:
        show(
            solution,
            out or (None if checkpoint is None else checkpoint.path),
            _verdict(scored, about["reference"] == about["question"]),
        )
    return interrupted


def _scored(task: Task, answer: Any, reference: Any) -> dict[str, Any]:
    """The reference as the task reads it, and the score of an answer."""
    from tot.evaluation.questions import parsed_reference
    from tot.task.checked import CheckedTask

    score = CheckedTask(task).score(answer, reference)
    return {"reference": parsed_reference(task, reference), "score": score}


def _verdict(scored: Mapping[str, Any], itself: bool) -> str:
    """Whether the answer is right, in a line; with the reference, unless that is the question `itself`."""
    from tot.report.terminal import brief

    if not scored:
        return ""
    judged = {1.0: "Right", 0.0: "Wrong"}.get(scored["score"], f"Score {scored['score']:.2f}")
    if itself:
        return f"{judged}."
    return f"{judged}. Reference: {brief(str(scored['reference']), 100)}"
