"""Which tests a program passes, and what is wrong, in words that a model can mend it by.

The program and its tests run in two sandboxes. The tests call the program through a pipe and get plain values back, so
that a program can neither read its tests nor pass them by other means than right results.
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
    """What is wrong: a text for each test that fails, or one for a program that did not come to its end."""


def check(program: str, tests: Sequence[str], sandbox: Sandbox) -> Checked:
    """Run tests, Python statements that raise where they fail, one after another, on a program.

    Raises OptionError where programs can't be confined here.
    """
    judge = (_source("judge"), {"plain.py": _source("plain"), "tests.json": json.dumps(list(tests))})
    candidate = (_source("candidate"), {"plain.py": _source("plain"), "solution.py": program})
    judged, ran = sandbox.run_pair(judge, candidate)
    results = [_result(line) for line in judged.output.splitlines(keepends=True) if line.endswith("\n")]
    failures = [result for result in results if result is not None]
    if not failures and len(results) != 1 + len(tests):
        ends = {
            "time": f"it did not end within {sandbox.seconds:g} s",
            "output": f"it wrote more than {sandbox.output} KiB",
            "killed": f"it was stopped: it wanted more than {sandbox.memory} MiB, or crashed",
            "exited": "it ended before its tests did",
        }
        failures.append(f"The program can't be tested: {ends[judged.ended if not judged.ok else ran.ended]}.")
    return Checked(sum(result is None for result in results[1:]), tuple(failures))


async def acheck(program: str, tests: Sequence[str], sandbox: Sandbox) -> Checked:
    """`check`, while whatever else is under way goes on."""
    return await asyncio.get_running_loop().run_in_executor(pool(), check, program, tests, sandbox)


@cache
def _source(name: str) -> str:
    return (files("tot.tasks.judging") / f"{name}.py").read_text(encoding="utf-8")


def _result(line: str) -> str | None:
    found = json.loads(line)
    return None if found is None else str(found)
