"""The candidate's process: runs solution.py, then serves the requests of the judge.

A candidate can manipulate this process. It can only affect the replies, which the judge does not trust.
"""

from __future__ import annotations

import builtins
import os
import sys
import traceback
from contextlib import suppress
from types import ModuleType
from typing import Any

sys.path.insert(0, os.getcwd())  # noqa: PTH109

from plain import pack, unpack  # type: ignore[import-not-found]

SOLUTION = "solution.py"


class Objects(list[Any]):
    """Objects that the judge refers to by number."""

    def name(self, value: Any) -> list[Any]:
        for number, known in enumerate(self):
            if known is value:
                return [number, repr(value)[:300]]
        self.append(value)
        return [len(self) - 1, repr(value)[:300]]

    def find(self, name: Any) -> Any:
        return self[int(name)]


def described(error: BaseException) -> dict[str, Any]:
    """Return an exception as data: its type, its text and the line of the program that raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == SOLUTION]
    kind = type(error)
    known = getattr(builtins, kind.__name__, None) is kind
    return {
        "kind": kind.__name__,
        "known": known,
        "text": str(error)[:300],
        "line": (frames[-1].line or "") if frames else "",
    }


def answered(request: dict[str, Any], module: ModuleType, objects: Objects) -> Any:
    """Return the value of a call, an attribute or a global name; if asked, for a call without a value its arguments."""
    if "global" in request:
        return [vars(module)[request["global"]]]
    target = request["of"]
    if "attribute" in request:
        return [getattr(target, request["attribute"])]
    arguments, named = request["arguments"], request["named"]
    result = target(*arguments, **named)
    return [result, *arguments, *named.values()] if request["changes"] and result is None else [result]


def main() -> None:
    objects = Objects()
    with os.fdopen(3, "rb") as requests, os.fdopen(4, "wb") as answers:

        def say(value: Any) -> None:
            with suppress(Exception):  # the program may have replaced it
                sys.stdout.flush()
            answers.write(pack(value, objects.name).encode() + b"\n")
            answers.flush()

        module = ModuleType("solution")
        sys.modules["solution"] = module
        try:
            with open(SOLUTION, encoding="utf-8") as file:  # noqa: PTH123
                exec(compile(file.read(), SOLUTION, "exec"), vars(module))
        except BaseException as error:  # noqa: BLE001
            say({"raised": described(error)})
            return
        say({"names": [name for name in vars(module) if isinstance(name, str)]})
        for line in requests:
            try:
                answer = {"result": answered(unpack(line, objects.find), module, objects)}
            except BaseException as error:  # noqa: BLE001
                answer = {"raised": described(error)}
            try:
                say(answer)
            except Exception as error:  # the result cannot be sent  # noqa: BLE001
                say({"raised": described(error)})


main()
