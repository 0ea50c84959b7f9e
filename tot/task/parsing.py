"""Read what a model's reply judges or lists: a value on a scale, the candidate that it votes for, its proposals.

All patterns take time linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_DECORATION = r"[\s:=*_`\"'()\[\]{}\\$#]*+"
_NUMBER = (
    r"(?:(?<![\w)\]}%−–-])[-−–])?(?<![\w.^])(?:[0-9]{1,12}(?:\.[0-9]{1,12})?|\.[0-9]{1,12})"
    r"(?![0-9]|[eE][0-9]|[.,][0-9])"
)

# For parse_value, in lower case, where \0 stands for `/10`, `out of 10` and the like.
_OPENING_VALUE = re.compile(rf"\A{_DECORATION}({_NUMBER})(?=[ *_`\"')\]}}\\$]*+(?:\Z|[\n\0.,;:!?]))")
_MARKED_VALUE = re.compile(
    rf"({_NUMBER})(?=\s*+\0)"
    r"|\b(?:number|score|rating|value|grade)(?:\s++(?:is|of|as|at|to|be|would|should))*+"
    rf"{_DECORATION}({_NUMBER})"
)
_ANY_VALUE = re.compile(rf"({_NUMBER})")

# For parse_vote: a candidate's number, and how replies name the one that they are for.
_BARE = r"(?<![\w.])([0-9]{1,6})(?!\.?[0-9])"
_CANDIDATE = rf"(?:\b(?:choice|option|candidate|answer|number|no\.)[\s*_#(:]{{0,4}})?[#*_(\"]{{0,3}}{_BARE}"
_BETTER = r"(?:better|stronger|preferable|superior|clearer|more\s+\w{1,20})"
_VOTES = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?:\[\[|\\boxed\{)\s{0,3}([0-9]{1,6})\s{0,3}(?:\]\]|\})",
        rf"{_CANDIDATE}\**\s+is\s+(?:clearly\s+|by\s+far\s+)?(?:the\s+)?best\b|\bbest\b[^\d\n.]{{0,60}}?{_CANDIDATE}",
        rf"\A[\s*_\"'(\[]{{0,9}}{_CANDIDATE}(?=[\s*_)\]\"']{{0,9}}(?:\Z|[\n.,:;!?]))",
        rf"\b(?:choose|pick|prefer|select|favou?r|vote(?:\s+is)?(?:\s+for)?|go\s+with|answer\s+is)\b[\s:*]{{0,4}}{_CANDIDATE}",
        rf"\b(?:so|thus|hence|therefore)\b[,:]?\s+(?:it\s+is\s+|it's\s+)?{_CANDIDATE}(?=[\s*_)]{{0,4}}(?:\Z|[\n.!]))",
        rf"{_CANDIDATE}\**\s+(?:is\s+(?:much\s+|clearly\s+|far\s+)?{_BETTER}\s+than|beats|wins)\b",
        rf"\bworse\s+than\s+{_CANDIDATE}",
        rf"\b(?:choice|option|candidate)\b[^\d\n.]{{0,20}}?{_BARE}",
    )
]
_DENIED = re.compile(
    rf"\b(?:not|nor|neither)\s+{_CANDIDATE}|{_CANDIDATE}\s+(?:is|are)\s+(?:not\b|wrong|incorrect|worse)", re.IGNORECASE
)
_ANY_CANDIDATE = re.compile(_BARE)

# For parse_proposals: list items by the kind of their mark, of which letters and Roman numbers need company.
_WRAPPED = re.compile(r"(\*\*|__|\*|_|\"|“)(?=\S)([^\n]*\S)(?:\1|”)")
_BULLET = re.compile(r"[-*•–+]\s+(?:\[[ xX]?\]\s+)?(.*)")
_NUMBERED = re.compile(
    r"(?:(?:idea|option|step|proposal|thought|suggestion)\s+)?\(?[0-9]{1,3}(?:[.)]|:)\**\s+(.*)", re.IGNORECASE
)
_LETTERED = re.compile(r"\(?(?:[A-Za-z]|[ivx]{2,4})[.)]\s+(.*)")


def parse_value(text: str, low: float, high: float) -> float | None:
    """A state evaluator's reply as a number from `low` to `high`, or None where it has none.

    Mentions of the scale (on 1 to 10: `1 to 10`, `between 1 and 10`, `scale of 10`) and numbers outside it are skipped.
    Of the others: the one that opens the reply and ends its phrase (`8.`), else the first marked as the value (`7/10`,
    `7 out of 10`, or right after `number is`, `score`, `rating`, `value`, `grade`), else the first.
    """
    bottom, top = (rf"(?<![\w.]){re.escape(f'{end:g}')}(?:\.0++)?(?!\w|[.,][0-9])" for end in (low, high))
    note = r"(?:\s*+\([^()\n]{0,60}\))?"
    between = rf"{note}\s*+(?:to|and|through|[-–—−~]|\.\.++|being\b[^0-9\n]{{0,60}})\s*+"
    of_top = rf"(?:\b(?:out|scale)\s++of|/)\s*+{top}|{top}[\s-]point\s++scale"
    text = re.sub(rf"{bottom}{between}{top}{note}", " ", text.lower())
    text = re.sub(of_top, "\0", text)
    for found in (_OPENING_VALUE, _MARKED_VALUE, _ANY_VALUE):
        for match in found.finditer(text):
            value = float(match[match.lastindex or 0].translate({ord("−"): "-", ord("–"): "-"}))
            if low <= value <= high:
                return value
    return None


def parse_vote(text: str, candidates: int) -> int | None:
    """The number of the candidate that a reply is for, from 1 to `candidates`; None where it names none.

    In this order: a boxed one, the last one called best, the one that opens the reply, the last one that is chosen,
    concluded or better than another, the last one called a choice, the first one. Denied ones do not count.
    """
    text = re.sub(rf"\b(?:out\s+)?of\s+(?:the\s+)?{candidates}\b", " ", text, flags=re.IGNORECASE)
    for pattern in _VOTES[:-1]:
        if valid := _valid(pattern.finditer(text), candidates):
            return valid[-1]
    text = _DENIED.sub(" ", text)
    if valid := _valid(_VOTES[-1].finditer(text), candidates):
        return valid[-1]
    return next(iter(_valid(_ANY_CANDIDATE.finditer(text), candidates)), None)


def _valid(matches: Iterable[re.Match[str]], candidates: int) -> list[int]:
    numbers = (int(next(filter(None, match.groups()))) for match in matches)
    return [number for number in numbers if 1 <= number <= candidates]


def parse_proposals(text: str) -> list[str]:
    """The thoughts that a reply lists, without marks: its list items, or its lines where none is marked as an item.

    An introduction ("Here are three ideas:"), code fences and headings are left out.
    """
    lines = [line.strip().removeprefix("> ") for line in text.splitlines()]
    lines = [_unwrapped(line) for line in lines if line and not line.startswith(("```", "~~~"))]
    for mark, least in ((_NUMBERED, 1), (_BULLET, 1), (_LETTERED, 2)):
        found = [mark.fullmatch(line) for line in lines]
        items = [one[1] for one in found if one]
        first = next((i for i, one in enumerate(found) if one), 0)
        if len(items) >= least and (first == 0 or mark is not _BULLET or len(items) > 1 or lines[0].endswith(":")):
            return [item for item in map(_unwrapped, items) if item]
    if len(lines) > 1 and (lines[0].endswith(":") or lines[0].startswith("#")):
        lines = lines[1:]
    return [line for line in lines if line]


def _unwrapped(line: str) -> str:
    """A line without emphasis or quotation marks around the whole of it."""
    line = line.strip()
    found = _WRAPPED.fullmatch(line)
    return found[2].strip() if found and found[1] not in found[2] else line
