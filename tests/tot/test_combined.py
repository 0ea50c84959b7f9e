"""Evaluators without a model, and combinations of evaluators, with values computed by hand."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from tot import (
    BFS,
    Combine,
    Confidence,
    Enumerate,
    Node,
    Prior,
    Solution,
    Task,
    solve,
)
from tot.decoders import OptionError
from tot.evaluators.base import Evaluator
from tot.llm.context import Context
from tot.llm.replies import Evaluation

ONE_LEVEL = BFS(thoughts=2, breadth=2, depth=2)


class Table(Evaluator):
    """Values by the text of the last thought; records the evaluated texts."""

    values: dict[str, float | None]
    evaluated: list[str] = []  # noqa: RUF012 - pydantic copies it
    name: str = "table"

    def key(self, ctx: Context, node: Node) -> Hashable | None:
        assert node.thought is not None
        return self.name, node.thought.text

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[Evaluation]:
        texts = [node.thought.text for node in nodes if node.thought]
        self.evaluated.extend(texts)
        return [Evaluation(self.values[text]) for text in texts]


def grow(task: Any, decoder: Any, evaluator: Any, search: Any = ONE_LEVEL, **options: Any) -> Solution:
    return solve(task, "q", decoder=decoder, search=search, evaluator=evaluator, **options)


def value(letters: Any, scripted: Any, evaluator: Any) -> float | None:
    """Return the evaluator's value of the thought "a"."""
    decoder = scripted({"grow": ["a"]})
    result: float | None = grow(letters, decoder, evaluator, BFS(thoughts=1, depth=2)).tree[1].value
    return result


def table(name: str, number: float | None) -> Table:
    return Table(values={"a": number}, name=name)


# -- combination rules ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "values", "weights", "combined"),
    [
        ("product", (0.25, 0.64), (0.5, 0.5), 0.4),  # RAP: r_a^alpha * r_b^(1 - alpha)
        ("product", (0.5, 0.8), (1.0, 0.0), 0.5),
        ("product", (0.0, 0.8), (0.5, 0.5), 0.0),
        ("product", (2.0, 3.0), (2.0, 1.0), 12.0),
        ("log", (math.e, math.e**3), (0.5, 0.5), 2.0),
        ("log", (0.25, 0.64), (0.5, 0.5), math.log(0.4)),
        ("log", (0.0, 1.0), (0.5, 0.5), 0.5 * math.log(1e-12)),  # far below the scale, but still finite
    ],
)
def test_values_are_combined_by_the_rule(
    letters: Any, scripted: Any, rule: Any, values: tuple[float, ...], weights: tuple[float, ...], combined: float
) -> None:
    parts = tuple(table(str(i), number) for i, number in enumerate(values))
    result = value(letters, scripted, Combine(evaluators=parts, weights=weights, rule=rule))
    assert result == pytest.approx(combined)


@pytest.mark.parametrize("rule", ["product", "log"])
def test_negative_values_are_refused(letters: Any, scripted: Any, rule: Any) -> None:
    parts = (table("x", -1.0), table("y", 2.0))
    with pytest.raises(OptionError, match=rf"Combine\(rule='{rule}'\) of \[-1\.0, 2\.0\] .* values below 0"):
        value(letters, scripted, Combine(evaluators=parts, weights=(1, 1), rule=rule))


@pytest.mark.parametrize(("count", "weights"), [(1, (0.5, 0.5)), (2, (1.0,)), (0, ())])
def test_numbers_of_evaluators_and_weights_must_match(count: int, weights: tuple[float, ...]) -> None:
    with pytest.raises(
        ValidationError, match=f"{count} evaluators and {len(weights)} weights: give one weight for each"
    ):
        Combine(evaluators=tuple(table(str(i), 1) for i in range(count)), weights=weights)


# -- shared evaluations -----------------------------------------------------------------------------------------


def test_parts_are_evaluated_once_for_equal_states(letters: Any, scripted: Any) -> None:
    first = Table(values={"a": 1, "b": 2, "c": 3}, name="first")
    second = Table(values={"a": 10, "b": 20, "c": 30}, name="second")
    decoder = scripted({"grow": ["a", "b"], "grow a": ["b", "c"], "grow b": ["a", "c"]})
    evaluator = Combine(evaluators=(first, second), weights=(1, 1))
    solution = grow(letters, decoder, evaluator, BFS(thoughts=2, breadth=2, depth=3))
    assert sorted(first.evaluated) == sorted(second.evaluated) == ["a", "b", "c"]
    texts = {"/".join(t.text for t in solution.tree.state(node).thoughts): node.value for node in solution.tree}
    assert texts == {"": None, "a": 10, "b": 40, "a/b": 40, "a/c": 90, "b/a": 10, "b/c": 90}


# -- without a model --------------------------------------------------------------------------------------------


def test_confidence_without_votes_is_rejected_with_a_remedy(letters: Any, scripted: Any) -> None:
    with pytest.raises(OptionError, match=r"the thought generator returns no confidence: use Sample\(samples=8\)"):
        grow(letters, scripted({"grow": ["a", "b"]}), Confidence())


def test_a_thought_without_a_prior_is_rejected_with_a_remedy(letters: Any, scripted: Any) -> None:
    class Given:
        def on_expand(self, search: Any, nodes: Sequence[Node]) -> list[Node]:
            return [search.inject(search.tree.root, "mine")]

    with pytest.raises(OptionError, match=r"returns no prior: use Enumerate\(\) or Sample\(\)"):
        grow(letters, scripted({"grow": ["a", "b"]}), Prior(), hooks=Given())


def test_evaluators_can_be_named_by_the_task_or_built_in_python(letters: Any, scripted: Any) -> None:
    task: type[Task] = type("Acting", (letters,), {"actions": lambda self, state: ["a", "b"]})
    by_name = grow(task, scripted({}), "prior", generator="enumerate:prior=uniform")
    by_hand = grow(task, scripted({}), Prior(), generator=Enumerate(prior="uniform"))
    assert [node.value for node in by_name.tree] == [node.value for node in by_hand.tree] == [None, 0.5, 0.5]
