"""A program in a sandbox: which tests it passes, and what is wrong, in words that a model can mend it by.

A program that wants to deceive its tests can: it runs where they do.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from tot.sandbox import Ran, Sandbox

# A line that begins with the token is a result, of the program first, then of each test: null where it passes.
_PROGRAM = """
import ast, json, os, traceback

def say(result):
    os.write(1, f"\\nTOKEN{json.dumps(result)}\\n".encode())

def short(text):
    return text if len(text) <= 300 else text[:300] + "..."

def told(error):
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "solution.py"]
    where = f", in the line: {frames[-1].line}" if frames else ""
    return short(f"{type(error).__name__}: {error}") + where

def failure(test):
    first, *more = ast.parse(test).body
    compared = first.test if not more and isinstance(first, ast.Assert) else None
    if isinstance(compared, ast.Compare) and [type(one) for one in compared.ops] == [ast.Eq]:
        sides = [compared.left, compared.comparators[0]]
        value, wanted = [eval(compile(ast.Expression(side), "test", "eval"), space) for side in sides]
        said = f"{short(ast.unparse(compared.left))} is {short(repr(value))}, not {short(repr(wanted))}"
        return None if value == wanted else said
    exec(compile(test, "test", "exec"), space)

def outcome(test):
    try:
        return failure(test)
    except BaseException as error:
        return f"{short(test)} fails: {told(error)}"

space = {"__name__": "solution"}
try:
    exec(compile(open("solution.py", encoding="utf-8").read(), "solution.py", "exec"), space)
except BaseException as error:
    say(told(error))
    raise SystemExit
say(None)
for test in json.load(open("tests.json", encoding="utf-8")):
    say(outcome(test))
"""


@dataclass(frozen=True, slots=True)
class Checked:
    """What came of a program's tests."""

    passed: int
    failures: tuple[str, ...]
    """What is wrong: a text for each test that fails, or one for a program that did not come to its end."""


def check(program: str, tests: Sequence[str], sandbox: Sandbox) -> Checked:
    """Run tests, Python statements that raise where they fail, one after another, after a program.

    Raises OptionError where programs can't be confined here.
    """
    harness, files, token = _prepared(program, tests)
    return _read(sandbox.run(harness, files), token, len(tests), sandbox)


async def acheck(program: str, tests: Sequence[str], sandbox: Sandbox) -> Checked:
    """`check`, while whatever else is under way goes on."""
    harness, files, token = _prepared(program, tests)
    return _read(await sandbox.arun(harness, files), token, len(tests), sandbox)


def _prepared(program: str, tests: Sequence[str]) -> tuple[str, dict[str, str], str]:
    token = secrets.token_hex(8)
    files = {"solution.py": program, "tests.json": json.dumps(list(tests))}
    return _PROGRAM.replace("TOKEN", token), files, token


def _said(ran: Ran, token: str) -> list[str | None]:
    return [_result(line[len(token) :]) for line in ran.output.splitlines() if line.startswith(token)]


def _read(ran: Ran, token: str, tests: int, sandbox: Sandbox) -> Checked:
    said = _said(ran, token)
    failures = [result for result in said if result is not None]
    if ran.ended != "exited" or ran.code != 0 or (not failures and len(said) != 1 + tests):
        ends = {
            "time": f"it did not end within {sandbox.seconds:g} s",
            "output": f"it wrote more than {sandbox.output} KiB",
            "killed": f"it was stopped: it wanted more than {sandbox.memory} MiB, or crashed",
            "exited": "it ended before its tests did",
        }
        failures.append(f"The program can't be tested: {ends[ran.ended]}.")
    return Checked(sum(result is None for result in said[1:]), tuple(failures))


def _result(text: str) -> str | None:
    try:
        found = json.loads(text)
    except ValueError:
        found = "a result that can't be read"
    return None if found is None else str(found)
