"""Decoder objects: by purpose, beside decoder names, and errors for objects that lack an ability."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from tot import BFS, EngineOptions, Enumerate, Explain, Likelihood, Model, SearchConfig, Value, asolve, evaluate, solve
from tot.decoders import OptionError, TotError

SEARCH: dict[str, Any] = {"search": BFS(thoughts=2, breadth=1, depth=3), "evaluator": Value()}


def purposes(decoder: Any) -> Counter[str]:
    return Counter(request.purpose for request in decoder.requests)


# -- by purpose -------------------------------------------------------------------------------------------------


def test_objects_by_purpose_serve_their_purpose_and_the_generator_serves_the_rest(
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


def test_an_evaluation_accepts_objects_by_purpose_and_records_them(
    letters: Any, scripted: Any, two_levels: Any, rows: Path, tmp_path: Path
) -> None:
    decoder = {purpose: scripted(two_levels) for purpose in ("answer", "evaluate", "generate")}
    evaluate(letters, rows, out=tmp_path / "out", limit=2, decoder=decoder, **SEARCH)
    counts = {purpose: dict(purposes(each)) for purpose, each in decoder.items()}
    assert counts == {"answer": {"answer": 2}, "evaluate": {"evaluate": 8}, "generate": {"generate": 4}}
    config = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert config["decoder"] == "Scripted"
    assert [json.loads(line)["answer"] for line in (tmp_path / "out" / "samples.jsonl").open()] == ["the end"] * 2


def test_a_name_beside_an_object_uses_the_model(letters: Any, scripted: Any, tiny: Any) -> None:
    with tiny() as decoder:
        model, tokenizer = decoder.model, decoder.tokenizer
    judge = scripted({})
    small = Model(model, tokenizer=tokenizer, engine=EngineOptions(kv_budget="4000"))
    decoder = {"generate": "sd", "evaluate": judge}
    solution = solve(letters, "q", model=small, decoder=decoder, max_tokens=4, **SEARCH)
    assert purposes(judge) == {"evaluate": solution.calls - 5}  # the model's: two pairs of thoughts and the answer
    assert {node.decoder for node in solution.tree if node.parent is not None} == {"sd@LlamaForCausalLM"}
    assert solution.usage.forwards > 0


def test_objects_alone_accept_no_model_options_and_reproducible_checks_each(letters: Any, scripted: Any) -> None:
    half = scripted({})
    half.model = type("Model", (), {"dtype": "torch.bfloat16"})()
    decoder = {"generate": scripted({}), "evaluate": half}
    for refused in ({"dtype": "fp32"}, {"tokenizer": object()}):
        with pytest.raises(OptionError, match=f"{next(iter(refused))}: a decoder object has its own model; leave"):
            SearchConfig.of(None, {"decoder": decoder, **refused})
    with pytest.raises(OptionError, match="draft, kv_budget: a decoder object has its own model; leave these out"):
        Model(decoder=half, options={"draft": "lookup"}, engine=EngineOptions(kv_budget="100"))
    with pytest.raises(OptionError, match=r"compute in float32, but this decoder's model is in bfloat16"):
        solve(letters, "q", decoder=decoder, reproducible=True, **SEARCH)


# -- invalid decoders and missing abilities -----------------------------------------------------------------------


@pytest.mark.parametrize("by_purpose", [False, True])
def test_an_invalid_decoder_is_rejected_with_its_missing_method(
    by_purpose: bool, letters: Any, scripted: Any, rows: Path, tmp_path: Path
) -> None:
    def function(requests: Any) -> Any:
        return requests

    lacks = "has no method 'generate': give a name, such as ar, or an object whose generate"
    for decoder, message in (
        (function, f"decoder=<function .*function at .*> {lacks}"),
        (3, f"decoder=3 {lacks}"),
        (scripted, r"decoder=Scripted is a class: give an object of it, Scripted\(\.\.\.\)"),
    ):
        chosen = {"evaluate": decoder} if by_purpose else decoder
        with pytest.raises(OptionError, match=message):
            solve(letters, "q", decoder=chosen)
        with pytest.raises(OptionError, match=message):
            evaluate(letters, rows, decoder=chosen, out=tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("fields", "parts", "message"),
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
def test_a_decoder_without_choice_scores_is_named_if_they_are_needed(
    fields: dict[str, Any], parts: dict[str, Any], message: str, letters: Any, scripted: Any
) -> None:
    task = type("Choosing", (letters,), fields)
    with pytest.raises(OptionError, match=f"decoder Scripted {message}"):
        solve(task, "q", decoder=scripted({}), search=BFS(thoughts=2, breadth=1, depth=2), **parts)


@pytest.mark.parametrize("count", [1, 3])
def test_a_wrong_number_of_completions_is_rejected_with_the_right_one(count: int, letters: Any, scripted: Any) -> None:
    class Other(scripted):  # type: ignore[misc]
        def generate(self, requests: Any) -> Any:
            return (super().generate(requests) * 2)[:count]

    message = rf"decoder Other returned {count} completions instead of 2: its `generate` must return request\."
    with pytest.raises(OptionError, match=message):
        solve(letters, "q", decoder=Other({}), **SEARCH)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def __init__(self): raise ValueError('boom')", "decoder .*mine.py:Mine raised ValueError: boom"),
        ("def __init__(self, model): pass", "decoder .*mine.py:Mine raised TypeError"),
        ("pass", "decoder .*mine.py:Mine has no method 'generate'"),
    ],
)
def test_a_decoder_file_that_cannot_be_used_is_rejected(body: str, message: str, tmp_path: Path, letters: Any) -> None:
    (tmp_path / "mine.py").write_text(f"class Mine:\n    {body}\n")
    with pytest.raises(TotError, match=message):
        solve(letters, "q", decoder=f"{tmp_path / 'mine.py'}:Mine")


def test_a_decoder_from_a_file_decodes(tmp_path: Path, letters: Any) -> None:
    (tmp_path / "mine.py").write_text(
        "from tot.decoders import Completion, Usage\n\n\nclass Mine:\n    chats = False\n\n"
        "    def __init__(self, text='a', api_key=''):\n        self.text = text\n\n"
        "    def generate(self, requests):\n        completion = Completion(self.text, (), 0.0, 'eos', Usage())\n"
        "        return [completion for one in requests for _ in range(one.sampling.n)]\n\n\nmade = Mine()\n"
    )
    name = f"{tmp_path / 'mine.py'}:Mine"
    for decoder, answer in (
        (name, "a"),
        (f"{name}:text=b", "b"),
        (f"generate={name}:text=c,api_key=d,answer={name}:text=c", "c"),
    ):
        assert solve(letters, "q", decoder=decoder, evaluator="random", search="cot").answer == answer
    config = SearchConfig.of(None, {"decoder": f"{name}:text=a,api_key=d,n=2"})
    assert config.to_json()["decoder"] == f"{name}:text=a,api_key=***,n=2"
    assert config.to_json(secrets=True)["decoder"] == f"{name}:text=a,api_key=d,n=2"
    with pytest.raises(TotError, match=r"raised TypeError: .* unexpected keyword argument 'txt'"):
        solve(letters, "q", decoder=f"{name}:txt=b")
    with pytest.raises(OptionError, match=r"mine\.py:made is an object and has no options: leave text out"):
        solve(letters, "q", decoder=f"{tmp_path / 'mine.py'}:made:text=b")


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        ("sd:k=3", "decoder sd:k=3: give the options of a decoding method as --decoder-option k=3"),
        ("openai:base_url=http://x/v1", "as --decoder-option base_url=http://x/v1"),
        ("beam:k=3", "unknown decoder 'beam:k=3'"),
    ],
)
def test_options_in_the_name_are_for_decoder_classes(decoder: str, message: str, letters: Any) -> None:
    with pytest.raises(OptionError, match=message):
        solve(letters, "q", decoder=decoder)


def test_searches_call_a_decoder_object_from_several_threads_at_once(letters: Any, scripted: Any) -> None:
    decoder, both = scripted({}), threading.Barrier(2)
    generate = decoder.generate

    def meet(requests: Any) -> Any:
        if requests[0].prompt[-1].content == "grow":
            both.wait(30)  # until the other search is here, too
        return generate(requests)

    decoder.generate = meet

    async def searches() -> list[Any]:
        return await asyncio.gather(*(asolve(letters, question, decoder=decoder, **SEARCH) for question in "ab"))

    assert [solution.answer is not None for solution in asyncio.run(searches())] == [True, True]


async def _later(text: str) -> str:
    return f"later {len(text)}"


@pytest.mark.parametrize(("function", "answer"), [(lambda text: f"so {text}", "so answer a"), (_later, "later 8")])
def test_a_function_is_a_model(letters: Any, function: Any, answer: str) -> None:
    actions = {"actions": lambda self, state: ["a"]}
    options = {"generator": "enumerate:prior=uniform", "evaluator": "random", "search": BFS(depth=2)}
    solution = solve(type("Acting", (letters,), actions), "q", model=function, **options)
    assert solution.answer == answer


def test_a_function_serves_the_purposes_that_it_is_given_for(letters: Any, scripted: Any) -> None:
    decoder, prompts = scripted({"grow": ["a", "b"]}), list[str]()
    model = {"evaluate": lambda text: prompts.append(text) or "7"}
    solution = solve(
        letters, "q", model=model, decoder={"generate": decoder}, search=BFS(thoughts=2, depth=2), evaluator="value"
    )
    assert sorted(prompts) == ["value a", "value b"]
    assert solution.value == 7
    with pytest.raises(OptionError, match="decoder=ar has no effect, because the model is a function: leave it out"):
        solve(letters, "q", model=lambda text: text, decoder="ar")
