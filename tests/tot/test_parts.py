"""Parallel steps in the tree: thoughts proposed, candidates judged and paragraphs written side by side."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from tot import BFS, Propose, Task, Vote, solve
from tot.decoders.request import Part
from tot.parts import bodies, conclusion, said, title
from tot.tasks.creative_writing import CreativeWriting

SENTENCES = "It rained. She said: go. He #left. They met."


class Ideas(Task):
    templates: ClassVar = {
        "thought": "grow {{ thoughts | length }}",
        "propose": "propose {{ count }}",
        "vote": "vote {{ candidates | join(', ') }}",
        "answer": "answer {{ thoughts[-1].thought }}",
    }
    depth = 2


@pytest.fixture
def parallel(scripted: Any) -> Any:
    """Makes a scripted decoder that is called pdos; its replies may be lists of titles and bodies, and what follows."""

    def completion(*steps: str, after: str = "") -> Any:
        parts = [Part("step", f"#### Title {i}: {body}\n") for i, body in enumerate(steps, 1)]
        text = "".join(part.text for part in parts) + after
        return scripted.completion(text, parts=(Part("exact", ""), *parts, Part("exact", after)))

    def make(replies: dict[str, Any]) -> Any:
        decoder = scripted(replies)
        decoder.name = "pdos"
        return decoder

    make.completion = completion  # type: ignore[attr-defined]
    return make


def test_what_stands_under_the_titles_is_what_is_said(parallel: Any, scripted: Any) -> None:
    reply = parallel.completion("one: two", "", "three", after="So 2.")
    assert bodies(reply) == ["one: two", "", "three"]
    assert said(reply) == "one: two\n\nthree"
    assert conclusion(reply) == "So 2."
    plain = scripted.completion("just text: yes")
    assert (bodies(plain), said(plain), conclusion(plain)) == ([], "just text: yes", "just text: yes")


def test_a_title_is_one_line_that_nothing_ends_early() -> None:
    assert title("Ends in: ## a\n b") == "Ends in, a b"


def test_proposals_are_written_as_steps_where_the_decoder_can(parallel: Any, scripted: Any) -> None:
    replies = {"propose 2": parallel.completion("first\nmore of it", "second"), "answer first": "done"}
    decoder = parallel(replies)
    search = BFS(thoughts=2, breadth=1, depth=2)
    solution = solve(Ideas(), "Q", decoder=decoder, search=search, generator=Propose(), evaluator="random")
    assert [node.thought.text for node in solution.tree if node.thought] == ["first", "second"]
    assert decoder.requests[0].steps == ("Idea 1", "Idea 2")
    plain = scripted({"propose 2": "first\nsecond"})
    solve(Ideas(), "Q", decoder=plain, search=search, generator=Propose(), evaluator="random")
    assert plain.requests[0].steps == ()


def test_candidates_are_judged_as_steps_before_the_vote(parallel: Any) -> None:
    decoder = parallel({"propose 2": parallel.completion("a", "b")})
    decoder.replies |= {
        "vote a, b": parallel.completion("9 fine", "8 poor", after="The best is 1."),
        "vote b, a": parallel.completion("1 poor", "7 fine", after="The best is 2."),
    }
    search = BFS(thoughts=2, breadth=1, depth=2)
    solution = solve(Ideas(), "Q", decoder=decoder, search=search, generator=Propose(), evaluator=Vote(samples=4))
    votes = [request for request in decoder.requests if request.purpose == "evaluate"]
    assert all(request.steps == ("Candidate 1", "Candidate 2") for request in votes)
    assert all(request.sampling.max_tokens == 64 + 2 * 48 for request in votes)
    assert {node.thought.text: node.value for node in solution.tree if node.thought} == {"a": 1.0, "b": 0.0}


def test_a_passage_is_written_paragraph_by_paragraph(parallel: Any) -> None:
    task = CreativeWriting()
    titles = task.steps("passage", task.start(SENTENCES))
    assert len(titles) == 4
    assert titles[1].startswith("Paragraph 2 ends in She said, go")
    assert not any(":" in one or "#" in one for one in titles)
    assert task.steps("plan", task.start(SENTENCES)) == ()


@pytest.mark.real
def test_a_passage_comes_out_of_a_real_model_in_paragraphs(smollm2: str) -> None:
    solution = solve(
        "creative_writing",
        "It isn't difficult to do a handstand. It caught him off guard. She wore a hat. They met again.",
        model=smollm2,
        decoder={"generate": "pdos"},
        search=BFS(thoughts=1, breadth=1, depth=2),
        evaluator="random",
        max_tokens=220,
    )
    passage = solution.tree[1].thought.parts["passage"]
    assert passage.count("\n\n") >= 1
    assert "####" not in passage
