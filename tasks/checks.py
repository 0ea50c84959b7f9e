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
from importlib.resources import files

from tot.sandbox import Sandbox, pool


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
    judge = (_source("judge"), {"plain.py": _source("plain"), "tests.json": json.dumps(list(tests))})
    candidate = (_source("candidate"), {"plain.py": _source("plain"), "solution.py": program})
    judge_run, run = sandbox.run_pair(judge, candidate)
    results = [_result(line) for line in judge_run.output.splitlines(keepends=True) if line.endswith("\n")]
    failures = [result for result in results if result is not None]
    if not failures and len(results) != 1 + len(tests):
        ends = {
            "time": f"it did not end within {sandbox.seconds:g} s",
            "output": f"it wrote more than {sandbox.output} KiB",
            "killed": f"it was stopped: it wanted more than {sandbox.memory} MiB, or crashed",
            "exited": "it ended before its tests did",
        }
        failures.append(f"The program can't be tested: {ends[judge_run.ended if not judge_run.ok else run.ended]}.")
    return Checked(sum(result is None for result in results[1:]), tuple(failures))


async def acheck(program: str, tests: Sequence[str], sandbox: Sandbox) -> Checked:
    """Run `check` in a thread, without blocking the event loop."""
    return await asyncio.get_running_loop().run_in_executor(pool(), check, program, tests, sandbox)


@cache
def _source(name: str) -> str:
    return (files("tot.tasks.judging") / f"{name}.py").read_text(encoding="utf-8")


def _result(line: str) -> str | None:
    result = json.loads(line)
    return None if result is None else str(result)
