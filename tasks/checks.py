"""Run tests on a program, and describe failures so that a model can fix the program.

The program and its tests run in two sandboxes. The tests call the program through a pipe and receive plain values, so a
program cannot read its tests, and can pass them only by correct results.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as resources
from typing import Any

from tot.sandbox import Files, ProgramResult, Sandbox, pool


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a program's tests."""

    passed: int
    failures: tuple[str, ...]
    """One text for each failed test, or one text for a program that does not finish."""


def check(program: str, tests: Sequence[str], sandbox: Sandbox) -> Checked:
    """Run tests on a program, in order. A test is Python statements, and fails if they raise.

    Raises OptionError if this machine cannot confine programs.
    """
    judge_run, run, lines = run_judge({"tests.json": json.dumps(list(tests))}, program, sandbox)
    results = [None if line is None else str(line) for line in lines]
    failures = [result for result in results if result is not None]
    if not failures and len(results) != 1 + len(tests):
        failures.append(f"The program can't be tested: {ended_early(judge_run, run, sandbox)}.")
    return Checked(sum(result is None for result in results[1:]), tuple(failures))


def run_judge(files: Files, program: str, sandbox: Sandbox) -> tuple[ProgramResult, ProgramResult, list[Any]]:
    """Run the judge with `files` on a program. Return how both ended, and the lines that the judge wrote.

    Raises OptionError if this machine cannot confine programs.
    """
    judge = (_source("judge"), {**files, "plain.py": _source("plain")})
    candidate = (_source("candidate"), {"plain.py": _source("plain"), "solution.py": program})
    judge_run, run = sandbox.run_pair(judge, candidate)
    lines = judge_run.output.splitlines(keepends=True)
    return judge_run, run, [json.loads(line) for line in lines if line.endswith("\n")]


def ended_early(judge: ProgramResult, run: ProgramResult, sandbox: Sandbox) -> str:
    """Describe why a judge has not finished."""
    ends = {
        "time": f"it did not end within {sandbox.seconds:g} s",
        "output": f"it wrote more than {sandbox.output} KiB",
        "killed": f"it was stopped: it wanted more than {sandbox.memory} MiB, or crashed",
        "exited": "it ended before its tests did",
    }
    return ends[judge.ended if judge.ended != "exited" else run.ended]


async def acheck(program: str, tests: Sequence[str], sandbox: Sandbox) -> Checked:
    """Run `check` in a thread, without blocking the event loop."""
    return await asyncio.get_running_loop().run_in_executor(pool(), check, program, tests, sandbox)


@cache
def _source(name: str) -> str:
    return (resources("tot.tasks.judging") / f"{name}.py").read_text(encoding="utf-8")
