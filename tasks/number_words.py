"""Convert numbers in words and other notations to digits: "minus five", "two thirds", "1.5 million", "3 x 10^6".

This module knows nothing of tasks or models. No text makes its functions raise, and all take linear time.
"""

from __future__ import annotations

import re
from decimal import Decimal

_UNITS = "one two three four five six seven eight nine".split()  # noqa: SIM905
_TEENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()  # noqa: SIM905
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()  # noqa: SIM905
_SMALL = {word: i for i, word in enumerate(["zero", *_UNITS, *_TEENS])}
_SMALL |= {word: 10 * i for i, word in enumerate(_TENS, 2)} | {"a": 1}
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SHORT = {"k": 10**3, "K": 10**3, "M": 10**6, "mn": 10**6, "bn": 10**9}
_PARTS = ("hal", "third", "fourth", "quarter", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
_DENOMINATORS = dict(zip(_PARTS, (2, 3, 4, 4, 5, 6, 7, 8, 9, 10), strict=True))

_GAP = r"(?:[^\S\n]|-)"
_SCALE = rf"(?:{'|'.join(_SCALES)})\b"
_UNIT = rf"(?:{'|'.join(_UNITS)})\b"
_TWO_DIGITS = rf"(?:(?:{'|'.join(_TENS)})\b(?:{_GAP}{_UNIT})?|(?:{'|'.join(_TEENS)})\b)"
_BELOW_100 = rf"(?:{_TWO_DIGITS}|zero\b|{_UNIT}|a(?={_GAP}{_SCALE}))"
_IN_WORDS = re.compile(
    rf"\b(?:(?:(?P<top>a|{_UNIT}){_GAP}|\A(?=half\W*\Z))(?P<part>hal(?=f\b|ves\b)|(?:{'|'.join(_PARTS[1:])})(?=s?\b))(?:f|ves|s)?"
    rf"|(?P<century>seventeen|eighteen|nineteen|twenty)[^\S\n](?P<year>{_TWO_DIGITS})"
    rf"|{_BELOW_100}(?:{_GAP}{_SCALE}(?:,?{_GAP}(?:and{_GAP})?{_BELOW_100})?+){{0,8}}+)",
    re.IGNORECASE,
)
_CLAUSE_END = re.compile(r"\s*+(?:[.,;:!?)}*$]|\Z)|[^\S\n]*+\n")
_SOON_OVER = re.compile(r"(?:\sand\sa\shalf\b)?[)}*$]*+(?:,|(?:[^\S\n]++[A-Za-z]++){0,2}+\s*+(?:[.;!?)}*\n]|</|\Z))")
_MINUS = re.compile(
    r"(\A\s*+|\b(?:is|was|be|equals|answer|about)\s++|[:=({$*]\s*+)(?:minus|negative)\s++(?=[0-9$])", re.IGNORECASE
)
_DOZEN = re.compile(r"(?<![0-9.,])([0-9]{1,9})[^\S\n]dozen\b")
_SCALED = re.compile(
    r"(?<![0-9.,^])([0-9]{1,3}(?:,[0-9]{3})++|[0-9]{1,18})(\.[0-9]{1,18})?"
    rf"(?:[^\S\n]{{0,2}}({'|'.join([*_SCALES][1:])})|({'|'.join(_SHORT)}))(?![\w'’])"
)
_POWER = re.compile(
    r"(?:(?<![0-9.,^])([0-9]{1,18}(?:\.[0-9]{1,18})?)\s?(?:x|×|\*|·|\\times|\\cdot)\s?)?(?<![\w.,^])([0-9]{1,3})"
    r"(?:\^|\*\*)(?:\{([-+−]?[0-9]{1,2})\}|([-+−]?[0-9]{1,2}))(?!\w|\.[0-9]|\^)"
)


def spelled(text: str, running: bool = True) -> str:
    """Convert numbers in words to digits, also "minus" and "dozen"; "one" only at the end of a clause.

    If the text is not `running`, only numbers before the end of a clause are converted, with at most two words between.
    """
    text = _IN_WORDS.sub(
        lambda match: _digits(match) if running or _SOON_OVER.match(text, match.end()) else match[0], text
    )
    text = _MINUS.sub(r"\1-", text)
    return _DOZEN.sub(lambda match: str(12 * int(match[1])), text)


def scaled(text: str) -> str:
    """Convert "1.5 million", "20k" and powers such as "3 x 10^6" and "2^{10}" to digits."""
    text = _POWER.sub(_power, text)
    return _SCALED.sub(
        lambda match: _product(match[1].replace(",", "") + (match[2] or ""), (_SCALES | _SHORT)[match[3] or match[4]]),
        text,
    )


def _digits(match: re.Match[str]) -> str:
    if match["part"]:
        return f"{_SMALL[(match['top'] or 'a').lower()]}/{_DENOMINATORS[match['part'].lower()]}"
    if match["year"]:
        return str(100 * _SMALL[match["century"].lower()] + _sum(match["year"]))
    alone = match[0].lower() == "one" and not _CLAUSE_END.match(match.string, match.end())
    return match[0] if alone else str(_sum(match[0]))


def _sum(words: str) -> int:
    total = group = 0
    for word in re.findall(r"[a-z]++", words.lower()):
        if word in _SMALL:
            group += _SMALL[word]
        elif word != "and":
            group *= _SCALES[word]
            if _SCALES[word] >= 1000:
                total, group = total + group, 0
    return total + group


def _power(match: re.Match[str]) -> str:
    """Return the digits of a power of ten, or of a whole power below 10^18; any other power as it is."""
    base, exponent = int(match[2]), int((match[3] or match[4]).replace("−", "-"))
    exact = base == 10 or (exponent >= 0 and base**exponent < 10**18)
    return _product(match[1] or "1", Decimal(base) ** exponent) if exact else match[0]


def _product(number: str, scale: Decimal | int) -> str:
    return format((Decimal(number) * scale).normalize(), "f")
