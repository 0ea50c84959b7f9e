"""Speculative decoding: the end of a text inside a draft."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tot.decoders import Completion, Request, Sampling

LONG = "The sum of 10 and 11 is in the range on and on, and the other one: " * 2


@pytest.mark.parametrize("at", range(8, 15, 2))
@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_a_stop_string_inside_an_accepted_draft_cuts_the_text(
    bench: Any,
    at: int,
    heat: float,
    rationale: Callable[..., tuple[str, Completion]],
    plain: Callable[..., Request],
    assert_same: Callable[..., None],
    accepted: Callable[..., int],
    drafted: Callable[..., int],
) -> None:
    stop, free = rationale(bench, at, temperature=heat)
    request = plain(max_tokens=24, temperature=heat, stop=(stop,))
    expected = bench.ar().generate([request])
    got = bench.speculative("sd", "same", k=6).generate([request])
    assert_same(got, expected)
    assert got[0].finish_reason == "stop"
    assert got[0].text == free.text[: free.text.index(stop)]
    ended_inside = len(got[0].tokens) % 7 != 0
    assert (accepted(got) < drafted(got)) == ended_inside
    with_answer = request.model_copy(update={"answer_trigger": " So", "answer_tokens": 9})
    assert_same(bench.speculative("sd", "same", k=6).generate([with_answer]), bench.ar().generate([with_answer]))


@pytest.mark.parametrize("k", [1, 3, 6])
def test_an_end_token_inside_a_draft_ends_the_text_unless_ignored(
    bench: Any, k: int, assert_same: Callable[..., None], plain: Callable[..., Request]
) -> None:
    prompts = ("abc", "the", "10 and", LONG)
    requests = [plain(p, max_tokens=200, ignore_eos=False, temperature=1.0, seed=2) for p in prompts]
    expected = bench.ar().generate(requests)
    got = bench.speculative("sd", "same", k=k).generate(requests)
    assert_same(got, expected)
    assert [completion.finish_reason for completion in got] == ["eos"] * 4
    assert [c.usage.accepted < c.usage.drafted for c in got] == [len(c.tokens) % (k + 1) != 0 for c in got]
    size = len(expected[0].tokens) + 9
    ignoring = plain(max_tokens=size, temperature=1.0, seed=2)
    (longer,) = bench.speculative("sd", "same", k=k).generate([ignoring])
    assert (longer.finish_reason, longer.tokens[: size - 9]) == ("length", expected[0].tokens)
    assert_same([longer], bench.ar().generate([ignoring]))


def test_a_draft_may_reach_the_end_of_the_context(bench: Any, assert_same: Callable[..., None]) -> None:
    prompt = tuple(random.Random(0).choices(range(3, 270), k=1000))
    request = Request(prompt=prompt, sampling=Sampling(max_tokens=100, ignore_eos=True))
    (got,) = bench.speculative("sd", "same", k=4).generate([request])
    assert (len(got.tokens), got.finish_reason, got.usage.forwards) == (24, "length", 5)
    assert_same([got], bench.ar().generate([request]))
