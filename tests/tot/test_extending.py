"""The examples of docs/extending.md run as they are."""

from __future__ import annotations

import json
import re
from math import log
from pathlib import Path
from typing import Any

import pytest

from tot import ThoughtTree, solve
from tot.decoders import METHODS, Completion, Request, Sampling, load_decoder
from tot.decoders.request import ChoiceLogprob

TEXT = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"^## (.*?)\n.*?```python\n(.*?)```", TEXT, re.DOTALL | re.MULTILINE))
KEYS = "Riddle: keys?\nGive one idea."
REPLIES = {
    KEYS: ["a map", "a piano"],
    "Idea: a map\nHow good is it, from 1 to 10?": "3",
    "Idea: a piano\nHow good is it, from 1 to 10?": "9",
    "Idea: a piano\nAnswer in one word.": "Piano",
}


def example(kind: str, name: str) -> Any:
    """Return the object that an example defines by that name."""
    namespace: dict[str, Any] = {"__name__": "extending"}
    exec(EXAMPLES[kind], namespace)
    return namespace[name]


@pytest.fixture
def riddle() -> Any:
    return type("Short", (example("A task", "Riddle"),), {"depth": 2})


def test_the_examples_are_short() -> None:
    parts = [
        "A task",
        "Typed thoughts and answers",
        "Acting",
        "A world",
        "A generator",
        "A generator with two models",
        "An evaluator",
        "A search",
        "A search of another library",
        "A decoder",
        "A decoding method",
    ]
    assert list(EXAMPLES) == parts
    lines = {kind: sum(1 for line in code.splitlines() if line.strip()) for kind, code in EXAMPLES.items()}
    assert {kind: count for kind, count in lines.items() if count > 20} == {}


def test_the_task(riddle: Any, scripted: Any) -> None:
    solution = solve(riddle, "keys?", decoder=scripted(REPLIES), search="bfs:thoughts=2", evaluator="value")
    assert (solution.answer, solution.value) == ("Piano", 9)


@pytest.mark.real
def test_typed_thoughts_and_answers(smollm2: str, tmp_path: Path) -> None:
    capital = example("Typed thoughts and answers", "Capital")
    solution = solve(capital, "What is the capital of France?", model=smollm2, search="bfs:thoughts=4,breadth=2")
    assert solution.answer == "Paris"
    assert solution.usage.forced_tokens > 20
    thoughts = [node.thought for node in solution.tree if node.thought is not None]
    assert len(thoughts) >= 4
    assert all(thought.objects["thought"].model_dump() == json.loads(thought.text) for thought in thoughts)
    solution.tree.save(tmp_path / "tree.json")
    loaded = ThoughtTree.load(tmp_path / "tree.json")
    assert [node.thought and json.loads(node.thought.text).keys() for node in loaded][1] == {"reason", "city"}


def test_acting(scripted: Any) -> None:
    decoder = scripted({"Guess a number.": ["3", "4"], "Guess a number. 3 is wrong.": ["7", "8"]})
    solution = solve(example("Acting", "Guess"), "?", decoder=decoder, search="refine:thoughts=2", evaluator="prior")
    assert (solution.answer, solution.solved) == ("7", True)


def test_the_world(scripted: Any) -> None:
    reach = example("A world", "Reach")
    plan = {"search": "best-first:rank=cost", "generator": "enumerate:prior=uniform", "evaluator": "heuristic"}
    solution = solve(reach, "47", model=None, **plan)
    assert (solution.answer, solution.calls) == ("+5 +5 +5 +5 *2 +5", 0)
    decoder = scripted(
        {"Go from 1 to 3 by +1, +5 and *2:": ["+5", "*2"], "Go from 1 to 3 by +1, +5 and *2: *2": ["+1", "+1"]}
    )
    sampled = solve(reach, "3", decoder=decoder, search="bfs:thoughts=2", generator="sample", evaluator="heuristic")
    assert sampled.answer == "*2 +1"


