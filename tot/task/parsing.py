"""Parse a model's reply: a value on a scale, a vote for a candidate, or a list of proposals.

All patterns run in time linear in the text.
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

# For parse_vote: a candidate's number, and phrases by which replies choose one.
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
_NEGATED = re.compile(
    rf"\b(?:not|nor|neither)\s+{_CANDIDATE}|{_CANDIDATE}\s+(?:is|are)\s+(?:not\b|wrong|incorrect|worse)", re.IGNORECASE
)
_ANY_CANDIDATE = re.compile(_BARE)

# For parse_proposals: list items by the kind of their marker. A single letter or Roman numeral is not a list.
_WRAPPED = re.compile(r"(\*\*|__|\*|_|\"|“)(?=\S)([^\n]*\S)(?:\1|”)")
_BULLET = re.compile(r"[-*•–+]\s+(?:\[[ xX]?\]\s+)?(.*)")
_NUMBERED = re.compile(
    r"(?:(?:idea|option|step|proposal|thought|suggestion)\s+)?\(?[0-9]{1,3}(?:[.)]|:)\**\s+(.*)", re.IGNORECASE
)
_LETTERED = re.compile(r"\(?(?:[A-Za-z]|[ivx]{2,4})[.)]\s+(.*)")


def parse_value(text: str, low: float, high: float) -> float | None:
    """Return the value in an evaluator's reply, from `low` to `high`, or None if there is no such number.

    Mentions of the scale (on 1 to 10: `1 to 10`, `between 1 and 10`, `scale of 10`) and numbers outside it are skipped.
    Of the remaining numbers, the first match in this order counts:

    1. The number that opens the reply and ends its phrase (`8.`).
    2. The first number marked as the value (`7/10`, `7 out of 10`, or after `number is`, `score`, `rating`, `value`,
       `grade`).
    3. The first number.
    """
    bottom, top = (rf"(?<![\w.]){re.escape(f'{end:g}')}(?:\.0++)?(?!\w|[.,][0-9])" for end in (low, high))
    note = r"(?:\s*+\([^()\n]{0,60}\))?"
    between = rf"{note}\s*+(?:to|and|through|[-–—−~]|\.\.++|being\b[^0-9\n]{{0,60}})\s*+"
    of_top = rf"(?:\b(?:out|scale)\s++of|/)\s*+{top}|{top}[\s-]point\s++scale"
    text = re.sub(rf"{bottom}{between}{top}{note}", " ", text.lower())
    text = re.sub(of_top, "\0", text)
    for pattern in (_OPENING_VALUE, _MARKED_VALUE, _ANY_VALUE):
        for match in pattern.finditer(text):
            value = float(match[match.lastindex or 0].translate({ord("−"): "-", ord("–"): "-"}))
            if low <= value <= high:
                return value
    return None


def parse_vote(text: str, candidates: int) -> int | None:
    """Return the candidate that a reply votes for, from 1 to `candidates`, or None.

    The first match in this order counts: the boxed number, the last one called best, the one that opens the reply, the
    last one that is chosen, concluded or called better, the last one called a choice, the first one. Negated numbers do
    not count.
    """
    text = re.sub(rf"\b(?:out\s+)?of\s+(?:the\s+)?{candidates}\b", " ", text, flags=re.IGNORECASE)
    for pattern in _VOTES[:-1]:
        if valid := _valid(pattern.finditer(text), candidates):
            return valid[-1]
    text = _NEGATED.sub(" ", text)
    if valid := _valid(_VOTES[-1].finditer(text), candidates):
        return valid[-1]
    return next(iter(_valid(_ANY_CANDIDATE.finditer(text), candidates)), None)


def _valid(matches: Iterable[re.Match[str]], candidates: int) -> list[int]:
    numbers = (int(next(filter(None, match.groups()))) for match in matches)
    return [number for number in numbers if 1 <= number <= candidates]


def parse_proposals(text: str) -> list[str]:
    """Return the thoughts that a reply lists: its list items without markers, or its lines if it has no list.

    An introduction ("Here are three ideas:"), code fences and headings are skipped.
    """
    lines = [line.strip().removeprefix("> ") for line in text.splitlines()]
    lines = [_strip_emphasis(line) for line in lines if line and not line.startswith(("```", "~~~"))]
    for mark, min_items in ((_NUMBERED, 1), (_BULLET, 1), (_LETTERED, 2)):
        matches = [mark.fullmatch(line) for line in lines]
        items = [match[1] for match in matches if match]
        first = next((i for i, match in enumerate(matches) if match), 0)
        if len(items) >= min_items and (first == 0 or mark is not _BULLET or len(items) > 1 or lines[0].endswith(":")):
            return [item for item in map(_strip_emphasis, items) if item]
    if len(lines) > 1 and (lines[0].endswith(":") or lines[0].startswith("#")):
        lines = lines[1:]
    return [line for line in lines if line]


def _strip_emphasis(line: str) -> str:
    """Remove emphasis or quotation marks around a whole line."""
    line = line.strip()
    match = _WRAPPED.fullmatch(line)
    return match[2].strip() if match and match[1] not in match[2] else line
