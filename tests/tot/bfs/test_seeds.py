"""BFS: sampling options and seeds of its requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tot import Sample, Solution


def seeds(decoder: Any, purpose: str) -> dict[str, int]:
    return {r.prompt[-1].content: r.sampling.seed for r in decoder.requests if r.purpose == purpose}


def test_equal_run_seeds_make_equal_requests(
    letters: Any, scripted: Any, grow: Callable[..., Solution], two_levels: Any
) -> None:
    first, second = scripted(two_levels), scripted(two_levels)
    grow(letters, first, seed=3)
    grow(letters, second, seed=3)
    assert first.batches == second.batches


@pytest.mark.parametrize("other", [{"seed": 4}, {"question": "p"}])
def test_another_run_seed_or_question_changes_every_seed(
    letters: Any, scripted: Any, other: Any, grow: Callable[..., Solution], two_levels: Any
) -> None:
    first, second = scripted(two_levels), scripted(two_levels)
    grow(letters, first, **{"seed": 3} | other)
    grow(letters, second, seed=3)
    assert first.prompts == second.prompts
    assert not {r.sampling.seed for r in first.requests} & {r.sampling.seed for r in second.requests}


def test_every_call_of_a_search_has_its_own_seed(
    letters: Any, scripted: Any, two_levels: Any, grow: Callable[..., Solution]
) -> None:
    decoder = scripted(two_levels)
    grow(letters, decoder)
    assert len({request.sampling.seed for request in decoder.requests}) == len(decoder.requests) == 10


def test_the_seed_of_a_thought_depends_on_its_place_in_the_tree(
    letters: Any, scripted: Any, grow: Callable[..., Solution]
) -> None:
    blind = type("Blind", (letters,), {"templates": letters.templates | {"thought": "grow"}})
    decoder = scripted({"grow": ["a", "b"], "value a": "5", "value b": "5"})
    grow(blind, decoder)
    first, second = decoder.batches[2]
    assert first.prompt == second.prompt
    assert first.sampling.seed != second.sampling.seed


def test_the_seed_of_an_answer_depends_on_its_place_in_the_tree(
    letters: Any, scripted: Any, grow: Callable[..., Solution], two_levels: Any
) -> None:
    at_d, at_e = scripted(two_levels), scripted(two_levels | {"value b/d": "1"})
    grow(letters, at_d)
    grow(letters, at_e)
    assert [decoder.prompts[-1] for decoder in (at_d, at_e)] == [["answer b/d"], ["answer a/e"]]
    assert at_d.requests[-1].sampling.seed != at_e.requests[-1].sampling.seed


def test_the_seed_of_an_evaluation_depends_on_its_prompt_alone(
    letters: Any, scripted: Any, grow: Callable[..., Solution], two_levels: Any
) -> None:
    swapped = {"grow": ["b", "a"], "grow b": ["z", "d"]}  # the same states in other places and another order
    first, second = scripted(two_levels), scripted(two_levels | swapped)
    grow(letters, first)
    grow(letters, second, breadth=1, depth=4, thoughts=2)
    common = seeds(first, "evaluate").keys() & seeds(second, "evaluate").keys()
    assert common == {"value a", "value b", "value b/d"}
    assert all(seeds(first, "evaluate")[prompt] == seeds(second, "evaluate")[prompt] for prompt in common)


def test_thoughts_are_sampled_and_values_and_answers_are_greedy(
    letters: Any, scripted: Any, two_levels: Any, grow: Callable[..., Solution]
) -> None:
    decoder = scripted(two_levels)
    grow(letters, decoder, generator=Sample(temperature=0.6))
    temperatures = {request.purpose: request.sampling.temperature for request in decoder.requests}
    assert temperatures == {"generate": 0.6, "evaluate": 0.0, "answer": 0.0}


def test_sampling_options_of_the_task_apply_and_max_tokens_caps_them(
    letters: Any, scripted: Any, grow: Callable[..., Solution], two_levels: Any
) -> None:
    options = {"thought": {"max_tokens": 50, "stop": ("\n",), "top_p": 0.9}, "answer": {"max_tokens": 7}}
    picky = type("Picky", (letters,), {"sampling": options})
    free, capped = scripted(two_levels), scripted(two_levels)
    grow(picky, free)
    grow(picky, capped, max_tokens=12)
    of = [{r.purpose: r.sampling for r in decoder.requests} for decoder in (free, capped)]
    assert [samplings["generate"].max_tokens for samplings in of] == [50, 12]
    assert [samplings["evaluate"].max_tokens for samplings in of] == [16, 12]
    assert [samplings["answer"].max_tokens for samplings in of] == [7, 7]
    assert all(s["generate"].stop == ("\n",) and s["generate"].top_p == 0.9 for s in of)
