"""Every kind of budget ends every search: with a decoder that counts nothing, refused thoughts, and parts that hang."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, ClassVar

import pytest

from tot import Budget, Search, SearchState, State, Task, Thought, solve
from tot.decoders import Completion, Request, Usage
from tot.decoders.budget import Meter
from tot.decoders.request import ChoiceLogprob
from tot.registry import SEARCHES
from tot.search.steps import Steps

pytestmark = pytest.mark.filterwarnings("ignore:the thought generator returns no log-probabilities")
BUDGETS: dict[str, float] = {"tokens": 40, "forwards": 30, "seconds": 0.3, "nodes": 12}
ENDLESS = {
    "ab-mcts": "ab-mcts",
    "act": "act:depth=1000000",
    "best-first": "best-first:depth=1000000",
    "best-of-n": "best-of-n:samples=1000000",
    "auto": "auto:samples=500,until=1,together=4",
    "bfs": "bfs:depth=1000000",
    "dfs": "dfs:depth=1000000",
    "mcts": "mcts:depth=1000000,iterations=1000000",
    "rap": "rap:depth=1000000,iterations=1000000",
    "refine": "refine:depth=1000000",
    "self-consistency": "self-consistency:samples=1000000",
}
"""Built-in searches with limits that hardly a test reaches; `cot` always ends."""
REFUSED = ("ab-mcts", "act", "bfs", "dfs", "best-first", "mcts")


class Growing(Task):
    """Any thought is accepted, and none is a goal."""

    templates: ClassVar = dict.fromkeys(("thought", "value", "self_eval", "chain", "answer"), "{{ question }}")


class Refusing(Growing):
    def step(self, state: State, thought: Thought) -> State | None:
        return None


class Uncounted:
    """A decoder that writes another number each time, and reports no usage. It fails rather than decode for ever."""

    def __init__(self) -> None:
        self.numbers = count()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [self._reply(request) for request in requests for _ in range(request.sampling.n)]

    def _reply(self, request: Request) -> Completion:
        if (number := next(self.numbers)) > 300_000:
            raise RuntimeError("the search does not end")
        scored = tuple(ChoiceLogprob(-1.0 - number % 3, 1) for _ in request.choices)
        return Completion("" if scored else f"thought {number}", (), 0.0, "eos", Usage(), choice_logprobs=scored)


class Idle(Search):
    """A search that asks for nothing, for ever."""

    def steps(self, search: SearchState) -> Steps:
        while True:
            yield search.evaluate([])


class Repeating(Search):
    """A search that evaluates the same state for ever."""

    def steps(self, search: SearchState) -> Steps:
        (child, *_) = yield search.expand([search.tree.root], 1)
        while True:
            yield search.evaluate([child])


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tot.run._GRACE", 0.05)
    monkeypatch.setattr("tot.search.base._IDLE", 100)


def test_all_built_in_searches_are_tested() -> None:
    ours = {name for name in SEARCHES if SEARCHES[name].__module__.startswith("tot.")}
    assert ours - {name.partition(" ")[0] for name in ENDLESS} == {"cot"}


@pytest.mark.parametrize("kind", BUDGETS)
@pytest.mark.parametrize("search", ENDLESS)
def test_a_budget_ends_a_search_whose_decoder_counts_nothing(search: str, kind: str) -> None:
    evaluator = None if search in ("rap", "refine") else "random"
    solution = solve(
        Growing,
        "q",
        decoder=Uncounted(),
        search=ENDLESS[search],
        evaluator=evaluator,
        budget={kind: BUDGETS[kind]},
    )
    short = search in ("auto", "refine") and solution.stopped is None  # they end by themselves
    assert short or str(solution.stopped).startswith(f"budget: {kind} (")


@pytest.mark.parametrize("kind", BUDGETS)
@pytest.mark.parametrize("search", REFUSED)
def test_a_budget_ends_a_search_whose_thoughts_are_all_refused(search: str, kind: str) -> None:
    how: dict[str, Any] = {"search": ENDLESS[search], "evaluator": "random", "budget": {kind: BUDGETS[kind]}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tot.search.base._IDLE", 10**6)
        solution = solve(Refusing, "q", decoder=Uncounted(), **how)
    assert len(solution.tree) == 1
    if search == "ab-mcts":  # the others have nothing left to expand
        assert str(solution.stopped).startswith(f"budget: {kind} (")


@pytest.mark.parametrize("kind", BUDGETS)
@pytest.mark.parametrize("search", [Idle(), Repeating()], ids=lambda search: type(search).__name__)
def test_a_search_without_progress_ends_with_any_budget(search: Search, kind: str) -> None:
    solution = solve(
        Growing, "q", decoder=Uncounted(), search=search, evaluator="logprob", budget={kind: BUDGETS[kind]}
    )
    assert str(solution.stopped).startswith((f"budget: {kind} (", "no progress in 100 steps"))


@pytest.fixture
def blocked() -> Iterator[Any]:
    """A scorer that returns only after the test."""
    end = threading.Event()
    yield lambda program: float(end.wait())
    end.set()


def test_a_limit_on_seconds_ends_a_search_whose_decoder_hangs(blocked: Any) -> None:
    class Hanging:
        def generate(self, requests: Sequence[Request]) -> list[Completion]:
            blocked("")
            return []

    for search in ("bfs", "cot", "ab-mcts"):
        solution = solve(Growing, "q", decoder=Hanging(), search=search, evaluator="random", budget={"seconds": 0.2})
        assert (solution.answer, str(solution.stopped)[:17]) == (None, "budget: seconds (")


@pytest.mark.parametrize("kind", ["tokens", "forwards", "nodes"])
def test_a_budget_ends_a_search_without_a_model(kind: str) -> None:
    class Counting(Growing):
        def actions(self, state: State) -> list[str]:
            return ["more"]

        def heuristic(self, state: State) -> float:
            return 1.0

    how: dict[str, Any] = {"model": None, "generator": "enumerate:prior=uniform", "evaluator": "heuristic"}
    for search in ("ab-mcts", "act", "best-first", "bfs", "dfs", "mcts"):
        solution = solve(Counting, "q", search=ENDLESS[search], budget={kind: 9}, **how)
        assert str(solution.stopped).startswith(f"budget: {kind} (")


def test_texts_without_counts_are_estimated_for_the_budget_alone() -> None:
    meter = Meter(Budget(tokens=30))
    texts = [Completion("a" * length, (), 0.0, "eos", Usage()) for length in (40, 71)]
    meter.receive(texts[:1])
    assert (meter.overspent(), meter.total.new_tokens, meter.total.forwards) == (None, 0, 0)
    meter.receive(texts[1:])
    assert meter.overspent() is None  # 11 and 18 tokens
    meter.receive([Completion("counted", (), 0.0, "eos", Usage(new_tokens=2, forwards=2))])
    assert meter.overspent() is None  # the decoder counts its tokens itself
    meter.receive(texts[:1])
    assert meter.overspent() == "tokens (40 of 30)"
