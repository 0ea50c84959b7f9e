"""The script that reads and compares formulas with math-verify, for `tot.tasks.formulas`.

Each line of standard input is a request as JSON, a list of its kind and texts; each line of output is its result. A
request that takes more than `SECONDS` of processor time ends the process, even in the middle of a long multiplication.
"""

from __future__ import annotations

import json
import logging
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import sympy  # type: ignore[import-untyped]
from math_verify import LatexExtractionConfig, parse, verify  # type: ignore[import-untyped]

SECONDS = 2.0
_MEMORY = 2 << 30
"""Bytes of address space."""
_BOXED = [LatexExtractionConfig(boxed_match_priority=0)]
_PLAIN = (
    (re.compile(r"\*\*"), "^"),  # Python's notation
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])"), r"\\pi"),
    (re.compile(r"(?<=[0-9])\s+(?:[A-Za-z]{3,}[\s.]*+)++\Z"), ""),  # 18 dollars
    (
        re.compile(r"\A((?!(?:arc)?(?:sin|cos|tan|cot|sec|csc)|log|exp)[A-Za-z]{3,}(?:[ -][A-Za-z]+)*+)\.?\Z"),
        r"\\text{\1}",
    ),
)
"""Replacements of plain text by LaTeX."""


def main() -> None:
    logging.disable(logging.CRITICAL)  # math-verify warns that its own time limits, which are signals, are off
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with suppress(OSError, ValueError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    kinds: dict[str, Callable[..., Any]] = {"read": _read, "key": _key, "same": _same}
    for line in sys.stdin:
        kind, *texts = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            result = kinds[kind](*texts)
        except Exception:  # sympy raises anything  # noqa: BLE001
            result = None
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


def _read(text: str) -> str | None:
    """Return the answer that a text announces or ends in, as it is written there."""
    found = parse(text, parsing_timeout=None)
    return str(found[-1]) if found else None


def _same(answer: str, reference: str) -> bool:
    return bool(verify(_parsed(reference), _parsed(answer), timeout_seconds=None))


def _key(answer: str) -> str | None:
    """Return a text that equal formulas share; None if the answer is not a formula."""
    found = _parsed(answer)
    return None if isinstance(found[0], str) else _canonical(found[0])


def _parsed(answer: str) -> list[Any]:
    for pattern, latex in _PLAIN:
        answer = pattern.sub(latex, answer)
    return parse(f"\\boxed{{{answer}}}", _BOXED, parsing_timeout=None) or [answer.strip()]


def _canonical(formula: Any) -> str:
    if isinstance(formula, sympy.Eq) and formula.lhs.is_Symbol:  # x = 5
        formula = formula.rhs
    if isinstance(formula, sympy.MatrixBase):
        return f"matrix {formula.shape} {_each(formula)}"
    if isinstance(formula, sympy.Tuple):
        return f"({_each(formula)})"
    if isinstance(formula, sympy.FiniteSet):
        return f"{{{_each(formula)}}}"
    if not isinstance(formula, sympy.Expr):
        return str(formula)
    formula = sympy.nsimplify(formula.doit(), rational=True).expand()  # 0.5 is 1/2
    if formula.is_Integer:
        return str(formula)
    if formula.is_number and formula.is_real:
        return f"{float(formula):.12g}"
    return str(sympy.N(formula, 12) if formula.is_number else sympy.simplify(formula))


def _each(formulas: Iterable[Any]) -> str:
    return ", ".join(map(_canonical, formulas))


if __name__ == "__main__":
    main()
