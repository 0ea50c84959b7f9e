"""Votes of complete solutions for answers."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from tot.task.checked import CheckedTask
from tot.tree.tree import Node


@dataclass(frozen=True, slots=True)
class Ballot:
    """The vote of one complete solution."""

    answer: Hashable
    """The answer in canonical form: equal answers compare equal."""
    weight: float = 1.0
    """Weight of the vote, such as the solution's likelihood."""
    source: str = ""
    """The template that wrote the solution ("chain", "program"), followed by "@" and the model if a search has two."""


def count(
    task: CheckedTask, question: str, answers: Sequence[Any], weights: Sequence[float]
) -> tuple[list[Hashable], list[int]]:
    """Return the key of each answer, and the indices of the winning votes; the elected answer is first."""
    if not answers:
        return [], []
    keys, first = task.elect(question, answers, weights)
    return keys, [first, *(i for i, key in enumerate(keys) if key == keys[first] and i != first)]


def weights_of(values: Sequence[float | None]) -> list[float]:
    """Return the weight of the vote of each solution with this value: the value, or 1 without one.

    If a value is negative (a logarithm, minus a cost), the exponentials of all values are used.
    """
    weights = [1.0 if value is None else value for value in values]
    if any(weight < 0 for weight in weights):
        top = max(weights)
        weights = [1.0 if weight == top else math.exp(weight - top) for weight in weights]
    return weights


def votes_of(nodes: Sequence[Node], equal: bool = False) -> dict[int, float]:
    """Return the weight of each state's vote: `weights_of` its value, or 1 if `equal`, times its merged thoughts."""
    weights = weights_of([None if equal else node.value for node in nodes])
    return {node.id: weight * (1 + node.merged) for node, weight in zip(nodes, weights, strict=True)}


def source_of(node: Node) -> str:
    """Return the template that wrote a node's thought, followed by "@" and the model if the search has several."""
    template = "" if node.thought is None else next(reversed(node.thought.parts), "")
    _, at, model = (node.decoder or "").partition("@")
    return f"{template}{at}{model}"


def cast(
    task: CheckedTask, question: str, answered: Sequence[tuple[Node, Any]], equal: bool = False
) -> tuple[list[Ballot], list[int]]:
    """Return the ballots of nodes with their answers, and the indices of the winning ones."""
    nodes = [node for node, _ in answered]
    by_node = votes_of(nodes, equal)
    weights = [by_node[node.id] for node in nodes]
    keys, winners = count(task, question, [answer for _, answer in answered], weights)
    return [Ballot(*ballot) for ballot in zip(keys, weights, map(source_of, nodes), strict=True)], winners
