r"""Parse numbers in a model's text: extract the answer, and compare two answers.

GSM8K's answers follow `#### ` (strict) or are the last number (flexible), as in lm-evaluation-harness. A state
evaluator replies with a number on a scale (SEED, Appendix D). This module knows nothing of tasks or models. No text
makes these functions raise, except a malformed `number` passed to `normalize`; all take linear time.

A number is digits of any script with thousands commas (`1,234`; `1, 2` and `1,2` are two numbers), decimals (`3.5`,
`.5`) and an exponent of at most two digits (`1e5`). A minus (`-`, `−` or `–`) is a sign if it touches the number or its
currency mark and does not follow a word, closing bracket, percent sign or other minus: `10-3` has 10 and 3, `step-3`
has 3. An exponent after `^` is not a number: `36 cm^2` has 36. Nor is a base, unless the power is computed: `2^{10}` is
1024, `2^x` has no number. Thousands may also be grouped as `12{,}500`, `12\,500`,
`12'500` or by narrow spaces. An announced answer, or a whole text, may also be a fraction or a mixed number (`1/2`,
`½`, `\frac12`, `2 1/2`), or have thousands grouped by plain spaces. `1.5 million`, `20k` and `3 \times 10^6` are one
number; an announced answer may also be in words (`minus five`). A time of day (`2:30 pm`) is not a number.
"""

import re
import unicodedata
from collections import deque
from collections.abc import Iterable, Iterator
from decimal import Decimal
from fractions import Fraction

from tot.tasks.number_words import scaled, spelled

# Possessive quantifiers (`*+`, `++`) and bounded ones keep every pattern linear on hostile text.
_SPACE = r"[^\S\n]"
_CURRENCY = r"(?:\\?[$€£¥₹])"
_SIGN = rf"(?:(?<![\w)\]}}%^−–-])(?<![0-9][$€£¥₹])[-−–]{_CURRENCY}?)"
_NO_EXPONENT = r"(?<!\^)(?<!\^\{)(?<!\^[-−–])(?<!\^\{[-−–])"
_WHOLE = rf"(?<![0-9]){_NO_EXPONENT}(?>[0-9]{{1,3}}(?:,[0-9]{{3}}(?![0-9]))++|[0-9]++)"
_DECIMAL = rf"(?:{_WHOLE}(?:\.[0-9]++)?+|(?<![\w.)\]])\.[0-9]++)"
_NUMBER = rf"(?:{_SIGN}?{_DECIMAL}(?:[eE][+-]?[0-9]{{1,2}}(?!\w|\.[0-9]))?+(?!\)?\^[\w{{(−-]))"
_FRACTION = rf"(?:{_SIGN}?[0-9]{{1,15}}{_SPACE}*+/{_SPACE}*+[1-9][0-9]{{0,14}}(?![0-9/]|[.,][0-9]))"

_SPACED = rf"(?:{_SIGN}?(?<![0-9.,])[0-9]{{1,3}}(?:{_SPACE}[0-9]{{3}})++(?![0-9/]|[.,][0-9]))"  # 12 500
_MIXED = rf"(?:{_SIGN}?[0-9]{{1,15}}{_SPACE}++(?:and{_SPACE}++)?(?=[0-9]{{1,15}}/){_FRACTION})"  # 2 1/2
_QUANTITY = rf"(?:{_MIXED}|{_SPACED}|{_FRACTION}|{_NUMBER})"

# `5 apples + 3 apples = 8`: numbers joined by operators, at most three words of units before each operator.
_FILLING = rf"(?:{_SPACE}|[()\[\]{{}}%]|{_CURRENCY}|\^[0-9{{}}]++)*+"
_OPERATOR = r"(?:[-−+*/x×÷=]|\\times|\\cdot|\\div)"
_LINK = rf"{_FILLING}(?:[A-Za-z]++{_SPACE}++){{0,3}}?{_OPERATOR}{_FILLING}"
_EXPRESSION = rf"{_QUANTITY}(?:{_LINK}{_QUANTITY})*+"

