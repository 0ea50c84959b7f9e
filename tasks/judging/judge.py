"""The judge's process: runs the tests in tests.json, or score.py, on the candidate, which runs in another process.

It receives plain values from the candidate, and refers to other objects by number. It writes one JSON line per test:
null for a pass, otherwise a description of the failure, from which a model can fix the program. The first line is for
the program itself. After it, score.py has one line: its output, and the exception that ended it, if any.
"""

from __future__ import annotations

import ast
import builtins
import io
import json
import os
import sys
from contextlib import redirect_stdout, suppress
from types import ModuleType
from typing import Any

sys.path.insert(0, os.getcwd())  # noqa: PTH109

from plain import pack, unpack  # type: ignore[import-not-found]

LONGEST = 1 << 24
sys.set_int_max_str_digits(0)  # failures may contain integers of any length
results = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # discard the output of tests


class Lost(BaseException):
    """The candidate's process has ended or sends an invalid reply."""


class Raised(Exception):  # noqa: N818
    """An exception of the candidate whose type is not built in."""


class Remote:
    """An object in the candidate's process: can be called, has attributes, can be an argument. Equal only to itself."""

    def __init__(self, number: int, text: str) -> None:
        self._number, self._text = number, text

    def __repr__(self) -> str:
        return self._text

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        result, after, after_named = ask({"of": self, "arguments": [*arguments], "named": named})
        for old, new in zip([*arguments, *named.values()], [*after, *after_named.values()], strict=True):
            if isinstance(old, list | bytearray) and type(old) is type(new):
                old[:] = new
            elif isinstance(old, dict | set) and type(old) is type(new):
                old.clear()
                old.update(new)
        return result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return ask({"of": self, "attribute": name})[0]


known: dict[int, Remote] = {}


def find(name: Any) -> Remote:
    number, text = name
    if type(number) is not int or type(text) is not str:
        raise ValueError("not the name of an object")
    return known.setdefault(number, Remote(number, text))


def number_of(value: Any) -> int:
    if not isinstance(value, Remote):
        raise TypeError(f"{value!r:.100} can't be handed to the program: use plain values")
    return value._number


def read() -> Any:
    line = answers.readline(LONGEST)
    if not line.endswith(b"\n"):
        raise Lost
    try:
        return unpack(line, find)
    except ValueError:
        raise Lost from None


def ask(request: dict[str, Any]) -> Any:
    line = pack(request, number_of).encode() + b"\n"
    try:
        requests.write(line)
        requests.flush()
    except OSError:
        raise Lost from None
    answer = read()
    if not isinstance(answer, dict):
        raise Lost
    if isinstance(raised := answer.get("raised"), dict):
        raise error_of(raised)
    result = answer.get("result")
    wanted = 3 if "arguments" in request else 1
    if not isinstance(result, list) or len(result) != wanted:
        raise Lost
    if wanted == 3 and (
        type(result[1]) is not list
        or type(result[2]) is not dict
        or len(result[1]) != len(request["arguments"])
        or result[2].keys() != request["named"].keys()
    ):
        raise Lost
    return result


def error_of(raised: dict[str, Any]) -> Exception:
    """Rebuild the candidate's exception, with the same built-in type, so that tests can expect it."""
    kind, text = str(raised.get("kind")), str(raised.get("text"))
    builtin = getattr(builtins, kind, None) if raised.get("known") is True else None
    error: Exception = Raised(f"{kind}: {text}")
    if isinstance(builtin, type) and issubclass(builtin, Exception):
        with suppress(TypeError):
            error = builtin(text)
    error.line = str(raised.get("line"))  # type: ignore[attr-defined]
    return error


def short(text: str) -> str:
    return text if len(text) <= 300 else text[:300] + "..."


def description(error: BaseException) -> str:
    line = getattr(error, "line", "")
    message = str(error) if isinstance(error, Raised) else f"{type(error).__name__}: {error}"
    return short(message) + (f", in the line: {line}" if line else "")


def failure(test: str, space: dict[str, Any]) -> str | None:
    first, *more = ast.parse(test).body
    compared = first.test if not more and isinstance(first, ast.Assert) else None
    if isinstance(compared, ast.Compare) and [type(one) for one in compared.ops] == [ast.Eq]:
        sides = [compared.left, compared.comparators[0]]
        value, wanted = [eval(compile(ast.Expression(side), "test", "eval"), space) for side in sides]
        if value == wanted:
            return None
        return f"{short(ast.unparse(compared.left))} is {short(repr(value))}, not {short(repr(wanted))}"
    exec(compile(test, "test", "exec"), space)
    return None


def outcome(test: str, space: dict[str, Any]) -> str | None:
    try:
        return failure(test, space)
    except Lost:
        raise
    except BaseException as error:  # noqa: BLE001
        return f"{short(test)} fails: {description(error)}"


def names_in(tests: list[str]) -> set[str]:
    """Return the names that the tests use and do not define.

    Built-in names are included only if there are no others: a program cannot replace `set` or `abs` in the tests, but
    may define a function called `sum`.
    """
    nodes = [node for test in tests for node in ast.walk(ast.parse(test))]
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    used -= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    used -= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    used -= {(node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    return used - vars(builtins).keys() or used


def scored(names: list[Any]) -> dict[str, Any]:
    """Run score.py, whose module `candidate` has the candidate's names."""
    module = sys.modules["candidate"] = ModuleType("candidate")
    for name in names:
        if isinstance(name, str) and not name.startswith("__"):
            vars(module)[name] = ask({"global": name})[0]
    printed, error = io.StringIO(), None
    with open("score.py", encoding="utf-8") as file:  # noqa: PTH123
        source = file.read()
    try:
        with redirect_stdout(printed):
            exec(compile(source, "score.py", "exec"), {"__name__": "__main__"})
    except Lost:
        raise
    except BaseException as raised:  # noqa: BLE001
        line = getattr(raised, "line", None)  # only the candidate's exceptions have it
        error = {"text": description(raised), "candidate": line is not None}
    return {"printed": printed.getvalue()[-4000:], "error": error}


def say(result: Any) -> None:
    results.write(json.dumps(result) + "\n")
    results.flush()


def main() -> None:
    loaded = read()
    if not isinstance(loaded, dict) or not isinstance(names := loaded.get("names"), list):
        raised = loaded.get("raised") if isinstance(loaded, dict) else None
        say(description(error_of(raised)) if isinstance(raised, dict) else "it answers nonsense")
        return
    if os.path.exists("score.py"):  # noqa: PTH110
        say(None)
        say(scored(names))
        return
    with open("tests.json", encoding="utf-8") as file:  # noqa: PTH123
        tests = json.load(file)
    space: dict[str, Any] = {"__name__": "tests"}
    wanted = names_in(tests)
    for name in names:
        if isinstance(name, str) and name in wanted:
            space[name] = ask({"global": name})[0]
    say(None)
    for test in tests:
        say(outcome(test, space))


try:
    with os.fdopen(4, "wb") as requests, os.fdopen(3, "rb") as answers:
        main()
except Lost:
    pass
