r"""Numbers in a model's text: what it answered, and whether two answers are the same number.

GSM8K's answers stand after `#### ` (strict) or are the last number said (flexible), as in lm-evaluation-harness; a
state evaluator replies with a number on a scale (SEED, appendix C). Knows nothing of tasks or models. No text makes
these functions raise, except a malformed `number` given to `normalize`; all take time linear in the text.

A number is ASCII digits with thousands commas (`1,234`; `1, 2` and `1,2` are two numbers), decimals (`3.5`, `.5`) and
an exponent of at most two digits (`1e5`). A minus (`-` or `−`) is its sign only where it touches the number or its
currency mark and follows no word, closing bracket, percent sign or other minus: `10-3` holds 10 and 3, `step-3` holds
3. What stands after `^` is no number of its own: `36 cm^2` holds 36. A fraction (`1/2`, `\\frac{1}{2}`) is one number
where nothing else is answered.
"""

import re
from collections import deque
from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction

# Possessive quantifiers (`*+`, `++`) and bounded ones keep every pattern linear on hostile text.
_SPACE = r"[^\S\n]"
_CURRENCY = r"(?:\\?[$€£])"
_SIGN = rf"(?:(?<![\w)\]}}%^−-])(?<![0-9][$€£])[-−]{_CURRENCY}?)"
_WHOLE = r"(?<![0-9^])(?<!\^\{)(?:[0-9]{1,3}(?:,[0-9]{3}(?![0-9]))++|[0-9]++)"
_NUMBER = rf"(?:{_SIGN}?(?:{_WHOLE}(?:\.[0-9]++)?|(?<![\w.)\]])\.[0-9]++)(?:[eE][+-]?[0-9]{{1,2}}(?!\w|\.[0-9]))?)"
_FRACTION = (
    rf"(?:{_SIGN}?[0-9]{{1,15}}{_SPACE}*+/{_SPACE}*+[1-9][0-9]{{0,14}}(?![0-9/]|[.,][0-9])"
    rf"|{_SIGN}?\\[dt]?frac\{{[0-9]{{1,15}}\}}\{{[1-9][0-9]{{0,14}}\}})"
)

# `5 apples + 3 apples = 8`: numbers joined by operators, at most three words of units before each operator.
_FILLING = rf"(?:{_SPACE}|[()\[\]{{}}%]|{_CURRENCY}|\^[0-9{{}}]++)*+"
_OPERATOR = r"(?:[-−+*/x×÷=]|\\times|\\cdot|\\div)"
_LINK = rf"{_FILLING}(?:[A-Za-z]++{_SPACE}++){{0,3}}?{_OPERATOR}{_FILLING}"
_EXPRESSION = rf"{_NUMBER}(?:{_LINK}{_NUMBER})*+"

_ANY = re.compile(_NUMBER)
_ALONE = re.compile(rf"\s*+\+?{_CURRENCY}?{_SPACE}*+({_FRACTION}|{_NUMBER})\.?(?:\\?%)?\.?\s*+")
_STRICT = re.compile(rf"####{_SPACE}*+{_CURRENCY}?{_SPACE}*+({_FRACTION}|{_NUMBER})")
_BOXED = re.compile(r"\\boxed\s*+\{([^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+)\}")
_ANNOUNCED = re.compile(
    r"(?<![\w-])(?<!sub )answer(?:\s++(?:to|of|for)\b[^.:\n]{0,60}?)?"  # not `Sub-answer: 5`, a step on the way
    r"[\s*_]*+(?:is|was|equals|(?:would|will|should|must)\s++be|[:=])"
    rf"(?:{_SPACE}|[:=*_`\"'()\[\]{{}}~≈\\$€£]|(?:about|approximately|exactly|therefore|thus|only|just)\b)*+"
    rf"({_EXPRESSION})",
    re.IGNORECASE,
)
_TO_PLAIN = str.maketrans("−", "-", ",\\$€£")

# parse_value's first and second choice, in lower case, where \0 stands for `/10`, `out of 10` and the like.
_OPENING = re.compile(rf"\A[\s:=*_`\"'()\[\]{{}}\\$#]*+({_NUMBER})(?=[ *_`\"')\]}}\\$]*+(?:\Z|[\n\0.,;:!?]))")
_MARKED = re.compile(
    rf"({_NUMBER})(?=\s*+\0)"
    r"|\b(?:number|score|rating|value|grade)(?:\s++(?:is|of|as|at|to|be|would|should))*+"
    rf"[\s:=*_`\"'()\[\]{{}}\\$]*+({_NUMBER})"
)


def strict_answer(text: str) -> str | None:
    """The normalized number right after the last `#### ` that has one, or None.

    lm-evaluation-harness' strict-match, but the last and not the first, and also after `$`, with `−`, before a period.
    """
    found = last(_STRICT.finditer(text))
    return normalize(found[1]) if found else None


