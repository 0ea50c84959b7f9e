"""The judge's process: runs the tests in tests.json, or score.py, on the candidate, which runs in another process.

It receives plain values from the candidate, and refers to other objects by number. It writes one JSON line per test:
null for a pass, otherwise a description of the failure, from which a model can fix the program. The first line is for
the program itself. After it, score.py has one line: the scores it printed, its other output, and the exception that
ended it, if any.

A program may not change the scorer: arguments of score.py are copies, exceptions that end Python's loops and NaN become
errors, a star import replaces no name, and a score is all that one call of print writes.
"""

from __future__ import annotations

import ast
import builtins
import io
import json
import os
import re
import runpy
import symtable
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from fractions import Fraction
from types import ModuleType
from typing import Any, NoReturn

sys.path.insert(0, os.getcwd())  # noqa: PTH109

from plain import NaNError, pack, unpack  # type: ignore[import-not-found]

LONGEST = 1 << 24
SHOWN = 1000
"""Maximum characters of a scorer's other output."""
SCORING = os.path.exists("score.py")  # noqa: PTH110
TESTS: list[str] = [] if SCORING else json.loads(open("tests.json", encoding="utf-8").read())  # noqa: PTH123, SIM115
NAN = any("nan" in test.lower() for test in TESTS)
"""Whether the program may return NaN, which passes checks such as `not error > 1e-6`. Tests that expect it name it."""
NUMBER = re.compile(
    r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|[-+]?\d+/0*[1-9]\d*|[-+]?(?:nan|inf(?:inity)?)", re.IGNORECASE
)
sys.set_int_max_str_digits(0)  # failures may contain integers of any length
results = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # discard the output of tests


def lost() -> NoReturn:
    """End without a result: the candidate's process has ended or sends an invalid reply. Tests can't catch this."""
    os._exit(1)


class Raised(Exception):  # noqa: N818
    """An exception of the candidate whose type is not built in, or ends a loop in Python, such as StopIteration."""


class Remote:
    """An object in the candidate's process: can be called, has attributes, can be an argument. Equal only to itself."""

    def __init__(self, number: int, text: str) -> None:
        self._number, self._text = number, text if text.startswith("<") else f"<{text}>"  # never a number

    def __repr__(self) -> str:
        return self._text

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call it. Its changes of lists, sets and dicts reach a test, but no scorer, if it returns None."""
        result, *changed = ask({"of": self, "arguments": [*arguments], "named": named, "changes": not SCORING})
        for old, new in zip([*arguments, *named.values()], changed, strict=False):
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
        lost()
    try:
        return unpack(line, find, nan=NAN)
    except NaNError:
        raise error_of({"kind": "ValueError", "text": "the program returned NaN"}) from None
    except ValueError:
        lost()


def ask(request: dict[str, Any]) -> Any:
    line = pack(request, number_of).encode() + b"\n"
    try:
        requests.write(line)
        requests.flush()
    except OSError:
        lost()
    answer = read()
    if not isinstance(answer, dict):
        lost()
    if isinstance(raised := answer.get("raised"), dict):
        raise error_of(raised)
    result = answer.get("result")
    if not isinstance(result, list) or not result:
        lost()
    changes = request.get("changes") and result[0] is None
    if len(result) != 1 + (len(request["arguments"]) + len(request["named"]) if changes else 0):
        lost()
    return result


def error_of(raised: dict[str, Any]) -> Exception:
    """Rebuild the candidate's exception, with the same built-in type, so that tests can expect it."""
    kind, text, line = (str(raised.get(key) or "") for key in ("kind", "text", "line"))
    builtin = getattr(builtins, kind, None) if raised.get("known") is True else None
    said = short(f"{kind}: {text}") + (f", in the line: {line}" if line else "")
    error: Exception = Raised(said)
    ends_loops = kind in ("StopIteration", "StopAsyncIteration")
    if isinstance(builtin, type) and issubclass(builtin, Exception) and not ends_loops:
        with suppress(TypeError):
            error = builtin(said if SCORING else text)  # a scorer may print it: it is never a number
    error.program = said  # type: ignore[attr-defined]
    return error


def short(text: str) -> str:
    return text if len(text) <= 300 else text[:300] + "..."


