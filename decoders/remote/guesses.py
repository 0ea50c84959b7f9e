"""Choices scored by what little some servers say: the likely tokens of one place, or a text. Neither is exact.

Pure functions of what was said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tot.decoders.request import ChoiceLogprob

IMPOSSIBLE = -100.0
"""Nats of a choice that was not said."""


def by_first_token(choices: Sequence[str], likely: Mapping[str, float]) -> tuple[ChoiceLogprob, ...] | None:
    """Each choice by those of the likely tokens (with their log-probabilities) that it begins with.

    A choice that begins with none of them has the least of them, which is more than it deserves. None where a token
    begins two choices, as "1" does "1" and "10", or all of them begin none.
    """
    found: dict[str, list[float]] = {choice: [] for choice in choices}
    for token, logprob in likely.items():
        begun = [choice for choice in found if token.strip() and choice.strip().startswith(token.strip())]
        if len(begun) > 1:
            return None
        for choice in begun:
            found[choice].append(logprob)
    if not any(found.values()):
        return None
    least = min(likely.values())
    totals = [math.log(math.fsum(map(math.exp, found[one]))) if found[one] else least for one in choices]
    return tuple(ChoiceLogprob(total, 1) for total in totals)


def by_text(choices: Sequence[str], text: str) -> tuple[ChoiceLogprob, ...]:
    """0 for the choice that a text begins with, the longest if there are several, or else for the one it names first;
    -100 for the others."""
    text = text.strip().lower()
    wanted = {choice: choice.strip().lower() for choice in choices}
    begun = [choice for choice, said in wanted.items() if text.startswith(said)]
    named = [choice for choice, said in wanted.items() if said in text]
    chosen = None
    if begun:
        chosen = max(begun, key=len)
    elif named:
        chosen = min(named, key=lambda choice: (text.index(wanted[choice]), -len(choice)))
    return tuple(ChoiceLogprob(0.0 if choice == chosen else IMPOSSIBLE, 1) for choice in choices)
