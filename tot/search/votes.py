"""Votes of complete solutions for answers, and searches that stop when more votes would not change the result."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator

from tot.search.base import Search, SearchState
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


def stays_ahead(ballots: Sequence[Ballot], remaining: int) -> float:
    """Return the posterior that the leading answer has the most weight after `remaining` more ballots.

    Adaptive consistency (Aggarwal et al., 2023, section 3.2) with a limit on the number of samples: the shares of the
    leader, of the strongest other answer and of all others have a uniform Dirichlet prior. Weights count in multiples
    of their mean. 0 without a ballot; a tie at the end counts half.
    """
    if not ballots:
        return 0.0
    mean = fmean(ballot.weight for ballot in ballots) or 1.0
    weights: dict[Hashable, float] = {}
    for ballot in ballots:
        weights[ballot.answer] = weights.get(ballot.answer, 0.0) + ballot.weight / mean
    first, second, *others = [*sorted(weights.values(), reverse=True), 0.0]
    leader, rival, rest = 1 + first, 1 + second, 1 + math.fsum(others)
    ahead = round(first - second, 9)
    lead = math.floor(ahead)

    def of_rival(count: int, missed: int) -> float:
        """Return the probability that the rival gets `count` of the ballots that the leader misses."""
        if count > missed:
            return 0.0
        return math.exp(_rising(rival, count) + _rising(rest, missed - count) - _rising(rival + rest, missed))

    lost = overtaken = 0.0  # `overtaken`: the rival gets more than `limit` of the missed ballots
    for missed in range(remaining + 1):
        limit = lead + remaining - missed
        tied = of_rival(limit, missed)
        share = _rising(leader, remaining - missed) + _rising(rival + rest, missed)
        lost += math.exp(share - _rising(leader + rival + rest, remaining)) * (overtaken + tied * (lead == ahead) / 2)
        overtaken += tied * (rival + limit) / (rival + rest + missed) + of_rival(limit, missed + 1)
    return 1 - lost


def _rising(start: float, steps: int) -> float:
    """Return log(start (start + 1) ... (start + steps - 1) / steps!)."""
    return math.lgamma(start + steps) - math.lgamma(start) - math.lgamma(steps + 1)


class VotesUntilSure(Search):
    """A search that collects answers. With `until`, it stops when more answers would hardly change the result."""

    until: Annotated[float, Field(gt=0, le=1)] | None = None
    """Stop when the posterior that the leading answer stays ahead with all answers reaches this (`stays_ahead`)."""

    @field_validator("until")
    @classmethod
    def _votes(cls, until: float | None, info: ValidationInfo) -> float | None:
        if until is not None and info.data.get("aggregate") == "best":
            raise ValueError("until counts votes: set aggregate to vote or majority")
        return until

    def ballots(self, search: SearchState, evaluated: bool = False) -> list[Ballot]:
        """Return the votes of the solutions that have ended; with `evaluated`, of the ones that have a value."""
        ended = [node for node in search.complete() if search.is_end(node) and not (evaluated and node.value is None)]
        answers = [(node, search.answer_at(node)) for node in ended]
        answered = [(node, answer) for node, answer in answers if answer is not None]
        question = search.tree.state(search.tree.root).question
        return cast(search.checked, question, answered, self.aggregate == "majority")[0]

    def is_sure(self, ballots: list[Ballot], remaining: int) -> bool:
        """Return whether the vote can stop, if at most `remaining` more ballots can follow."""
        return self.until is not None and len(ballots) > 1 and stays_ahead(ballots, max(0, remaining)) >= self.until