def description(error: BaseException) -> str:
    return getattr(error, "program", None) or short(f"{type(error).__name__}: {error}".removesuffix(": "))


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
        failed = failure(test, space)
    except BaseException as error:  # noqa: BLE001
        return f"{short(test)} fails: {description(error)}"
    return failed if failed or known else f"{short(test)} uses nothing of the program"


def names_in(tests: list[str]) -> set[str]:
    """Return the global names that the tests use and do not define.

    A built-in name is included only if it is the only one: a program cannot replace `set` or `abs` in the tests, but
    may define a function called `sum`.
    """
    used, defined = set(), set()
    for table in (table for test in tests for table in tables_of(symtable.symtable(test, "test", "exec"))):
        for symbol in table.get_symbols():
            if table.get_type() == "module" or symbol.is_declared_global():
                defined |= {symbol.get_name()} if symbol.is_assigned() or symbol.is_imported() else set()
            if symbol.is_referenced() and (symbol.is_global() or table.get_type() == "module"):
                used.add(symbol.get_name())
    used -= defined
    return used - vars(builtins).keys() or (used if len(used) == 1 else set())


def tables_of(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from tables_of(child)


def module_of(names: set[str]) -> ModuleType:
    """Return the module `candidate` with the program's names. A star import of it replaces no name."""

    def attribute(name: str) -> Any:
        if name == "__all__":
            taken = sys._getframe(1).f_globals.keys() | vars(builtins).keys()
            return [one for one in names - taken if not one.startswith("_")]
        if name in names:
            return ask({"global": name})[0]
        raise AttributeError(f"the program defines no {name!r}")

    module = ModuleType("candidate")
    vars(module).update(__getattr__=attribute, __dir__=lambda: sorted(names))
    return module


class Output(io.StringIO):
    """The standard output of score.py. Text of the program inside of a line, or with several lines, is not a score."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        """The text of each call: `print` writes its values and their separators one by one."""

    def write(self, text: str) -> int:
        self.pieces += [text] if text else []
        return super().write(text)

    def parted(self) -> tuple[list[Any], str]:
        """Return the scores, and the rest of the text."""
        scores, rest = [], []
        for before, text, after in zip(["\n", *self.pieces], self.pieces, [*self.pieces[1:], "\n"], strict=False):
            alone = before.endswith("\n") and (text.endswith("\n") or after.startswith("\n"))
            score = score_in(text.strip()) if alone else None
            rest += [text] if score is None else []
            scores += [] if score is None else [score]
        return scores, "".join(rest)


def score_in(text: str) -> Any:
    """Return the number or the JSON object in a text; None for other text."""
    if NUMBER.fullmatch(text):
        return float(Fraction(text)) if "/" in text else float(text)
    try:
        found = json.loads(text, object_pairs_hook=unique) if text.startswith("{") else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


def scored() -> dict[str, Any]:
    """Run score.py. Return the scores that it printed, its other output and its error."""
    output, error = Output(), None
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # Python defines them only with site-packages
    try:
        with redirect_stdout(output):
            runpy.run_path(os.path.abspath("score.py"), run_name="__main__")  # noqa: PTH100
    except BaseException as raised:  # noqa: BLE001
        if not isinstance(raised, SystemExit) or raised.code not in (None, 0):
            error = {"text": description(raised), "candidate": hasattr(raised, "program")}
    scores, text = output.parted()
    return {"scores": scores[:2], "text": text.strip()[-SHOWN:], "error": error}


def say(result: Any) -> None:
    results.write(json.dumps(result) + "\n")
    results.flush()


def main() -> None:
    loaded = read()
    if not isinstance(loaded, dict) or not isinstance(names := loaded.get("names"), list):
        raised = loaded.get("raised") if isinstance(loaded, dict) else None
        say(description(error_of(raised)) if isinstance(raised, dict) else "it answers nonsense")
        return
    names = {name for name in names if isinstance(name, str) and not name.startswith("__")}
    sys.modules["candidate"] = module_of(names)
    if SCORING:
        say(None)
        say(scored())
        return
    space: dict[str, Any] = {"__name__": "tests"}
    for name in names & names_in(TESTS):
        value = ask({"global": name})[0]
        if isinstance(value, Remote):  # a program gives the tests functions and classes, no constants
            space[name] = value
    say(None)
    for test in TESTS:
        say(outcome(test, space))


with os.fdopen(4, "wb") as requests, os.fdopen(3, "rb") as answers:
    main()
