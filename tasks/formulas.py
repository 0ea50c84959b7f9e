"""Read and compare mathematical answers in LaTeX, such as `\\frac{1}{2}`, with math-verify.

The library runs in a process of its own, with limits of time and memory, because a formula of a model may take for
ever to compute. Numbers are compared here. No text makes these functions raise.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import subprocess
import sys
import threading
from fractions import Fraction
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from tot.decoders.errors import OptionError
from tot.tasks.number_answers import boxes, value_of

MAX_LENGTH = 1000
"""Maximum length of a formula in characters; longer ones are compared as text."""
_SCRIPT = Path(__file__).with_name("judging") / "formulas.py"
_TIME = re.compile(r"([0-9]{1,2}):([0-5][0-9])(?:\s|\\,|~)*+(?:\\text\{)?\s*+(?:([ap])\.?\s?m\.?)?\}?", re.IGNORECASE)
_JOINT = re.compile(r"\s*+\$?(?:\s|\\quad|\\text\s*\{|\}|,|;|\band\b|\bor\b)++\$?\s*+(?:[A-Za-z]\s*+=\s*+)?")
_BASE = re.compile(r"([0-9A-Z]+)_\{?([0-9]{1,2})\}?")


def boxed(text: str) -> str | None:
    r"""Return the contents of the last complete `\boxed{}`, or None; of several in a row, all as a list."""
    found = list(boxes(text))
    contents = [content for _, _, content in found[:1]]
    for (_, end, content), (start, _, _) in zip(found[1:], found, strict=False):
        if not _JOINT.fullmatch(text, end, start):
            break
        contents.insert(0, content)
    return ", ".join(dict.fromkeys(contents)) or None


def read(text: str) -> str | None:
    """Return the answer in a text: its last box, otherwise the formula that it announces or ends in."""
    return boxed(text) or _ask("read", text[-MAX_LENGTH:])


def key(answer: str) -> str:
    r"""Return a text that equal answers share: `0.5`, `1/2` and `\frac12` have the same key.

    Numbers are equal if 12 digits are, as programs print `4.666666666666667` for 14/3.
    """
    if time := _TIME.fullmatch(answer.strip()):
        return f"{int(time[1])}:{time[2]} {time[3] or ''}".lower().strip()
    if based := _BASE.fullmatch(answer.strip("$ ")):
        return f"{based[1]}_{based[2]}"
    value = value_of(answer) if len(answer) <= MAX_LENGTH else None
    if value is None or (isinstance(value, Fraction) and value.denominator > 10**6):
        return _ask("key", answer) or " ".join(answer.lower().split())
    return str(int(value)) if value == int(value) else f"{float(value):.12g}"


def same(answer: str, reference: str) -> bool:
    """Return whether an answer equals the reference."""
    if key(answer) == key(reference):
        return True
    if any(all(form.fullmatch(one.strip("$ ")) for one in (answer, reference)) for form in (_TIME, _BASE)):
        return False
    answer, reference = (_BASE.sub(r"\1", one) for one in (answer, reference))
    return key(answer) == key(reference) or bool(_ask("same", answer, reference))


@lru_cache(maxsize=10_000)
def _ask(kind: str, *texts: str) -> Any | None:
    """Return the process's result; None for texts that are too long, invalid, or take too much time or memory."""
    if any(len(text) > MAX_LENGTH for text in texts):
        return None
    return _process().ask(kind, *texts)


class _Process:
    """The process of math-verify, started for the first request and after a failure."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: subprocess.Popen[str] | None = None

    def ask(self, *request: str) -> Any | None:
        with self._lock:
            running = self._running = self._running or self._start()
            assert running.stdin is not None
            assert running.stdout is not None
            try:
                running.stdin.write(json.dumps(request) + "\n")
                running.stdin.flush()
            except OSError:  # it could not start
                pass
            if line := running.stdout.readline():
                return json.loads(line)
            self._running = None
            if (code := running.wait()) > 0:
                raise OptionError(
                    f"math-verify can't be run (exit status {code}): pip install 'math-verify[antlr4_13_2]>=0.9'"
                )
            return None

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is for the search
        )
        atexit.register(process.kill)
        return process


@cache
def _process() -> _Process:
    return _Process()


os.register_at_fork(after_in_child=_process.cache_clear)