_ANY = re.compile(_NUMBER)
_ANY_QUANTITY = re.compile(_QUANTITY)
_ALONE = re.compile(rf"\s*+\+?{_CURRENCY}?{_SPACE}*+({_QUANTITY})\.?(?:{_SPACE}*+\\?%)?\.?\s*+")
# The line of a marker has only a number or an equation; a Markdown heading has more text (`#### 1. Pens`).
_MARKER = rf"(?<!#)####(?!#){_SPACE}*+[*_$]*+({_CURRENCY}?{_SPACE}*+(?>{_EXPRESSION}))"
_STRICT = re.compile(rf"{_MARKER}{_FILLING}[*_$.]*+{_SPACE}*+(?:\n|\Z)")
_LAST_MARKER = re.compile(rf"{_MARKER}(?![0-9]*+[.):])(?!\*\*)[^\n]*+\s*+\Z")  # `#### 18 dollars` ends the text
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*+\{")
_BRACE = re.compile(r"(?<!\\)[{}]")
_ANNOUNCED = re.compile(
    r"(?<![\w-])(?<!sub )answer(?:\s++(?:to|of|for)\b[^.:\n]{0,60}?|\s*+\([^()\n]{0,60}\))?"  # not `Sub-answer: 5`
    r"[\s*_]*+(?:is|was|equals|(?:would|will|should|must)\s++(?:then\s++)?be|[:=→]|(?<=<answer)>)"
    rf"(?:{_SPACE}|[:=*_`\"'()\[\]{{}}~≈\\$€£¥₹]|(?:about|approximately|exactly|therefore|thus|only|just|around|roughly"
    rf"|nearly|a\stotal\sof|equal\sto|USD|US|EUR|GBP|INR|Rs)\b\.?"
    rf"|that(?:{_SPACE}++[A-Za-z]++){{1,4}}?{_SPACE}++(?={_SIGN}?{_CURRENCY}?[0-9]))*+"
    rf"({_EXPRESSION})",
    re.IGNORECASE,
)

# Thousands grouped as in LaTeX and other languages: 12{,}500, 12,\!500, 12\,500, 12'500, or by narrow spaces.
_GROUPED = re.compile(
    r"(?<![0-9.,])[0-9]{1,3}(?:(?:\{,\}|,\\!|\\[,;:! ]|~|['’\u00a0\u2007-\u200a\u202f])[0-9]{3})++(?![0-9])"
)
_LATEX_FRACTION = re.compile(
    rf"\\[dtc]?frac{_SPACE}*+(?:\{{{_SPACE}*+([-−]?[0-9.,]{{1,15}}){_SPACE}*+\}}|([0-9]))"
    rf"{_SPACE}*+(?:\{{{_SPACE}*+([0-9.,]{{1,15}}){_SPACE}*+\}}|([0-9]))"
)
_LATEX_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*+\{([^{}]*+)\}")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_SUPERSCRIPTS = re.compile("(?<=[0-9A-Za-z)])[⁻⁰¹²³⁴-⁹]++")
_TIME = re.compile(r"(?<![0-9:.,])[0-9]{1,2}:[0-5][0-9](?::[0-5][0-9])?(?![0-9:])")
_CONFIDENCE = re.compile(
    rf"\b(?:confidence|certainty)\b[^0-9\n]{{0,20}}{_NUMBER}(?:\s?/\s?10+)?%?|{_NUMBER}\s?%?\s(?:confiden|certain|sure)",
    re.IGNORECASE,
)
_MARKS = str.maketrans("٫٬．，－", ".,.,-")
_TO_PLAIN = str.maketrans("−–", "--", ",\\$€£¥₹")


def strict_answer(text: str, ending: bool = True) -> str | None:
    """Return the normalized number in the line of the last `#### ` marker, or None.

    This is lm-evaluation-harness' strict-match, but for the last match instead of the first, and also for an equation
    (`#### 6 + 12 = 18`). With `ending`, the last line of the text may have text after the number: `#### 18 dollars`.
    """
    text = _tidy(text)
    match = (ending and _LAST_MARKER.search(text)) or last(_STRICT.finditer(text))
    return _outcome(match[1]) if match else None


def boxes(text: str) -> Iterator[tuple[int, int, str]]:
    r"""Yield start, end and contents of each complete `\boxed{}` or `\fbox{}`, from the last of at most ten."""
    for opening in reversed(list(_BOX.finditer(text))[-10:]):
        depth = 1
        for brace in _BRACE.finditer(text, opening.end()):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                if content := text[opening.end() : brace.start()].strip():
                    yield opening.start(), brace.end(), content
                break


def boxed_answer(text: str) -> str | None:
    r"""Return the normalized number in the last `\boxed{}` with a number, or None."""
    boxed = next(
        (content for _, _, content in boxes(_tidy(spelled(text, running=False))) if _ANY.search(content)), None
    )
    return _outcome(boxed) if boxed else None


def announced_answer(text: str) -> str | None:
    r"""Return the last announced number, normalized (`answer is 5`, `answer: 5`, `\boxed{5}`), or None.

    For an equation, this is the last side that is one number: `answer is 2 x 9 = 18` gives 18. Nothing is computed:
    `answer is 10-3` gives 3, `50%` gives 50. A fraction or a mixed number is one number: `answer is 2 1/2` gives 5/2.
    """
    text = _tidy(spelled(text, running=False))
    announced = last(_ANNOUNCED.finditer(text))
    boxed = [(start, content) for start, _, content in boxes(text) if _ANY.search(content)]
    later = max([*boxed, *([(announced.start(1), announced[1])] if announced else [])], default=None)
    return _outcome(later[1]) if later else None


