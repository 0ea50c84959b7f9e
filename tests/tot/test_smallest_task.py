"""The smallest task, with three templates, under every search with every generator and every evaluator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any, ClassVar

import pytest

from tot import RewardModel, Task, solve
from tot.decoders import LocalDecoder, TotError
from tot.decoders.request import ChoiceLogprob
from tot.registry import EVALUATORS, GENERATORS, SEARCHES

IN_SHORT = {
    "act": "act:depth=2",
    "bfs": "bfs:thoughts=2,breadth=1,depth=2",
    "dfs": "dfs:thoughts=2,depth=2",
    "best-first": "best-first:thoughts=2,depth=2",
    "ab-mcts": "ab-mcts:iterations=2,depth=2",
    "mcts": "mcts:thoughts=2,depth=2,iterations=1",
    "refine": "refine:thoughts=2,depth=2",
    "rap": "rap:thoughts=2,depth=2,iterations=1",
    "cot": "cot",
    "self-consistency": "self-consistency:samples=2",
    "best-of-n": "best-of-n:samples=2",
}
WHOLE = ("cot", "self-consistency", "best-of-n")
"""Searches over whole solutions, which ignore the generator."""
UNJUDGED = ("act", "cot", "self-consistency")


class Riddle(Task):
    templates: ClassVar = {
        "thought": "Riddle: {{ question }}\nGive one idea.",
        "value": "Idea: {{ thoughts[-1].thought }}\nHow good is it, from 1 to 10?",
        "answer": "Idea: {{ thoughts[-1].thought }}\nAnswer in one word.",
    }


@pytest.fixture(scope="module")
def decoder(tiny: Any) -> Iterator[LocalDecoder]:
    with tiny() as decoder:
        yield decoder


@pytest.fixture
def rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward model that needs no weights."""
    monkeypatch.setattr(RewardModel, "scores", lambda self, texts: [float(len(thoughts)) for _, thoughts in texts])


def lacking(search: str, generator: str, evaluator: str) -> str | None:
    """Return the error if the combination lacks a method or an option, else None."""
    if generator == "enumerate" and search not in WHOLE:
        return "task Riddle has no `actions` to enumerate: define it, or sample thoughts"
    if evaluator == "heuristic" and search not in UNJUDGED:
        return "task Riddle has no `heuristic`: define it, or choose another evaluator"
    if evaluator == "measured" and search not in UNJUDGED:
        return "task Riddle has no `measured`: define it, or choose another evaluator"
    if evaluator == "confidence" and search in ("refine", "best-of-n"):
        return "whole solutions of .* have no confidence: choose another evaluator, such as evaluator='vote'"
    if evaluator == "confidence" and search not in UNJUDGED:
        return r"the thought generator returns no confidence: use Sample\(samples=8\)"
    return None


def unknown(search: str, generator: str, evaluator: str) -> bool:
    """Return whether the evaluator gives all thoughts the same value, which causes a warning."""
    return evaluator == "logprob" and generator == "propose" and search not in (*UNJUDGED, *WHOLE)


def test_every_search_is_covered() -> None:
    assert set(IN_SHORT) == set(SEARCHES)


@pytest.mark.parametrize(("search", "generator"), list(product(IN_SHORT, GENERATORS)))
def test_every_combination_works_or_names_the_missing_part(
    search: str, generator: str, decoder: LocalDecoder, rewards: None
) -> None:
    files = {"reward-model": ":model=none_here"}
    for evaluator in EVALUATORS:
        parts = {"search": IN_SHORT[search], "generator": generator, "evaluator": evaluator}
        parts["evaluator"] += files.get(evaluator, "")
        message = lacking(search, generator, evaluator)
        if message is not None:
            with pytest.raises(TotError, match=message):
                solve(Riddle, "What has keys?", decoder=decoder, max_tokens=4, **parts)
            continue
        nothing = unknown(search, generator, evaluator)
        warned = (
            pytest.warns(UserWarning, match="logprob gives all thoughts the same value") if nothing else nullcontext()
        )
        with warned:
            solution = solve(Riddle, "What has keys?", decoder=decoder, max_tokens=4, **parts)
        grown = [node for node in solution.tree if node.parent is not None]
        assert grown, parts
        assert all(node.thought is not None and set(node.thought.parts) == {"thought"} for node in grown), parts
        judged = [node for node in grown if node.value is not None]
        assert bool(judged) == (search not in UNJUDGED), parts
        assert solution.answer, parts


