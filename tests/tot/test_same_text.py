"""In float32 every decoder gives exactly the same search tree; only the number of forward passes differs."""

from __future__ import annotations

from typing import Any

import pytest

from tot import BFS, Solution, solve
from tot.decoders import Engine, load_decoder, load_model

QUESTION = "A gardener plants 7 rows of tulips with 9 tulips in each row. Rabbits eat 15 of them. How many are left?"
DECODERS: list[Any] = [
    ("sd", {"draft": "smollm2-135m"}),
    pytest.param("mcsd", {"draft": "smollm2-135m"}, marks=pytest.mark.slow),
    pytest.param("seed", {}, marks=pytest.mark.slow),
    ("seed", {"policy": "rounds", "draft": "smollm2-135m"}),
    ("auto", {}),
    ("jacobi", {}),
    ("lookahead", {"adapt": False, "window": 3, "ngram": 3, "guesses": 2}),
]


@pytest.fixture(scope="module")
def engine(smollm2: str) -> Any:
    with Engine(load_model(smollm2, dtype="fp32"), 20_000) as shared:
        yield shared


def grown(engine: Engine, name: str, options: dict[str, Any]) -> tuple[Solution, list[Any]]:
    with load_decoder(name, engine=engine, **options) as decoder:
        search = BFS(thoughts=2, breadth=1, depth=2)
        solution = solve(
            "gsm8k",
            QUESTION,
            decoder=decoder,
            search=search,
            evaluator="value",
            prompts="papers",
            max_tokens=16,
            seed=5,
        )
    return solution, [(node.thought, node.value, node.usage.new_tokens) for node in solution.tree]


@pytest.fixture(scope="module")
def by_ar(engine: Engine) -> tuple[Solution, list[Any]]:
    return grown(engine, "ar", {})


@pytest.mark.real
@pytest.mark.parametrize(("name", "options"), DECODERS, ids=lambda value: str(value).strip("{}"))
def test_the_tree_equals_the_autoregressive_one(
    engine: Engine, by_ar: tuple[Solution, list[Any]], name: str, options: dict[str, Any]
) -> None:
    expected, tree = by_ar
    solution, result = grown(engine, name, options)
    assert result == tree
    assert (solution.answer, solution.value) == (expected.answer, expected.value)
    assert solution.usage.new_tokens == expected.usage.new_tokens > 60
    assert solution.usage.forwards <= expected.usage.forwards or options.get("policy") == "rounds"
