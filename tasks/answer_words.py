"""The normal form of a short answer: words that keep all marks that make it another answer.

Kept are signs, operators and the marks of names (`-5`, `x-1`, `C++`, `F#`, `O-`), units and currencies. Numbers have
one form (`1/2` is 0.5, `1.5 million` is 1500000, `twenty` is 20), and so have dates, times, units and acronyms. Case,
articles, Markdown and other punctuation are dropped. No text makes these functions raise.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

from tot.tasks.number_answers import normalize, plain_digits, value_of
from tot.tasks.number_words import spelled

COMMON = frozenset(
    re.findall(
        r"\w+",
        "i you he she it they we this that these those there is are was were be been am has have had do does did of in "
        "on at to for from by with as and or so thus hence therefore answer called known about approximately exactly "
        "equal equals equivalent result solution value final correct",
    )
)
"""Words around an answer, which are not part of it."""

_METRIC = {
    f"{short}{unit}": f"{long}{name} {long}{name.replace('er', 're')}"
    for short, long in (("k", "kilo"), ("c", "centi"), ("m", "milli"), ("", ""))
    for unit, name in (("m", "meter"), ("g", "gram"), ("l", "liter"), ("s", "second"), ("w", "watt"))
}
_NAMES = _METRIC | {
    "min": "minute", "h": "hr hour", "day": "", "week": "", "month": "", "year": "yr", "century": "centuries",
    "mi": "mile", "ft": "foot feet", "inch": "inches", "yd": "yard", "lb": "lbs pound", "oz": "ounce",
    "acre": "", "hectare": "", "gallon": "", "kwh": "", "cal": "calorie", "kcal": "kilocalorie",
    "byte": "", "kb": "kilobyte", "mb": "megabyte", "gb": "gigabyte", "tb": "terabyte",
    "°c": "celsius", "°f": "fahrenheit", "k": "kelvin", "°": "degree", "%": "percent", "hz": "hertz", "t": "tonne ton",
    "$": "dollar usd", "€": "euro eur", "£": "gbp", "¥": "yen jpy", "₹": "rupee inr", "¢": "cent",
}  # fmt: skip
_UNITS = {
    name: unit for unit, names in _NAMES.items() for base in (unit, *names.split()) for name in (base, f"{base}s")
}
_ORDINALS = {"first": "1st", "second": "2nd", "third": "3rd", "fourth": "4th", "fifth": "5th", "sixth": "6th"}
_ORDINALS |= {"seventh": "7th", "eighth": "8th", "ninth": "9th", "tenth": "10th", "eleventh": "11th", "twelfth": "12th"}
_ORDINAL = re.compile(rf"\b([2-9])0-({'|'.join(word for word in [*_ORDINALS][:9] if word != 'second')})\b")
_UNITS |= {"mph": "mi/h", "kph": "km/h", "kmh": "km/h", "2nd": "s"} | {unit: unit for unit in _NAMES}
"""With "2nd", because "second" may be the unit."""

_MONTHS = "jan feb mar apr may jun jul aug sep oct nov dec".split()  # noqa: SIM905
_MONTH = (
    r"(jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?)\b\.?"
)
_DAY = r"\b([0-9]{1,2})(?:st|nd|rd|th)?\b"
_YEAR = r"\b([0-9]{4})\b"
_NO_YEAR = "0000"
_DATES = (  # each with the order of its day, month and year
    (re.compile(rf"{_DAY}\s(?:day\s)?(?:of\s)?{_MONTH},?\s(?:of\s)?{_YEAR}"), (1, 2, 3)),
    (re.compile(rf"\b{_MONTH}\s(?:the\s)?{_DAY},?\s(?:of\s)?{_YEAR}"), (2, 1, 3)),
    (re.compile(rf"{_YEAR},?\s{_MONTH}\s{_DAY}"), (3, 2, 1)),
    (re.compile(rf"{_DAY}\s(?:of\s)?{_MONTH}(?!\w)"), (1, 2, 0)),
    (re.compile(rf"\b{_MONTH},?\s(?:of\s)?{_YEAR}"), (0, 1, 2)),
    (re.compile(rf"\b{_MONTH}\s(?:the\s)?{_DAY}"), (2, 1, 0)),
)
_CLOCK = re.compile(r"\b([0-9]{1,2})(?::([0-9]{2}))?\s?([ap])\.?m\b\.?")

_PLAIN = str.maketrans(
    dict(zip("−–‐‑×·⋅÷♯♭’≤≥", ["-", "-", "-", "-", "×", "×", "×", "/", "#", "b", "'", "≤", "≥"], strict=True))
)
_LETTER = r"[^\W\d_]"
_NAMED_MARK = re.compile(r"\b(AB|[A-GO])[ -](sharp|flat|negative|positive|plus(?: plus)?|minus)\b(?! [a-z])")
_MARKS = {"sharp": "#", "flat": "b", "negative": "-", "positive": "+", "plus": "+", "plus plus": "++", "minus": "-"}
_CHANGES = [
    (re.compile(pattern, re.MULTILINE), by)
    for pattern, by in (
        (r"^\s*(?:[-*+•>]|#{1,6})\s+", ""),  # items, headings
        (r"(?<![\w.])([a-z]\.)\s(?=[a-z]\.)", r"\1"),  # J. K. Rowling
        (r"<=", "≤"),
        (r">=", "≥"),
        (r"(?<=\w)\*\*(?=\w)", "^"),
        (r"(?<=[\w)])\*(?=[\w(])|(?<=[\w)])\s\*\s(?=[\w(])", "×"),
        (rf"(?<={_LETTER}{{2}})-(?=\w)|(?<=\w)-(?={_LETTER}{{2}})|-{{2,}}|—", " "),  # well-known
        (rf"(?<={_LETTER}{{2}})\s-\s|\s-\s(?={_LETTER}{{2}})", " "),  # a dash
        (rf"(?<={_LETTER}{{3}})\s?[/+]\s?(?={_LETTER}{{3}})", " "),  # input/output
        (r"([-+]?)([$€£¥₹])\s?([-+]?[0-9][0-9.,]*)", r"\1\3 \2 "),
        (r"\bdegrees?\s(c|f)(?:elsius|ahrenheit)?\b|°\s?(c|f)\b", r"°\1\2 "),
        (r"\b(?:square|sq\.?)\s(\w+)", r"\1^2"),
        (r"(?<=[a-z])\sper\s(?=[a-z])", "/"),
        (r"\bper\scent\b", "percent"),
        (r"\bv\.?\s?(?=[0-9]+\.[0-9])", "version "),
        (r"(?<![\w.,])([0-9]{1,3})\s(?=(?:[0-9]{3}\s){0,4}[0-9]{3}(?![\w.,]?[0-9]))", r"\1"),  # 12 500
    )
]
_OPERAND = rf"(?:[0-9]+(?::[0-9][0-9])+|{_LETTER}(?![^\W_]|[.'][^\W_])|[^\W_]*[0-9][^\W_]*(?:[.,][0-9][^\W_]*)*)"
_WORD = r"[^\W_]+(?:[.,'][^\W_]+)*"
_TOKEN = re.compile(
    r"[0-9]{4}-[0-9]{2}(?:-[0-9]{2})?(?!\w)"  # a date
    rf"|(?:(?<![\w)\]])[-+])?(?:{_OPERAND}(?:(?:[-+×/^<>≤≥]|\s[-+×/^<>≤≥]\s)[-+]?{_OPERAND})*|{_WORD}(?:[/^]{_WORD})*)"
    r"(?:[-+#]+(?!\w))?"
    r"|°[cf]?|[%$€£¥₹¢]"
)
_ACRONYM = re.compile(r"(?:[a-z]{1,2}\.)+[a-z]{1,2}")
_NUMBER_WITH_UNIT = re.compile(r"([-+]?[0-9][0-9.,]*)([a-z]{1,3}(?:/[a-z]+)?)")
_MIXED = re.compile(r"(?<![\w/.])([0-9]{1,9})\s(?:and\s)?([0-9]{1,9}/[1-9][0-9]{0,8})(?![\w/.])")
_PUNCTUATION = " \n.,;:!?\"'`()"
_BEFORE_WORD = re.compile(r"[\s\"'“‘(*_]++(?=\w)")


def words(text: str, exact: bool = False) -> list[str]:
    """Return the words of a text in normal form; of a text without words, such as "+", its marks.

    With `exact`, numbers stay as they are: version 3.10 is not 3.1.
    """
    text = unicodedata.normalize("NFKC", spelled(plain_digits(text))).translate(_PLAIN)
    text = _NAMED_MARK.sub(lambda match: match[1] + _MARKS[match[2]], text).lower()
    text = _ORDINAL.sub(lambda match: match[1] + _ORDINALS[match[2]], text)  # spelled() made it 20-first
    for pattern, order in _DATES:
        text = pattern.sub(lambda match, order=order: _date(*(match[i] if i else "" for i in order)), text)  # type: ignore[misc]
    text = _CLOCK.sub(lambda match: f"{int(match[1]) % 12 + 12 * (match[3] == 'p')}:{match[2] or '00'}", text)
    for pattern, by in _CHANGES:
        text = pattern.sub(by, text)
    text = _MIXED.sub(lambda match: str(value_of(f"{match[1]} {match[2]}")), text)
    found: list[str] = []
    for match in _TOKEN.finditer(text):
        token = "".join(match[0].split())
        if token in ("a", "an", "the"):
            following = _BEFORE_WORD.match(text, match.end())
            after = following and _TOKEN.match(text, following.end())
            if after and (token != "a" or after[0] not in COMMON):  # otherwise an option, a vitamin
                continue
        as_is = exact or found[-1:] == ["version"]
        found += [token] if as_is else _forms(token)
    return found or list(filter(None, [text.strip(_PUNCTUATION)]))


def is_number(word: str) -> bool:
    return value_of(word) is not None


def is_unit(word: str) -> bool:
    return all(part.partition("^")[0] in _NAMES for part in word.split("/"))


def is_date(word: str) -> bool:
    return re.fullmatch(r"[0-9]{4}-[0-9]{2}(?:-[0-9]{2})?", word) is not None


def same_date(date: str, wanted: str) -> bool:
    """Return whether a date is the wanted one, which may lack the day or the year."""
    return date.startswith(wanted) or (wanted.startswith(_NO_YEAR) and date.endswith(wanted[4:]))


def _forms(token: str) -> list[str]:
    token = _ORDINALS.get(token, token)
    if is_number(token):
        return [_number(token)]
    if (attached := _NUMBER_WITH_UNIT.fullmatch(token)) and attached[2].split("/")[0] in _UNITS:  # 5km
        return [*_forms(attached[1]), *_forms(attached[2])]
    if _ACRONYM.fullmatch(token):
        return [token.replace(".", "")]
    parts = [part.partition("^") for part in token.split("/")]
    if all(name in _UNITS for name, _, _ in parts):
        return ["/".join(_UNITS[name] + power + exponent for name, power, exponent in parts)]
    return [token]


def _number(token: str) -> str:
    """Return a number in digits, as a fraction only if it has no finite decimals."""
    value = Fraction(value_of(token) or 0)
    finite = 10**12 % value.denominator == 0
    return normalize(f"{value.numerator * 10**12 // value.denominator}e-12") if finite else str(value)


def _date(day: str, month: str, year: str) -> str:
    number = f"{_MONTHS.index(month[:3]) + 1:02}"
    return "-".join([year or _NO_YEAR, number, *([f"{int(day):02}"] if day else [])])
