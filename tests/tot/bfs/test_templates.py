"""BFS: thoughts with several templates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from tot import Solution, Task


class Steps(Task):
    """A thought is a sub-question and its sub-answer, as in GSM8K."""

    templates: ClassVar = {
        "ask": "ask {{ thoughts | map(attribute='ask') | join('/') }}",
        "tell": "tell {{ ask }}",
        "value": "value {{ thoughts[-1].ask }} {{ tell }}",
        "answer": "answer {{ thoughts | length }}",
    }
    thought = ("ask", "tell")
    depth = 2


def test_the_second_template_gets_the_result_of_the_first(scripted: Any, grow: Callable[..., Solution]) -> None:
    second_replies = {"tell why": "so", "tell how": "thus", "tell who": "we"}
    rated = {"value why so": "3", "value how thus": "8", "value who we": "5"}
    decoder = scripted({"ask": ["why", "how", "who"]} | second_replies | rated)
    solution = grow(Steps, decoder, thoughts=3, depth=2)
    assert decoder.prompts == [["ask"], list(second_replies), list(rated), ["answer 1"]]
    assert [request.sampling.n for request in decoder.requests] == [3, 1, 1, 1, 1, 1, 1, 1]
    best = solution.tree.path(solution.tree[2])[-1]
    assert best.chosen
    assert best.thought is not None
    assert best.thought.parts == {"ask": "how", "tell": "thus"}
    assert best.new_tokens == 15  # both templates' and the evaluation's tokens


def test_a_thought_rejected_at_its_first_template_skips_the_second(
    scripted: Any, grow: Callable[..., Solution]
) -> None:
    rest = {"tell why": "so", "tell who": "we", "value why so": "3", "value who we": "8"}
    decoder = scripted({"ask": ["why", " ", "who"]} | rest)
    whole = scripted({"ask": ["why", "how", "who"]} | rest)
    solution = grow(Steps, decoder, thoughts=3, depth=2)
    grow(Steps, whole, thoughts=3, depth=2)
    assert decoder.prompts[1] == ["tell why", "tell who"]
    assert [node.thought.parts["tell"] for node in solution.tree if node.thought] == ["so", "we"]
    assert solution.parse_failures == 1
    seeds = [request.sampling.seed for request in whole.batches[1]]
    assert [request.sampling.seed for request in decoder.batches[1]] == [seeds[0], seeds[2]]


def test_a_thought_rejected_at_its_second_template_is_dropped_and_counted_once(
    scripted: Any, grow: Callable[..., Solution]
) -> None:
    decoder = scripted({"ask": ["why", "how"], "tell why": "", "tell how": "thus", "value how thus": "4"})
    solution = grow(Steps, decoder, depth=2)
    assert [node.value for node in solution.tree] == [None, 4]
    assert solution.parse_failures == 1
