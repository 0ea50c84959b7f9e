"""The table of measured evaluators, and the warning of a search that prunes by one that is too noisy."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tot import BFS, DFS, MCTS, BestFirst, Likelihood, SelfConsistency
from tot.evaluators.heuristic import Heuristic, Random
from tot.evaluators.noise import Auroc, table, warn_if_noisy
from tot.registry import EVALUATORS, TASKS
from tot.tasks.game24 import Game24
from tot.tasks.gsm8k import GSM8K

DOCS = Path(__file__).parents[2]


def of_size(size: int, model_type: str = "qwen2") -> Any:
    """A model of one weight."""
    weights = SimpleNamespace(shapes={"w": (size,)})
    return SimpleNamespace(config=SimpleNamespace(model_type=model_type), weights=weights)


SMALL = of_size(494_000_000)


@pytest.mark.parametrize("row", table(), ids=lambda row: f"{row.task}-{row.model}-{row.evaluator}")
def test_each_row_names_known_parts_and_a_page_with_its_numbers(row: Auroc) -> None:
    assert row.task in {TASKS[name].__name__ for name in TASKS}
    assert row.evaluator in {EVALUATORS[name].__name__ for name in EVALUATORS}
    auroc, low, high = row.unfinished
    assert 0 <= low <= auroc <= high <= 1
    assert f"{auroc:.2f} ({low:.2f} to {high:.2f})" in (DOCS / row.source).read_text()


@pytest.mark.parametrize(
    "search",
    [BFS(), BFS(select="sample"), DFS(), BestFirst(rank="value"), MCTS()],
    ids=lambda search: f"{type(search).__name__}-{getattr(search, 'select', '')}",
)
def test_a_search_that_prunes_by_a_noisy_evaluator_is_warned_of(search: Any, caplog: pytest.LogCaptureFixture) -> None:
    warn_if_noisy(GSM8K(), search, Likelihood(), SMALL)
    assert caplog.messages == [
        "Likelihood is too noisy to prune by on GSM8K with qwen2-0.5b (AUROC 0.49, 0.44 to 0.55; "
        "docs/benchmarks/answers.md): keep all branches (bfs:select=all) or vote (self-consistency)"
    ]
    assert caplog.records[0].levelno == logging.WARNING


@pytest.mark.parametrize(
    ("task", "search", "evaluator", "model"),
    [
        (GSM8K(), BFS(select="all"), Likelihood(), SMALL),
        (GSM8K(), BFS(thoughts=1, breadth=1), Likelihood(), SMALL),
        (GSM8K(), SelfConsistency(weighted=True), Likelihood(), SMALL),
        (GSM8K(), BestFirst(rank="prior"), Likelihood(), SMALL),
        (GSM8K(), BFS(), Random(), SMALL),
        (GSM8K(), BFS(), Likelihood(), of_size(1_540_000_000)),
        (GSM8K(), BFS(), Likelihood(), of_size(494_000_000, "llama")),
        (GSM8K(), BFS(), Likelihood(), None),
        (Game24(), BFS(), Likelihood(), SMALL),
        (Game24(), BFS(), Heuristic(), SMALL),
    ],
    ids=["all", "one", "votes", "prior", "unmeasured", "size", "family", "server", "task", "exact"],
)
def test_other_searches_evaluators_and_models_are_not(
    task: Any, search: Any, evaluator: Any, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_noisy(task, search, evaluator, model)
    assert caplog.messages == []


def test_the_command_warns(
    scripted: Any, tot: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tot.evaluators.noise.family_of", lambda model: "qwen2-0.5b")
    monkeypatch.setattr("tot.decoders.engine.open_models.shared_engines", lambda *_, **__: nullcontext([None]))
    monkeypatch.setattr("tot.llm.decoders.load_decoder", lambda *_, **__: nullcontext(scripted({})))
    monkeypatch.setattr("tot.llm.decoders.has_chat_template", lambda _: False)
    status, _, err = tot("solve", "gsm8k", "1 + 1?", "--search", "bfs:thoughts=2,depth=2", "--evaluator", "logprob")
    assert status == 0
    assert "LogProb is too noisy to prune by on GSM8K with qwen2-0.5b (AUROC 0.57, " in err + "".join(caplog.messages)