def boxed_answer(text: str) -> str | None:
    r"""The normalized number in the last `\boxed{}` that has one, or None."""
    found = last(match for match in _BOXED.finditer(text) if _ANY.search(match[1]))
    return _outcome(found[1]) if found else None


def flexible_answer(text: str) -> str | None:
    r"""The normalized number that a text answers with, or None where it has no number.

    The last announced number if any is announced (`answer is 5`, `answer: 5`, `\boxed{5}`), else the last number, which
    is lm-evaluation-harness' flexible-extract. Of an announced equation, the last side that is one number: `answer is
    2 x 9 = 18` gives 18. Nothing is computed: `10-3` and `18:30` give their last number, `50%` gives 50. A fraction
    that is announced is one number: `answer is 2/4` gives 1/2.
    """
    announced = last(_ANNOUNCED.finditer(text))
    boxed = last(match for match in _BOXED.finditer(text) if _ANY.search(match[1]))
    later = max((match for match in (announced, boxed) if match), key=lambda match: match.start(1), default=None)
    if later:
        return _outcome(later[1])
    found = last(_ANY.finditer(text))
    return normalize(found[0]) if found else None


def numbers_said(text: str) -> list[str]:
    """All numbers in a text, normalized, in their order."""
    return [normalize(found[0]) for found in _ANY.finditer(text)]


def normalize(number: str) -> str:
    """The canonical text of one number: `$1,000.50` is `1000.5`, `007` is `7`, `-0` is `0`, `1e3` is `1000`, `2/4` is
    `1/2`.

    Space, a currency mark, a percent sign or a period around it do not count.
    Raises ValueError where `number` is not one number.
    """
    value = value_of(number)
    if value is None:
        raise ValueError(f"{number[:80]!r} is not one number; flexible_answer() finds the number in a text")
    if isinstance(value, Fraction):
        return str(value)
    whole, _, fraction = format(value.copy_abs(), "f").partition(".")  # "f": unrounded, no exponent
    digits = f"{whole.lstrip('0') or '0'}.{fraction.rstrip('0')}".rstrip(".")
    return f"-{digits}" if value < 0 else digits


def same_number(a: str | None, b: str | None) -> bool:
    """Whether two numbers are equal: exactly, at any length. False where one is missing or malformed.

    `1,000`, `1000.0` and `$1000` are equal, and so are `1/2` and `0.5`; `50%` is 50, not 0.5.
    """
    first, second = value_of(a or ""), value_of(b or "")
    return first is not None and first == second


def parse_value(text: str, low: float, high: float) -> float | None:
    """A state evaluator's reply as a number from `low` to `high`, or None where it has none.

    Mentions of the scale (on 1 to 10: `1 to 10`, `between 1 and 10`, `scale of 10`) and numbers outside it are skipped.
    Of the others: the one that opens the reply and ends its phrase (`8.`), else the first marked as the value (`7/10`,
    `7 out of 10`, or right after `number is`, `score`, `rating`, `value`, `grade`), else the first.
    """
    bottom, top = (rf"(?<![\w.]){re.escape(normalize(str(end)))}(?:\.0++)?(?!\w|[.,][0-9])" for end in (low, high))
    between = r"\s*+(?:to|and|through|[-–—−~]|\.\.++|being\b[^0-9\n]{0,60})\s*+"
    of_top = rf"(?:\b(?:out|scale)\s++of|/)\s*+{top}|{top}[\s-]point\s++scale"
    text = re.sub(rf"{bottom}{between}{top}", " ", text.lower())
    text = re.sub(of_top, "\0", text)
    for found in (_OPENING, _MARKED, _ANY):
        for match in found.finditer(text):
            value = float(_plain(match[match.lastindex or 0]))
            if low <= value <= high:
                return value
    return None


def value_of(number: str) -> Decimal | Fraction | None:
    """What one number is worth, exactly; None for any other text. Equal values have equal hashes."""
    alone = _ALONE.fullmatch(number)
    if not alone:
        return None
    if not re.fullmatch(_FRACTION, alone[1]):
        return Decimal(_plain(alone[1]))
    top, bottom = map(int, re.findall("[0-9]+", alone[1]))
    return Fraction(-top if alone[1][0] in "-−" else top, bottom)


def _outcome(expression: str) -> str:
    sides = [[side] if value_of(side) is not None else _ANY.findall(side) for side in expression.split("=")]
    single = [numbers for numbers in sides if len(numbers) == 1]
    return normalize((single or [numbers for numbers in sides if numbers])[-1][-1])


def _plain(number: str) -> str:
    """A match of _NUMBER as Python reads it."""
    return number.translate(_TO_PLAIN)


def last(matches: Iterable[re.Match[str]]) -> re.Match[str] | None:
    """The last of some matches; None where there are none."""
    found = deque(matches, maxlen=1)
    return found[0] if found else None
