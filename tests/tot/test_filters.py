"""Sampling filters top_k, top_p and min_p: given, or the model's defaults, and recorded with the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tot import SearchConfig, evaluate, solve
from tot.decoders import Completion, OptionError, Request, Usage
from tot.evaluation.folder import read_config
from tot.llm.decoders import filters_of
from tot.task.task import Task


class Letters(Task):
    """One letter a thought."""

    name = "letters"
    depth = 2
    templates: Mapping[str, str] = {"thought": "Say a letter: {{ question }}", "answer": "Which? {{ question }}"}
    sampling: Mapping[str, Mapping[str, Any]] = {"answer": {"top_p": 0.5}}

    def score(self, answer: Any, reference: Any) -> float:
        return float(answer == reference)


class Recording:
    """A decoder that replies "b" and records its requests."""

    def __init__(self, model: Any = None) -> None:
        self.requests: list[Request] = []
        self.model = model

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.requests += requests
        return [
            Completion("b", (1,), 0.0, "eos", Usage(new_tokens=1))
            for request in requests
            for _ in range(request.sampling.n)
        ]

    def drawn(self) -> dict[str, tuple[int, float, float]]:
        """Return (top_k, top_p, min_p) by purpose."""
        samplings = {request.purpose: request.sampling for request in self.requests}
        return {purpose: (one.top_k, one.top_p, one.min_p) for purpose, one in samplings.items()}


class Model:
    """The part of a model that this test needs."""

    class generation_config:  # noqa: N801
        top_k = 20
        top_p = 0.8
        min_p = None

    @staticmethod
    def named_parameters(remove_duplicate: bool = True) -> list[tuple[str, Any]]:
        return []


def run(decoder: Recording, **options: Any) -> Any:
    config = SearchConfig.of(None, options)
    return solve(Letters(), "q", config, decoder=decoder, search="bfs:thoughts=2", evaluator="random")


def test_given_filters_apply_unless_a_template_overrides_them() -> None:
    decoder = Recording()
    solution = run(decoder, top_k=7, top_p=0.9, min_p=0.05)
    assert decoder.drawn() == {"generate": (7, 0.9, 0.05), "answer": (7, 0.5, 0.05)}
    assert solution.filters == {"top_k": 7, "top_p": 0.9, "min_p": 0.05}
    assert solution.to_json()["filters"] == solution.filters


def test_filters_of_the_model_are_the_default_and_can_be_replaced_individually() -> None:
    decoder = Recording(Model)
    assert run(decoder).filters == {"top_k": 20, "top_p": 0.8}
    assert decoder.drawn()["generate"] == (20, 0.8, 0.0)
    assert run(decoder, top_p=1.0, top_k=0).filters == {"top_k": 0, "top_p": 1.0}
    assert decoder.drawn()["generate"] == (0, 1.0, 0.0)
    assert run(Recording()).filters == {}


def test_filters_of_a_named_model_come_from_its_files(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.8, "temperature": 0.7}))
    assert filters_of(tmp_path, {}) == {"top_p": 0.8}
    assert filters_of(str(tmp_path), {"min_p": 0.1, "top_p": None}) == {"top_p": 0.8, "min_p": 0.1}
    assert filters_of(tmp_path / "none", {}) == {}
    assert filters_of(None, {"top_k": 3}) == {"top_k": 3}
    (tmp_path / "generation_config.json").write_text("[")
    assert filters_of(tmp_path, {}) == {}


@pytest.mark.parametrize(("given", "message"), [({"top_p": 1.5}, "top_p=1.5"), ({"top_k": -1}, "top_k=-1")])
def test_an_invalid_filter_is_rejected_by_name(given: dict[str, float], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        run(Recording(), **given)


def test_the_configuration_of_an_evaluation_has_the_filters(tmp_path: Path, rows: Path) -> None:
    decoder = Recording(Model)
    options: dict[str, Any] = {"search": "bfs:thoughts=1", "evaluator": "random", "limit": 1}
    evaluate(Letters(), rows, decoder=decoder, out=tmp_path / "run", top_k=5, **options)
    assert decoder.drawn()["generate"] == (5, 0.8, 0.0)
    config = read_config(tmp_path / "run")
    assert (config["top_k"], config["top_p"]) == (5, 0.8)
    with pytest.raises(OptionError, match="top_k was 5, now 20"):
        evaluate(Letters(), rows, decoder=decoder, out=tmp_path / "run", resume=True, **options)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"repetition_penalty": 1.05, "temperature": 0.6}, "sets temperature=0.6 and repetition_penalty=1.05, which"),
        ({"no_repeat_ngram_size": 3}, "sets no_repeat_ngram_size=3, which"),
        ({"repetition_penalty": 1.0, "temperature": 0.7, "top_k": 20}, None),
    ],
)
def test_settings_that_are_not_applied_are_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], said: str | None
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    for _ in range(2):
        assert filters_of(tmp_path, {}) == {name: 20 for name in settings if name == "top_k"}
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (said is not None)
    assert all(str(said) in message for message in messages)
