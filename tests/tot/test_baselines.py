"""Chain of thought, self-consistency and best of n with solve(): whole solutions from the `chain` template."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

import pytest

from tot import BestOfN, ChainOfThought, Observation, Sample, SelfConsistency, State, Task, Thought, Value, solve
from tot.decoders.errors import TaskError


class Riddle(Task):
    """The answer is the last word of a solution, case-insensitive."""

    templates: ClassVar = {"chain": "solve {{ question }}", "value": "value {{ chain }}"}

    def parse_answer(self, text: str) -> str | None:
        words = text.split()
        return words[-1] if words and words[-1] != "..." else None

    def canonical(self, answer: Any) -> Hashable:
        return str(answer).lower()


class Checked(Riddle):
    """Riddle with a check: "yes" is correct."""

    def verify(self, question: str, answer: Any) -> bool:
        return bool(str(answer).lower() == "yes")


# -- chain of thought -------------------------------------------------------------------------------------------


def test_chain_of_thought_is_one_greedy_request(scripted: Any) -> None:
    decoder = scripted({"solve q": "first this, then that, so yes"})
    solution = solve(Riddle, "q", decoder=decoder, search=ChainOfThought())
    assert decoder.prompts == [["solve q"]]
    (request,) = decoder.requests
    assert (request.sampling.n, request.sampling.temperature, request.purpose) == (1, 0.0, "generate")
    assert (solution.answer, solution.calls, solution.stopped) == ("yes", 1, None)
    assert [(node.depth, node.terminal, node.chosen) for node in solution.tree] == [(0, False, True), (1, True, True)]


def test_a_given_temperature_applies_to_a_single_solution(scripted: Any) -> None:
    decoder = scripted({"solve q": "so yes"})
    solve(Riddle, "q", decoder=decoder, search=ChainOfThought(), generator=Sample(temperature=0.7))
    solve(Riddle, "q", decoder=decoder, search=ChainOfThought(), generator="sample:temperature=1")
    solve(Riddle, "q", decoder=decoder, search=ChainOfThought(), generator=Sample())
    assert [request.sampling.temperature for request in decoder.requests] == [0.7, 1.0, 0.0]


# -- best of n --------------------------------------------------------------------------------------------------


def test_best_of_n_takes_a_verified_solution_without_evaluation(scripted: Any) -> None:
    decoder = scripted({"solve q": ["so no", "so yes", "maybe"]})
    solution = solve(Checked, "q", decoder=decoder, search=BestOfN(samples=3), evaluator=Value())
    assert (solution.answer, solution.solved, solution.value) == ("yes", True, None)
    assert decoder.prompts == [["solve q"]]


@pytest.mark.parametrize(("budget", "waves"), [({}, [80]), ({"tokens": 10**6}, [32, 32, 16])])
def test_under_a_budget_best_of_n_decodes_in_waves(scripted: Any, budget: dict[str, int], waves: list[int]) -> None:
    """All samples together might end only after the budget. The best of all waves is the answer."""
    replies = [f"so {number}" for number in range(80)]
    values = {f"value so {number}": str(9 if number == 3 else 1 + number % 5) for number in range(80)}
    decoder = scripted({"solve q": replies} | values)
    solution = solve(Riddle, "q", decoder=decoder, search=BestOfN(samples=80), evaluator=Value(), budget=budget)
    assert [request.sampling.n for request in decoder.requests if request.purpose == "generate"] == waves
    assert solution.answer == "3"


# -- tasks with a world -----------------------------------------------------------------------------------------

WRONG, RIGHT = "Answer: 13 + 9 + 10 + 4", "Answer: (13 - 9) * (10 - 4)"


# -- several solution templates -------------------------------------------------------------------------------------


class Both(Riddle):
    """A solution is written or computed: acting on a computed one doubles its last word."""

    templates: ClassVar = {"chain": "solve {{ question }}", "sum": "sum {{ question }}", "value": "value"}

    async def act(self, state: State, thought: Thought) -> Observation | None:
        source = thought.parts.get("sum")
        return (
            None if source is None else Observation(text=f"ran {source}", data=None if source == "..." else 2 * source)
        )

    def answer_at(self, state: State) -> Any | None:
        observation = state.thoughts[-1].observation if state.thoughts else None
        return None if observation is None else observation.data


def test_solution_templates_alternate(scripted: Any) -> None:
    decoder = scripted({"solve q": ["so aa", "so b", "so b"], "sum q": ["a", "a"]})
    search = SelfConsistency(samples=5, solutions="chain+sum")
    solution = solve(Both, "q", decoder=decoder, search=search)
    assert [(request.prompt[0].content, request.sampling.n) for request in decoder.requests] == [
        ("solve q", 3),
        ("sum q", 2),
    ]
    leaves = solution.tree.leaves()
    assert [list(leaf.thought.parts) for leaf in leaves] == [["chain"], ["sum"]] * 2 + [["chain"]]
    assert [leaf.thought.observation and leaf.thought.observation.text for leaf in leaves[:2]] == [None, "ran a"]
    assert solution.answer == "aa"


def test_a_missing_solution_template_is_named(scripted: Any) -> None:
    with pytest.raises(TaskError, match="product"):
        solve(Both, "q", decoder=scripted({}), search="self-consistency:samples=2,solutions=product")