def flexible_answer(text: str) -> str | None:
    """Return the normalized answer of a text, or None if the text has no number.

    This is the last announced number, or else the last number, as in lm-evaluation-harness' flexible-extract.
    """
    if (announced := announced_answer(text)) is not None:
        return announced
    match = last(_ANY.finditer(_CONFIDENCE.sub("", _tidy(text))))
    return normalize(match[0]) if match else None


def complete(text: str) -> str:
    """Return a truncated text up to the end of its last complete line or sentence."""
    end = last(re.finditer(r"\n|[.!?](?=\s)", text))
    return text[: end.end()] if end else ""


def numbers_said(text: str) -> list[str]:
    """Return all numbers in a text, normalized, in order."""
    return [normalize(match[0]) for match in _ANY.finditer(_tidy(text))]


def normalize(number: str) -> str:
    """Return the canonical text of one number.

    `$1,000.50` is `1000.5`, `007` is `7`, `-0` is `0`, `1e3` is `1000`, `2/4` is `1/2`. Space, a currency mark, a
    percent sign or a period around the number are ignored. Raises ValueError if `number` is not one number.
    """
    value = value_of(number)
    if value is None:
        raise ValueError(f"{number[:80]!r} is not one number: use flexible_answer() to find the number in a text")
    if isinstance(value, Fraction):
        return str(value)
    whole, _, fraction = format(value.copy_abs(), "f").partition(".")  # "f": unrounded, no exponent
    digits = f"{whole.lstrip('0') or '0'}.{fraction.rstrip('0')}".rstrip(".")
    return f"-{digits}" if value < 0 else digits


def same_number(a: str | None, b: str | None) -> bool:
    """Return True if two numbers are exactly equal; False if one is missing or malformed.

    `1,000`, `1000.0` and `$1000` are equal, and so are `1/2` and `0.5`; `50%` is 50, not 0.5.
    """
    first, second = value_of(a or ""), value_of(b or "")
    return first is not None and first == second


def value_of(number: str) -> Decimal | Fraction | None:
    """Return the exact value of one number; None for any other text. Equal values have equal hashes."""
    alone = _ALONE.fullmatch(_tidy(number))
    if not alone:
        return None
    if "/" not in alone[1]:
        return Decimal(_plain(alone[1]))
    *whole, top, bottom = map(int, re.findall("[0-9]+", alone[1]))
    value = sum(whole) + Fraction(top, bottom)
    return -value if alone[1][0] in "-−–" else value


def _outcome(expression: str) -> str:
    sides = [[side] if value_of(side) is not None else _ANY_QUANTITY.findall(side) for side in expression.split("=")]
    single = [numbers for numbers in sides if len(numbers) == 1]
    return normalize((single or [numbers for numbers in sides if numbers])[-1][-1])


def _tidy(text: str) -> str:
    """Return a text without times of day and with all numbers in plain digits."""
    return plain_digits(_TIME.sub(":", text))


def plain_digits(text: str) -> str:
    """Convert digits of other scripts, grouped digits, fractions (½) and scales to plain digits: `12500`, `1/2`."""
    if not text.isascii():
        text = re.sub(r"(?![0-9])\d", lambda digit: str(unicodedata.digit(digit[0])), text)
        text = text.translate(_MARKS)
        text = _SUPERSCRIPTS.sub(lambda match: "^" + unicodedata.normalize("NFKC", match[0]).replace("⁻", "-"), text)
    text = _GROUPED.sub(lambda group: re.sub("[^0-9]", "", group[0]), _LATEX_TEXT.sub(r"\1", text))
    text = _LATEX_FRACTION.sub(_fraction, text)
    text = _VULGAR.sub(lambda match: _spaced(match, unicodedata.normalize("NFKC", match[0]).replace("⁄", "/")), text)
    return scaled(text)


def _fraction(latex: re.Match[str]) -> str:
    top, bottom = (_plain(latex[i] or latex[i + 1]) for i in (1, 3))
    try:
        value = Fraction(top) / Fraction(bottom)
    except (ValueError, ZeroDivisionError):
        return latex[0]
    plain = top.lstrip("-").isdigit() and bottom.isdigit()
    return _spaced(latex, f"{top}/{bottom}" if plain else f"{value.numerator}/{value.denominator}")


def _spaced(match: re.Match[str], fraction: str) -> str:
    """Put a space between a digit and a fraction, as in a mixed number: 2½ is 2 1/2."""
    return f" {fraction}" if match.string[match.start() - 1 : match.start()].isdigit() else fraction


def _plain(number: str) -> str:
    """Convert a match of _NUMBER or _SPACED to Python's notation."""
    return "".join(number.split()).translate(_TO_PLAIN)


def last(matches: Iterable[re.Match[str]]) -> re.Match[str] | None:
    """Return the last match; None if there are no matches."""
    final = deque(matches, maxlen=1)
    return final[0] if final else None
