"""A recorded search is replayed with the same prompts and the same number of tokens."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.engines import replay
from benchmarks.workloads import AskedWork, Waves, drawn, new_tokens, record, requests, rows
from tot import Task
from tot.decoders import LocalDecoder
from tot.decoders.request import Request


@pytest.fixture
def task(letters: type[Task]) -> Task:
    return letters()


@pytest.fixture
def decoder(tiny: Any) -> Any:
    with tiny() as made:
        yield made


@pytest.fixture
def waves(decoder: LocalDecoder, task: Task) -> Waves:
    return record(decoder, task, "why?", 2, breadth=2, depth=3)


def test_a_wave_is_a_batch_of_one_level(waves: Waves) -> None:
    scored = [[bool(request.choices) for request in wave] for wave in waves]
    # A level expands each state to two thoughts and scores the thoughts. The best one is asked for its answer.
    assert scored[:2] == [[False], [True] * len(scored[1])]
    assert [all(wave) for wave in scored[:4]] == [False, True, False, True]
    assert all(len(set(wave)) == 1 for wave in scored)
    assert [len(request.new) for request in waves[0]] == [2]


def test_recorded_tokens_equal_the_tokens_of_the_search(decoder: LocalDecoder, task: Task) -> None:
    before = {purpose: account.tokens for purpose, account in decoder.engine.accounts.items()}
    waves = record(decoder, task, "why?", 2, breadth=2, depth=2)
    after = {purpose: account.tokens for purpose, account in decoder.engine.accounts.items()}
    assert new_tokens(waves) == sum(after.values()) - sum(before.values())
    assert new_tokens(waves) > 0


def test_a_replay_draws_the_recorded_number_of_tokens_and_scores_the_choices(
    decoder: LocalDecoder, waves: Waves, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Request] = []
    generate = decoder.generate
    monkeypatch.setattr(decoder, "generate", lambda batch: asked.extend(batch) or generate(batch))
    assert replay(decoder, waves)["tokens"] == new_tokens(waves)
    assert [request.choices for request in asked if request.choices] == [
        asked.choices for wave in waves for asked in wave if asked.choices
    ]
    assert {request.prompt for request in asked} == {asked.prompt for wave in waves for asked in wave}


def test_samples_of_equal_length_share_one_request() -> None:
    wave = (AskedWork((1, 2), (3, 3), seed=7), AskedWork((4,), (2, 5), seed=9), AskedWork((6,), (), (" 1", " 2"), True))
    made = list(requests(wave))
    assert [(r.sampling.n, r.sampling.max_tokens, r.sampling.seed) for r in made[:3]] == [
        (2, 3, 7),
        (1, 2, 9),
        (1, 5, 10),
    ]
    assert all(request.sampling.ignore_eos and request.sampling.temperature == 1 for request in made[:3])
    assert (made[3].choices, made[3].close_choices, made[3].purpose) == ((" 1", " 2"), True, "evaluate")


def test_an_engine_without_choice_scores_reads_one_token() -> None:
    waves = ((AskedWork((1, 2), (3, 4)), AskedWork((5,), (), (" 1",))),)
    assert drawn(waves) == 8
    assert new_tokens(waves) == 7
    assert rows(waves) == 5 + 6 + 2
