"""Ballots: how complete solutions vote for answers, and how sure it is that more votes would not change the result."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from tot.task.checked import CheckedTask


@dataclass(frozen=True, slots=True)
class Ballot:
    """The vote of one complete solution."""

    answer: Hashable
    """The answer in canonical form: equal answers compare equal."""
    weight: float = 1.0
    """Weight of the vote, such as the solution's likelihood."""
    source: str = ""
    """What wrote the solution: the template ("chain", "program"), followed by "@" and the model if a search has two."""


def elected(answers: Sequence[Hashable], weights: Sequence[float]) -> list[int]:
    """Return the indices of the votes for the answer with the most weight; the first wins a tie."""
    voters: dict[Hashable, list[int]] = {}
    for i, answer in enumerate(answers):
        voters.setdefault(answer, []).append(i)
    return max(voters.values(), key=lambda places: math.fsum(weights[i] for i in places), default=[])


def count(
    task: CheckedTask, question: str, answers: Sequence[Any], weights: Sequence[float]
) -> tuple[list[Hashable], list[int]]:
    """Return the key of each answer, and the indices of the winning votes; if the task elects, its choice is first."""
    if (election := task.elect(question, answers, weights)) is None:
        keys = [task.canonical(answer) for answer in answers]
        return keys, elected(keys, weights)
    keys, first = election
    return keys, [first, *(i for i, key in enumerate(keys) if key == keys[first] and i != first)]
