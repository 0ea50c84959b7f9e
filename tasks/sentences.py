"""Split plain English text into sentences and paragraphs.

This module knows nothing of tasks or models. It splits by punctuation, not by meaning, so a missing full stop joins two
sentences. No text makes these functions raise, and all take linear time.
"""

from __future__ import annotations

import re

# The end of a sentence: punctuation, then closing quotes and brackets, before a space or the end of the text.
_END = re.compile(r"(?<![.!?…])[.!?…]++[\"'”’»)\]}*_]*+(?=\s|\Z)")
_OPENERS = "\"'“‘«([{*_¿¡-–— "
# Abbreviations before any word: a full stop after one does not end a sentence.
_BEFORE_ANYTHING = re.compile(
    r"dr|mr|mrs|ms|prof|st|mt|ft|rev|hon|gen|col|capt|lt|sgt|gov|sen|rep|messrs|cf|vs|viz|approx|e\.g|i\.e|al",
    re.IGNORECASE,
)
# Abbreviations before a number: a full stop between the two does not end a sentence.
_BEFORE_NUMBERS = re.compile(
    r"nos?|figs?|eq|sec|ch|vol|pp?|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec", re.IGNORECASE
)

# Abbreviations with full stops inside (U.S., p.m., Ph.D.) end a sentence only before one of these words.
_DOTTED = re.compile(r"(?:[A-Za-z]{1,2}\.)+[A-Za-z]{1,2}")
_STARTERS = frozenset(
    "he she it they we i you his her its our my the a this that these there then but and so when nobody no".split()  # noqa: SIM905  # language: ok
)

_TO_TYPED = str.maketrans(dict(zip("“”„«»‘’‚`´–—−‑", "\"\"\"\"\"'''''----", strict=True), **{"…": "..."}))


def split(text: str) -> list[str]:
    """Return the sentences of `text`, in order, each with its closing punctuation and quotes, stripped.

    A sentence ends at `.`, `!`, `?` or an ellipsis, but not after a title (`Dr.`), an initial (`J. R. Smith`) or a
    dotted abbreviation before a name (`U.S. Army`), in a number (`3.5`), or before a lower-case word
    (`"Why?" he said.`). A blank line also ends a sentence.
    """
    sentences = []
    for paragraph in _blocks(text):
        start = 0
        for match in _END.finditer(paragraph):
            if match.end() == len(paragraph) or _ends(paragraph, start, match):
                sentences.append(" ".join(paragraph[start : match.end()].split()))
                start = match.end()
        if rest := " ".join(paragraph[start:].split()):
            sentences.append(rest)
    return sentences


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs of `text`, separated by blank lines, or by line ends if it has no blank lines."""
    blocks = _blocks(text)
    return blocks if len(blocks) != 1 else [line.strip() for line in blocks[0].splitlines()]


def typed(text: str) -> str:
    """Convert `text` to straight quotes, hyphens instead of dashes, and single spaces."""
    return " ".join(text.translate(_TO_TYPED).split())


def _blocks(text: str) -> list[str]:
    # Return the blocks between blank lines.
    grouped: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.strip():
            grouped[-1].append(line.strip())
        elif grouped[-1]:
            grouped.append([])
    return ["\n".join(group) for group in grouped if group]


def _ends(text: str, start: int, match: re.Match[str]) -> bool:
    # Return True if the sentence from `start` ends at this match of `_END`, which more text follows.
    after = text[match.end() : match.end() + 40].split(maxsplit=1)
    following = after[0].lstrip(_OPENERS) if after else ""
    if following[:1].islower():
        return False
    if match[0] != ".":
        return True
    words = text[max(start, match.start() - 20) : match.start()].split()
    word = words[-1].lstrip(_OPENERS) if words else ""
    if len(word) == 1 and word.isupper():  # an initial
        return word == "I"
    if word.isdigit() and len(words) == 1:  # the number of a list item
        return False
    if _DOTTED.fullmatch(word):
        if word.lower() in ("a.m", "p.m") and len(text[max(start, match.start() - 60) : match.start()].split()) > 3:
            return True
        return following.rstrip(",;:.!?").lower() in _STARTERS
    if _BEFORE_NUMBERS.fullmatch(word):
        return not following[:1].isdigit()
    return not _BEFORE_ANYTHING.fullmatch(word)