def test_rap_works(decoder: LocalDecoder) -> None:
    solution = solve(Riddle, "What has keys?", decoder=decoder, max_tokens=4, search=IN_SHORT["rap"])
    assert solution.answer
    assert all(node.value is not None for node in solution.tree if node.visits and node.parent is not None)


# -- prompts ----------------------------------------------------------------------------------------------------

KEYS = "Riddle: keys?\nGive one idea."


def test_a_whole_solution_is_a_thought_and_an_answer(scripted: Any) -> None:
    decoder = scripted({KEYS: "a piano", "Idea: a piano\nAnswer in one word.": "Piano."})
    solution = solve(Riddle, "keys?", decoder=decoder, search="cot")
    assert (solution.answer, solution.calls) == ("Piano.", 2)
    assert decoder.requests[0].sampling.temperature == 0.0


def test_solutions_vote_by_their_answers(scripted: Any) -> None:
    replies: dict[str, Any] = {KEYS: ["a map", "a grand", "an upright"]}
    for idea, answer in (("a map", "Map"), ("a grand", "Piano"), ("an upright", "Piano")):
        replies[f"Idea: {idea}\nAnswer in one word."] = answer
    solution = solve(Riddle, "keys?", decoder=scripted(replies), search="self-consistency:samples=3")
    assert solution.answer == "Piano"


def test_a_whole_solution_of_a_task_with_a_world_needs_a_template(letters: Any, scripted: Any) -> None:
    world = type("World", (letters,), {"actions": lambda self, state: ["a"]})
    with pytest.raises(TotError, match="task World has no template 'chain': define it in `templates`"):
        solve(world, "q", decoder=scripted({}), search="cot")


def test_lists_and_votes_have_default_prompts(scripted: Any) -> None:
    listed = f"{KEYS}\n\nGive 2 different ones, one a line."
    decoder = scripted({listed: "- a map\n- a piano"})
    search = "bfs:thoughts=2,breadth=1,depth=2"
    solve(Riddle, "keys?", decoder=decoder, search=search, generator="propose", evaluator="vote:samples=1")
    first, second, _ = [request.prompt[-1].content for request in decoder.requests]
    assert first == listed
    head, *candidates, best = second.splitlines()
    assert (head, best) == ("keys?", "Which one is best? Reply with its number.")
    assert sorted(line[3:] for line in candidates if line[:1].isdigit()) == ["a map", "a piano"]


@pytest.mark.parametrize(("labels", "names"), [({}, "Yes or No"), ({"good": 1.0, "bad": 0.0}, "good or bad")])
def test_the_self_evaluation_prompt_names_the_scored_labels(labels: Any, names: str, scripted: Any) -> None:
    class Rated(scripted):  # type: ignore[misc]
        def _reply(self, request: Any, sample: int) -> Any:
            scores = tuple(ChoiceLogprob(-1.0, 1) for _ in request.choices)
            return self.completion("a piano", choice_logprobs=scores)

    decoder = Rated({})
    solve(type("Own", (Riddle,), {"labels": labels}), "keys?", decoder=decoder, search=IN_SHORT["rap"])
    request = next(request for request in decoder.requests if request.choices)
    prompt = f"keys?\n\na piano\n\nIs the last step right, and does it help to answer the question? Reply with {names}."
    assert request.prompt[-1].content == prompt
    assert " or ".join(request.choices) == names
