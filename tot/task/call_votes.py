"""Votes of answers that are calls of functions, or JSON: by functions first, then by each argument or field."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
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
    kinds = _weigh((kind for kind, _ in parsed), weights)
    winner = max(kinds, key=kinds.__getitem__)
    group = [i for i, (kind, _) in enumerate(parsed) if kind == winner]
    scores = dict.fromkeys(group, 0.0)
    for slot in dict.fromkeys(slot for i in group for slot in parsed[i][1]):
        votes = _weigh((parsed[i][1].get(slot) for i in group), [weights[i] for i in group])
        best = max(votes, key=votes.__getitem__)
        for i in group:
            scores[i] += votes[best] * (parsed[i][1].get(slot) == best)
    keys: list[Hashable] = [(kind, tuple(sorted(fields.items()))) for kind, fields in parsed]
    return keys, max(group, key=lambda i: (scores[i], weights[i]))


def _parsed(answer: Any) -> tuple[Hashable, Mapping[tuple[int, str], str]]:
    """Return the functions of an answer, and the canonical value of each argument by (number of the call, name)."""
    if is_calls(answer):
        calls = sorted((call.name, _arguments(call)) for call in answer)
        fields = {(i, name): value for i, (_, arguments) in enumerate(calls) for name, value in arguments}
        return tuple(name for name, _ in calls), fields
    if isinstance(answer, str):
        return "text", {(0, ""): canonical(answer)}
    value = to_jsonable_python(answer, fallback=str)
    if isinstance(value, dict):
        return "object", {(0, name): canonical(one) for name, one in value.items()}
    return "value", {(0, ""): canonical(value)}


def _arguments(call: ToolCall) -> list[tuple[str, str]]:
    """Return the names and canonical values of a call's arguments, sorted; texts that are no object as one value."""
    try:
        given = from_json(call.arguments)
    except ValueError:
        given = call.arguments
    arguments = given if isinstance(given, dict) else {"": given}
    return sorted((name, canonical(value)) for name, value in arguments.items())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value.strip() if isinstance(value, str) else value


def _weigh(values: Iterable[Hashable], weights: Sequence[float]) -> dict[Hashable, float]:
    """Return the total weight of each value."""
    votes: defaultdict[Hashable, list[float]] = defaultdict(list)
    for value, weight in zip(values, weights, strict=True):
        votes[value].append(weight)
    return {value: math.fsum(cast) for value, cast in votes.items()}
