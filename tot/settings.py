"""What `tot solve` was asked, as it is kept in a trace to go on from, and the doing of it: files first, then screen."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from tot.data import row as read_row
from tot.decoders.budget import Budget
from tot.decoders.errors import OptionError
from tot.named import load_task, parts_of
from tot.report.terminal import Progress, show
from tot.search.problem import Problem
from tot.solver import conclude, solve
from tot.trace import Trace
from tot.tree import write_json


class Settings(BaseModel):
    """What `tot solve` was asked, as it is kept in a trace to go on from."""

    model_config = ConfigDict(extra="forbid")

    task: str
    question: str
    model: str = "smollm2-135m"
    decoder: str = "ar"
    decoder_options: dict[str, str] = {}
    search: str | None = None
    generator: str | None = None
    evaluator: str | None = None
    thoughts: int | None = None
    breadth: int | None = None
    depth: int | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    seed: int = 0
    budget: dict[str, float | None] = {}
    dtype: str = "auto"
    device: str = "auto"
    kv_budget: str | None = None
    reproducible: bool = False
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


def pairs(options: list[str]) -> dict[str, str]:
    """name=value texts as a mapping."""
    split = [option.partition("=") for option in options]
    for option, (name, equals, _) in zip(options, split, strict=True):
        if not (name.strip() and equals) or name.strip() in ("dtype", "device", "kv_budget", "tokenizer"):
            raise OptionError(f"--decoder-option {option!r} can't be read: write NAME=VALUE, such as k=4")
    return {name.strip(): value.strip() for name, _, value in split}


def checked(out: Path) -> Path:
    if not out.resolve().parent.is_dir():
        raise OptionError(f"--out {out}: the folder {out.resolve().parent} does not exist: make it first")
    if out.is_dir():
        raise OptionError(f"--out {out} is a folder: give a file in it")
    return out


def carry_out(settings: Settings, trace: Trace | None, started: float, as_json: bool) -> bool:
    """Run what the settings say; write, then print. True where Ctrl-C ended it."""
    task = load_task(settings.task)
    task.start(settings.question)
    parts = parts_of(
        task,
        settings.search,
        settings.generator,
        settings.evaluator,
        search_options={"thoughts": settings.thoughts, "breadth": settings.breadth, "depth": settings.depth},
        generator_options={"temperature": settings.temperature},
    )
    decoder = _parse_decoder(settings.decoder)
    budget = Budget.model_validate(settings.budget)
    out = None if settings.out is None else Path(settings.out)
    if out is not None and trace is None:
        steps = out if out.suffix == ".jsonl" else out.with_name(out.name.removesuffix(".json") + ".jsonl")
        trace = Trace.create(steps, settings=settings.model_dump(mode="json"))

    problems: list[Problem] = []
    try:
        with Progress(problems, started, quiet=as_json):
            solution = solve(
                task,
                settings.question,
                model=None if settings.model == "none" else settings.model,
                decoder=decoder,
                **parts,
                budget=budget,
                max_tokens=settings.max_tokens,
                seed=settings.seed,
                trace=trace,
                reproducible=settings.reproducible,
                watch=lambda problem: problems.append(problem) if not problems else None,
                dtype=settings.dtype,
                device=settings.device,
                kv_budget=settings.kv_budget,
                **settings.decoder_options,
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


def _parse_decoder(text: str) -> Any:
    """`ar`, or `generate=ar,evaluate=ar` as a mapping from purpose to decoder."""
    if "=" not in text:
        return text
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(separator and name for _, separator, name in pairs):
        raise OptionError(f"--decoder {text!r} can't be read: write generate=NAME,evaluate=NAME")
    return {purpose.strip(): name.strip() for purpose, _, name in pairs}
