"""The smallest task, with three templates, under every search."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from tot import Task, solve
from tot.decoders import LocalDecoder
from tot.decoders.request import ChoiceLogprob

SEARCHES = (
    *("act:depth=2", "bfs:thoughts=2,breadth=1,depth=2", "dfs:thoughts=2,depth=2", "ab-mcts:iterations=2,depth=2"),
    *("best-first:thoughts=2,depth=2", "mcts:thoughts=2,depth=2,iterations=1", "refine:thoughts=2,depth=2"),
    *("rap:thoughts=2,depth=2,iterations=1", "cot", "self-consistency:samples=2", "best-of-n:samples=2"),
)


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


@pytest.mark.parametrize("search", SEARCHES)
def test_every_search_works(search: str, decoder: LocalDecoder) -> None:
    solution = solve(Riddle, "What has keys?", decoder=decoder, max_tokens=4, search=search)
    assert solution.answer
    assert all(set(node.thought.parts) == {"thought"} for node in solution.tree if node.thought is not None)


# -- prompts ----------------------------------------------------------------------------------------------------

KEYS = "Riddle: keys?\nGive one idea."


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
    solve(
        type("Own", (Riddle,), {"labels": labels}),
        "keys?",
        decoder=decoder,
        search="rap:thoughts=2,depth=2,iterations=1",
    )
    request = next(request for request in decoder.requests if request.choices)
    prompt = f"keys?\n\na piano\n\nIs the last step right, and does it help to answer the question? Reply with {names}."
    assert request.prompt[-1].content == prompt
    assert " or ".join(request.choices) == names