def test_the_generator(riddle: Any, scripted: Any) -> None:
    decoder, generator = scripted(REPLIES), example("A generator", "Careful")()
    options = {"search": "bfs:thoughts=none", "generator": generator, "evaluator": "value"}
    assert solve(riddle, "keys?", decoder=decoder, **options).answer == "Piano"
    sampling = decoder.requests[0].sampling
    assert (sampling.n, sampling.temperature) == (2, 0.2)


@pytest.mark.parametrize(("threshold", "by_large"), [(-100.0, False), (0.0, True)])
def test_the_generator_with_two_models(threshold: float, by_large: bool, tiny: Any) -> None:
    generator = example("A generator with two models", "SmallFirst")(threshold=threshold)
    with tiny() as small, tiny() as large:
        solution = solve(
            "gsm8k",
            "How many?",
            decoder={"generate": small, "evaluate": small, "answer": small, "escalate": large},
            search="act:depth=3",
            generator=generator,
            prompts="chat",
            max_tokens=6,
        )
        assert large.engine.forwards > 0
        assert any(call.purpose == "escalate" for calls in solution.tree.calls.values() for call in calls) == by_large


def test_the_evaluator(riddle: Any, scripted: Any) -> None:
    class Judge(scripted):  # type: ignore[misc]
        def _reply(self, request: Request, sample: int) -> Completion:
            if not request.choices:
                completion: Completion = super()._reply(request, sample)
                return completion
            yes = 0.75 if "a piano" in request.prompt[-1].content else 0.25
            scores = tuple(ChoiceLogprob(log(each), 1) for each in (yes, 1 - yes))
            return Completion("", (), 0.0, "stop", self.completion("").usage, choice_logprobs=scores)

    evaluator = example("An evaluator", "Useful")()
    solution = solve(riddle, "keys?", decoder=Judge(REPLIES), search="bfs:thoughts=2", evaluator=evaluator)
    assert solution.answer == "Piano"
    assert [node.value for node in solution.tree if node.parent is not None] == pytest.approx([0.25, 0.75])


def test_the_search(riddle: Any, scripted: Any) -> None:
    search = example("A search", "Greedy")()
    solution = solve(riddle, "keys?", decoder=scripted(REPLIES), search=search, evaluator="value")
    assert (solution.answer, len(solution.tree)) == ("Piano", 3)


@pytest.mark.parametrize("values", [("3", "9"), ("0.3", "0.9"), ("-9", "-3")])
def test_the_search_of_another_library(values: tuple[str, str], riddle: Any, scripted: Any) -> None:
    class Valued(riddle):  # type: ignore[misc]
        def parse_value(self, text: str) -> float:
            return float(text)

    class Alternating(scripted):  # type: ignore[misc]
        ideas = 0

        def _reply(self, request: Request, sample: int) -> Completion:
            completion: Completion = super()._reply(request, sample)
            if request.prompt[-1].content == KEYS:
                self.ideas += 1
                return self.completion("a map" if self.ideas % 2 else "a piano")
            return completion

    search = example("A search of another library", "TreeQuest")(iterations=6)
    decoder = Alternating(REPLIES | dict(zip(list(REPLIES)[1:3], values, strict=True)))
    solution = solve(Valued, "keys?", decoder=decoder, search=search, evaluator="value")
    assert (solution.answer, decoder.ideas) == ("Piano", 6)


def test_the_decoder(riddle: Any) -> None:
    def write(prompt: Any) -> str:
        reply = REPLIES[prompt[-1].content]
        return reply if isinstance(reply, str) else reply[1]

    decoder = example("A decoder", "Function")(write)
    solution = solve(riddle, "keys?", decoder=decoder, search="bfs:thoughts=2", evaluator="value")
    assert (solution.answer, solution.value) == ("Piano", 9)


def test_the_decoding_method(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "one-by-one", "")  # unregistered at the end
    example("A decoding method", "OneByOne")
    request = Request(prompt="the rain", sampling=Sampling(max_tokens=5, n=3, temperature=1.0, ignore_eos=True))
    with tiny() as plain, load_decoder("one-by-one", engine=plain.engine) as decoder:
        namespace = [completion.tokens for completion in decoder.generate([request])]
        assert plain.engine.forwards == 15
        assert namespace == [completion.tokens for completion in plain.generate([request])]
