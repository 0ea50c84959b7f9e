"""Votes of answers that are calls of functions, or JSON: by functions first, then by each argument or field."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeGuard

from pydantic_core import from_json, to_jsonable_python

from tot.decoders.request import ToolCall


def canonical(value: Any) -> str:
    """Return a JSON value as text. Equal values have equal texts: 1 and 1.0, " a" and "a", keys in any order."""
    return json.dumps(_plain(value), sort_keys=True)


def is_calls(answer: Any) -> TypeGuard[tuple[ToolCall, ...]]:
    """Return whether an answer is calls of functions."""
    return isinstance(answer, tuple) and bool(answer) and all(isinstance(one, ToolCall) for one in answer)


def elect(answers: Sequence[Any], weights: Sequence[float]) -> tuple[list[Hashable], int]:
    """Return a key for each answer, which equal answers share, and the index of the elected answer.

    Answers are tuples of `ToolCall`, JSON values, or texts. The functions with the most weight win; all texts count as
    one function, all objects as another, and all other values as a third. The calls of one answer have no order: none
    of them sees the result of another. Then each argument of the winning functions, or each field of an object, has a
    vote of its own, in which a missing one is a value, too. The elected answer is the one that has the most weight of
    winning values, so the model wrote all of it.
    """
    parsed = [_parsed(answer) for answer in answers]
    group = elected([kind for kind, _ in parsed], weights)
    scores = dict.fromkeys(group, 0.0)
    for slot in dict.fromkeys(slot for i in group for slot in parsed[i][1]):
        winners = [group[i] for i in elected([parsed[i][1].get(slot) for i in group], [weights[i] for i in group])]
        for i in winners:
            scores[i] += math.fsum(weights[j] for j in winners)
    keys: list[Hashable] = [(kind, tuple(fields.items())) for kind, fields in parsed]
    return keys, max(group, key=lambda i: (scores[i], weights[i]))


def elected(answers: Sequence[Hashable], weights: Sequence[float]) -> list[int]:
    """Return the indices of the votes for the answer with the most weight; the first wins a tie."""
    voters: dict[Hashable, list[int]] = {}
    for i, answer in enumerate(answers):
        voters.setdefault(answer, []).append(i)
    return max(voters.values(), key=lambda places: math.fsum(weights[i] for i in places), default=[])


def _parsed(answer: Any) -> tuple[Hashable, Mapping[tuple[int, str], str]]:
    """Return the functions of an answer, and the canonical value of each argument by (number of the call, name)."""
    if is_calls(answer):
        calls = sorted((call.name, _arguments(call.arguments)) for call in answer)
        return tuple(name for name, _ in calls), {
            (i, key): one for i, (_, pairs) in enumerate(calls) for key, one in pairs
        }
    value = to_jsonable_python(answer, fallback=str)
    kind = "text" if isinstance(answer, str) else "object" if isinstance(value, dict) else "value"
    return kind, {(0, name): one for name, one in _fields(value)}


def _arguments(text: str) -> list[tuple[str, str]]:
    """Return the names and canonical values in a JSON object, sorted. Another text is one value."""
    try:
        return _fields(from_json(text))
    except ValueError:
        return _fields(text)


def _fields(value: Any) -> list[tuple[str, str]]:
    given = value if isinstance(value, dict) else {"": value}
    return sorted((name, canonical(one)) for name, one in given.items())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value.strip() if isinstance(value, str) else value
