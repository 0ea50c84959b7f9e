"""Sentences and paragraphs of plain English text.

Knows nothing of tasks or models. Splitting goes by punctuation, not by meaning: a full stop that is missing in the
text is missing here too. No text makes these functions raise, and all take time linear in the text.
"""

from __future__ import annotations

import re

# What ends a sentence: marks, then quotes and brackets that close; then space, or the end of the text.
_END = re.compile(r"(?<![.!?…])[.!?…]++[\"'”’»)\]}*_]*+(?=\s|\Z)")
_OPENERS = "\"'“‘«([{*_¿¡-–— "
# Abbreviations that go with what follows: a full stop after one does not end a sentence.
_BEFORE_ANYTHING = re.compile(
    r"dr|mr|mrs|ms|prof|st|mt|ft|rev|hon|gen|col|capt|lt|sgt|gov|sen|rep|messrs|cf|vs|viz|approx|e\.g|i\.e|al",
    re.IGNORECASE,
)
# Abbreviations that go with what follows only where it is a number.
_BEFORE_NUMBERS = re.compile(
    r"nos?|figs?|eq|sec|ch|vol|pp?|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec", re.IGNORECASE
)

# Abbreviations with full stops inside (U.S., p.m., Ph.D.) end a sentence only where such a word begins the next one.
_DOTTED = re.compile(r"(?:[A-Za-z]{1,2}\.)+[A-Za-z]{1,2}")
_STARTERS = frozenset(
    "he she it they we i you his her its our my the a this that these there then but and so when nobody no".split()  # noqa: SIM905
)

_TO_TYPED = str.maketrans(dict(zip("“”„«»‘’‚`´–—−‑", "\"\"\"\"\"'''''----", strict=True), **{"…": "..."}))


def split(text: str) -> list[str]:
    """The sentences of `text`, in order, each with the punctuation and quotes that close it, without space around.

    A sentence ends at `.`, `!`, `?` or an ellipsis, but not after a title (`Dr.`), an initial (`J. R. Smith`) or a
    dotted abbreviation before a name (`U.S. Army`), in a number (`3.5`), nor where the next word begins with a small
    letter (`"Why?" he said.`). A blank line ends one too.
    """
    sentences = []
    for paragraph in _blocks(text):
        start = 0
        for found in _END.finditer(paragraph):
            if found.end() == len(paragraph) or _ends(paragraph, start, found):
                sentences.append(" ".join(paragraph[start : found.end()].split()))
                start = found.end()
        if rest := " ".join(paragraph[start:].split()):
            sentences.append(rest)
    return sentences


def paragraphs(text: str) -> list[str]:
    """The paragraphs of `text`: parted by blank lines, or by line ends where there are no blank lines."""
    blocks = _blocks(text)
    return blocks if len(blocks) != 1 else [line.strip() for line in blocks[0].splitlines()]


def typed(text: str) -> str:
    """`text` as a typewriter has it: straight quotes, hyphens for dashes, single spaces."""
    return " ".join(text.translate(_TO_TYPED).split())


def _blocks(text: str) -> list[str]:
    # What blank lines part.
    grouped: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.strip():
            grouped[-1].append(line.strip())
        elif grouped[-1]:
            grouped.append([])
    return ["\n".join(group) for group in grouped if group]


def _ends(text: str, start: int, found: re.Match[str]) -> bool:
    # Whether the sentence from `start` ends at these marks, with more text to come.
    after = text[found.end() : found.end() + 40].split(maxsplit=1)
    following = after[0].lstrip(_OPENERS) if after else ""
    if following[:1].islower():
        return False
    if found[0] != ".":
        return True
    words = text[max(start, found.start() - 20) : found.start()].split()
    word = words[-1].lstrip(_OPENERS) if words else ""
    if len(word) == 1 and word.isupper():  # an initial
        return word == "I"
    if word.isdigit() and len(words) == 1:  # the number of a list's item
        return False
    if _DOTTED.fullmatch(word):
        if word.lower() in ("a.m", "p.m") and len(text[max(start, found.start() - 60) : found.start()].split()) > 3:
            return True
        return following.rstrip(",;:.!?").lower() in _STARTERS
    if _BEFORE_NUMBERS.fullmatch(word):
        return not following[:1].isdigit()
    return not _BEFORE_ANYTHING.fullmatch(word)
