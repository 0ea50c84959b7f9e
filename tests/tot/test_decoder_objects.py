"""Decoder objects: by purpose, beside names, and what is said of those that can't do what is asked of them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from tot import BFS, Enumerate, Explain, Likelihood, Value, asolve, evaluate, solve
from tot.decoders import OptionError, TotError

SEARCH: dict[str, Any] = {"search": BFS(thoughts=2, breadth=1, depth=3), "evaluator": Value()}


def purposes(decoder: Any) -> Counter[str]:
    return Counter(request.purpose for request in decoder.requests)


# -- by purpose -------------------------------------------------------------------------------------------------


def test_objects_by_purpose_are_asked_for_theirs_and_the_one_that_generates_for_the_rest(
    letters: Any, scripted: Any, two_levels: Any
) -> None:
    def check(decoder: Any, solution: Any) -> None:
        assert (solution.answer, solution.value) == ("the end", 9)
        assert purposes(decoder["generate"]) == {"generate": 2, "answer": 1}
        assert purposes(decoder["evaluate"]) == {"evaluate": 4}

    for model in ("no such model", None):
        decoder = {"generate": scripted(two_levels), "evaluate": scripted(two_levels)}
        check(decoder, solve(letters, "q", decoder=decoder, model=model, **SEARCH))
    decoder = {"evaluate": scripted(two_levels), "generate": scripted(two_levels)}
    check(decoder, asyncio.run(asolve(letters, "q", decoder=decoder, **SEARCH)))


def test_an_evaluation_takes_objects_by_purpose_and_says_which(
    letters: Any, scripted: Any, two_levels: Any, rows: Path, tmp_path: Path
) -> None:
    decoder = {purpose: scripted(two_levels) for purpose in ("answer", "evaluate", "generate")}
    evaluate(letters, rows, out=tmp_path / "out", limit=2, decoder=decoder, **SEARCH)
    asked = {purpose: dict(purposes(each)) for purpose, each in decoder.items()}
    assert asked == {"answer": {"answer": 2}, "evaluate": {"evaluate": 8}, "generate": {"generate": 4}}
    kept = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert kept["decoder"] == "answer=Scripted,evaluate=Scripted,generate=Scripted"
    assert [json.loads(line)["answer"] for line in (tmp_path / "out" / "samples.jsonl").open()] == ["the end"] * 2


def test_a_name_beside_an_object_is_decoded_by_the_model(letters: Any, scripted: Any, tiny: Any) -> None:
    with tiny() as decoder:
        model, tokenizer = decoder.model, decoder.tokenizer
    judge = scripted({})
    options = {"model": model, "tokenizer": tokenizer, "kv_budget": 4000, "max_tokens": 4}
    solution = solve(letters, "q", decoder={"generate": "sd", "evaluate": judge}, **SEARCH, **options)
    assert purposes(judge) == {"evaluate": solution.calls - 5}  # two pairs of thoughts and the answer are the model's
    assert {node.decoder for node in solution.tree if node.parent is not None} == {"sd"}
    assert solution.usage.forwards > 0


def test_objects_alone_take_no_model_options_and_a_run_to_be_repeated_looks_at_each(
    letters: Any, scripted: Any
) -> None:
    half = scripted({})
    half.model = type("Model", (), {"dtype": "torch.bfloat16"})()
    decoder = {"generate": scripted({}), "evaluate": half}
    with pytest.raises(OptionError, match="kv_budget: a decoder object has its own model; leave these out"):
        solve(letters, "q", decoder=decoder, kv_budget=100, **SEARCH)
    with pytest.raises(OptionError, match=r"compute in float32, but this decoder's model is in torch\.bfloat16"):
        solve(letters, "q", decoder=decoder, reproducible=True, **SEARCH)


# -- what is no decoder, or can't do what is asked ----------------------------------------------------------------


@pytest.mark.parametrize("by_purpose", [False, True])
def test_what_is_no_decoder_is_refused_with_what_it_lacks(
    by_purpose: bool, letters: Any, scripted: Any, rows: Path, tmp_path: Path
) -> None:
    def function(requests: Any) -> Any:
        return requests

    lacks = "has no method 'generate': give a name, such as ar, or an object whose generate"
    for decoder, said in (
        (function, f"decoder=<function .*function at .*> {lacks}"),
        (3, f"decoder=3 {lacks}"),
        (scripted, r"decoder=Scripted is a class: give an object of it, Scripted\(\.\.\.\)"),
    ):
        chosen = {"evaluate": decoder} if by_purpose else decoder
        with pytest.raises(OptionError, match=said):
            solve(letters, "q", decoder=chosen)
        with pytest.raises(OptionError, match=said):
            evaluate(letters, rows, decoder=chosen, out=tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("fields", "parts", "said"),
    [
        ({}, {"evaluator": Likelihood()}, r"scored 0 of 10 choices, .* \(evaluator='value' or 'vote' in place of"),
        (
            {"triggers": {"value": " So"}},
            {"evaluator": Explain(template="value")},
            r"scored 0 of 10 choices, .* \(evaluator='value'",
        ),
        (
            {"actions": lambda self, state: ["x", "y", "z"]},
            {"generator": Enumerate(), "evaluator": Value()},
            r"scored 0 of 3 choices, .* \(generator='sample' in place of Enumerate",
        ),
        (
            {"choices": lambda self, state: ("x", "y")},
            {"evaluator": Value()},
            r"scored 0 of 2 choices, .* \(a task without `choices`",
        ),
    ],
)
def test_a_decoder_that_scores_no_choices_is_named_where_they_are_needed(
    fields: dict[str, Any], parts: dict[str, Any], said: str, letters: Any, scripted: Any
) -> None:
    task = type("Choosing", (letters,), fields)
    with pytest.raises(OptionError, match=f"decoder Scripted {said}"):
        solve(task, "q", decoder=scripted({}), search=BFS(thoughts=2, breadth=1, depth=2), **parts)


def test_choices_that_a_budget_cut_off_are_not_missed(letters: Any, scripted: Any) -> None:
    decoder = scripted({"grow": ["a", "b"]})
    decoder.replies |= {f"value {name}": decoder.completion("", "budget") for name in "ab"}
    solution = solve(letters, "q", decoder=decoder, search=BFS(thoughts=2, depth=2), evaluator=Likelihood())
    assert [node.value for node in solution.tree] == [None, None, None]


@pytest.mark.parametrize("count", [1, 3])
def test_a_decoder_that_gives_too_few_or_too_many_completions_is_told_how_many_to_give(
    count: int, letters: Any, scripted: Any
) -> None:
    class Other(scripted):  # type: ignore[misc]
        def generate(self, requests: Any) -> Any:
            return (super().generate(requests) * 2)[:count]

    said = rf"decoder Other returned {count} completions instead of 2: its `generate` must return request\."
    with pytest.raises(OptionError, match=said):
        solve(letters, "q", decoder=Other({}), **SEARCH)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def __init__(self): raise ValueError('boom')", "decoder .*mine.py:Mine raised ValueError: boom"),
        ("def __init__(self, model): pass", "decoder .*mine.py:Mine raised TypeError"),
        ("pass", "decoder .*mine.py:Mine has no method 'generate'"),
    ],
)
def test_a_decoder_of_a_file_that_cannot_be_made_is_refused(body: str, said: str, tmp_path: Path, letters: Any) -> None:
    (tmp_path / "mine.py").write_text(f"class Mine:\n    {body}\n")
    with pytest.raises(TotError, match=said):
        solve(letters, "q", decoder=f"{tmp_path / 'mine.py'}:Mine")


def test_a_decoder_of_a_file_decodes(tmp_path: Path, letters: Any) -> None:
    (tmp_path / "mine.py").write_text(
        "from tot.decoders import Completion, Usage\n\n\nclass Mine:\n    chats = False\n\n"
        "    def generate(self, requests):\n"
        "        return [Completion('a', (), 0.0, 'eos', Usage()) for one in requests for _ in range(one.sampling.n)]\n"
    )
    found = solve(letters, "q", decoder=f"{tmp_path / 'mine.py'}:Mine", evaluator="random")
    assert found.answer == "a"
