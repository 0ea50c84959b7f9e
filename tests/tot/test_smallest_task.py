"""The smallest task, with three templates, under every search with every generator and every evaluator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from tot import Task, solve
from tot.decoders import LocalDecoder, TotError
from tot.decoders.request import ChoiceLogprob

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
