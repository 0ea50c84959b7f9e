"""BFS: sampling options and seeds of its requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tot import Solution


def seeds(decoder: Any, purpose: str) -> dict[str, int]:
    return {r.prompt[-1].content: r.sampling.seed for r in decoder.requests if r.purpose == purpose}


def test_the_seed_of_a_thought_depends_on_its_place_in_the_tree(
    letters: Any, scripted: Any, grow: Callable[..., Solution]
) -> None:
    blind = type("Blind", (letters,), {"templates": letters.templates | {"thought": "grow"}})
    decoder = scripted({"grow": ["a", "b"], "value a": "5", "value b": "5"})
    grow(blind, decoder)
    first, second = decoder.batches[2]
    assert first.prompt == second.prompt
    assert first.sampling.seed != second.sampling.seed


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
