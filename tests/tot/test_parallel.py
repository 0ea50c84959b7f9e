"""Parallel steps in a search: the paragraphs of Creative Writing, decoded side by side."""

from __future__ import annotations

from typing import Any

import pytest

from tot import BFS, solve
from tot.decoders import Request
from tot.decoders.request import Part
from tot.llm.replies import Reply
from tot.tasks.creative_writing import CreativeWriting

SENTENCES = "It rained. She said: go. He #left. They met."


def test_the_text_of_a_reply_is_the_bodies_of_its_steps(scripted: Any) -> None:
    steps = [Part("step", f"#### Title {i}: {body}\n") for i, body in enumerate(("one: two", "", "three"), 1)]
    parts = (Part("exact", ""), *steps, Part("exact", "So 2."))
    stepped = scripted.completion("".join(part.text for part in parts), parts=parts)
    plain = scripted.completion("just text: yes")
    request = Request(prompt="q")
    assert Reply("x", request, stepped).text == "one: two\n\nthree"
    assert Reply("x", request, plain).text == "just text: yes"


def test_the_titles_of_a_passage_are_its_paragraphs() -> None:
    task = CreativeWriting()
    titles = task.steps("passage", task.start(SENTENCES))
    assert len(titles) == 4
    assert titles[1].startswith("Paragraph 2 ends in She said, go")
    assert not any(":" in one or "#" in one for one in titles)
    assert task.steps("plan", task.start(SENTENCES)) == ()


@pytest.mark.real
def test_a_real_model_writes_a_passage_in_paragraphs(smollm2: str) -> None:
    solution = solve(
        "creative_writing",
        "It isn't difficult to do a handstand. It caught him off guard. She wore a hat. They met again.",
        model=smollm2,
        decoder={"generate": "pdos"},
        search=BFS(thoughts=1, breadth=1, depth=2),
        evaluator="random",
        max_tokens=140,
        seed=4,
        reproducible=True,  # otherwise the text depends on the machine
    )
    passage = solution.tree[1].thought.parts["passage"]
    assert passage.count("\n\n") >= 1
    assert "####" not in passage
