"""SEED: beside other requests, each request returns the same as alone, also with choices and answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tot.decoders import Completion, Request, Sampling, load_decoder

LONG = "The sum of 10 and 11 is in the range on and on, and the other one: "
ROUNDS: dict[str, Any] = {"policy": "rounds", "adapt": False, "k_config": (2, 1)}


@pytest.mark.parametrize("overlap", [True, False])
def test_choices_and_answers_are_the_same_beside_other_methods(
    bench: Any,
    overlap: bool,
    results: Callable[..., list[Completion]],
    branches: Callable[..., list[Request]],
    watching: Any,
) -> None:
    choices = ("1", "10", " the")
    sampling = Sampling(max_tokens=12, temperature=1.0, ignore_eos=True)
    requests = [
        Request(prompt="abc", choices=choices),
        Request(prompt="abc", sampling=sampling, answer_trigger=" So", answer_tokens=6),
        Request(prompt=LONG, sampling=sampling.model_copy(update={"n": 3}), answer_trigger=" So", choices=choices),
        *branches(3),
    ]
    expected = load_decoder(engine=bench.engine()).generate(requests)
    engine = bench.engine(8000)
    decoders = [
        bench.seed(bench.model_drafter(0.02), engine, **ROUNDS, overlap=overlap),
        load_decoder(engine=engine),
        bench.seed(None, engine),
        bench.seed(watching(), engine, **ROUNDS, overlap=overlap),
        load_decoder("mcsd", engine=engine),
    ]
    handles = [decoder.submit(requests) for decoder in decoders]
    for some in handles:
        got = results(some)
        assert [one.tokens for one in got] == [one.tokens for one in expected]
        assert [one.text for one in got] == [one.text for one in expected]
        for one, like in zip(got, expected, strict=True):
            scores = [[choice.total for choice in which.choice_logprobs] for which in (one, like)]
            assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_choices_alone_need_no_draft(bench: Any, watching: Any, results: Callable[..., list[Completion]]) -> None:
    watched = watching()
    requests = [Request(prompt=prompt, choices=("1", "10")) for prompt in ("abc", LONG)]
    got = results(bench.seed(watched, **ROUNDS).submit(requests))
    assert [len(one.choice_logprobs) for one in got] == [2, 2]
    assert watched.asked == []


@pytest.mark.parametrize("overlap", [True, False])
def test_requests_that_end_at_different_times_do_not_affect_others(
    bench: Any, overlap: bool, plain: Callable[..., Request]
) -> None:
    requests = [plain(max_tokens=size, n=2, temperature=1.0, seed=4) for size in range(1, 12)]
    got = bench.seed(bench.model_drafter(0.02), **ROUNDS, overlap=overlap).generate(requests)
    assert [completion.tokens for completion in got] == bench.expected(requests)
    assert len({completion.usage.forwards for completion in got}) > 3
