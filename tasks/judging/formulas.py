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
_ROUND = 10
"""A number with fewer digits is round: an exact number that is close to it is another one."""
_BOXED = [LatexExtractionConfig(boxed_match_priority=0)]
_EMPTY = (
    r"\\varnothing\b|∅|\\\{\s*\\\}"
    r"|\A\s*(?:\\text\s*\{)?\s*(?:no (?:real )?solutions?|(?:the )?empty set)\s*\}?\.?\s*\Z"
)
_DEGREES = (
    r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\^\{?[0-9]\}?)?)\s*(?:\\left)?[({]?\s*(-?[0-9.]+)\s*\^\s*\{?\\circ\s*\}?"
    r"\s*(?:\\right)?[)}]?"
)
_PLAIN: tuple[tuple[re.Pattern[str], Any], ...] = (
    (re.compile(_EMPTY, re.IGNORECASE), r"\\emptyset"),
    (re.compile(r"°|\\degree\b"), r"^\\circ"),
    (re.compile(_DEGREES), r"\1(\\frac{\2\\pi}{180})"),
    (re.compile(r"\A\s*\(\s*[a-z](?:\s*,\s*[a-z])+\s*\)\s*=\s*(?=\()"), ""),  # (x, y) = (1, 2)
    (re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|bar)\s*\{([0-9]+)\}"), lambda match: _repeating(*match.groups())),
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
    sys.set_int_max_str_digits(100_000)
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
    """Compare formulas whose keys differ. math-verify rounds numbers to six decimals: 1/2004! is 1/2006!."""
    given, wanted = _parsed(answer), _parsed(reference)
    if all(getattr(one[0], "is_number", False) for one in (given, wanted)):
        approximate = any(one[0].atoms(sympy.Float) for one in (given, wanted))
        return approximate and bool(abs(given[0] - wanted[0]) < abs(wanted[0]) / 2_000_000)
    if any(isinstance(one[0], sympy.Set) and not one[0].free_symbols for one in (given, wanted)):
        return False  # keys compare sets of numbers, and lists with their repetitions
    return bool(verify(wanted, given, timeout_seconds=None))


def _key(answer: str) -> str | None:
    """Return a text that equal formulas share; None if the answer is not a formula."""
    found = _parsed(answer)
    if isinstance(found[0], str):
        return None
    parts = _parts(found[-1]) if isinstance(found[0], sympy.FiniteSet) else []
    if len(parts) > len(found[0].args if parts else ()):  # a list has some elements several times, a set does not
        return f"{{{', '.join(sorted(_key(part) or part for part in parts))}}}"
    return _canonical(found[0])


def _parts(formula: str) -> list[str]:
    """Return the elements of a list without brackets."""
    depth, ends = 0, [-1]
    for i, mark in enumerate(formula):
        depth += (mark in "([{") - (mark in ")]}")
        if mark == "," and not depth:
            ends.append(i)
    return [formula[a + 1 : b].strip() for a, b in zip(ends, [*ends[1:], len(formula)], strict=True)]


def _parsed(answer: str) -> list[Any]:
    for pattern, latex in _PLAIN:
        answer = pattern.sub(latex, answer)
    return parse(f"\\boxed{{{answer}}}", _BOXED, parsing_timeout=None) or [answer.strip()]


def _repeating(whole: str, once: str, period: str) -> str:
    r"""Return a repeating decimal as a fraction: `0.1\\overline{6}` is 15/90."""
    top = int(whole + once + period) - int(whole + once or 0)
    return f"\\frac{{{top}}}{{{int('9' * len(period) + '0' * len(once))}}}"


def _canonical(formula: Any) -> str:
    if isinstance(formula, sympy.Eq) and formula.lhs.is_Symbol:  # x = 5
        formula = formula.rhs
    inequality = isinstance(formula, sympy.Rel | sympy.And | sympy.Or) and not formula.atoms(sympy.Eq)
    if inequality and len(formula.free_symbols) == 1:
        with suppress(NotImplementedError):
            formula = formula.as_set()
    if isinstance(formula, sympy.MatrixBase):
        return f"matrix {formula.shape} {_each(formula)}"
    if isinstance(formula, sympy.Tuple):
        return f"({_each(formula)})"
    if isinstance(formula, sympy.FiniteSet):
        if formula.args and all(isinstance(one, sympy.Rel) and not isinstance(one, sympy.Eq) for one in formula):
            return _canonical(sympy.Or(*formula))
        named = {one.lhs for one in formula if isinstance(one, sympy.Eq)}
        return f"{{{', '.join(sorted(map(str if len(named) > 1 else _canonical, formula)))}}}"
    if not isinstance(formula, sympy.Expr):
        return str(formula.xreplace({one: sympy.nsimplify(one, rational=True) for one in formula.atoms(sympy.Float)}))
    exact = not formula.atoms(sympy.Float)
    formula = formula.subs({symbol: sympy.I for symbol in formula.free_symbols if symbol.name == "i"})
    formula = formula.replace(_is_odd_root, lambda power: (-1) ** power.exp.p * (-power.base) ** power.exp)
    formula = sympy.nsimplify(formula.doit(), rational=True).expand()  # 0.5 is 1/2
    if formula.is_Integer:
        return str(formula)
    if formula.is_number and formula.is_real:
        digits = f"{float(formula):.12g}"
        rounded = sympy.Rational(digits) if len(digits) < _ROUND else formula
        return digits if rounded and (formula == rounded or not exact) else str(formula)
    return str(sympy.N(formula, 12) if formula.is_number else sympy.simplify(formula))


def _is_odd_root(power: Any) -> bool:
    """Return whether a power is an odd root of a negative number: real here, complex for sympy."""
    return bool(
        power.is_Pow and power.base.is_negative and power.exp.is_Rational and power.exp.q % 2 and power.exp.q > 1
    )


def _each(formulas: Iterable[Any]) -> str:
    return ", ".join(map(_canonical, formulas))


if __name__ == "__main__":
    main()
