"""Parallel steps in the tree: proposed thoughts, evaluated candidates and paragraphs, decoded side by side."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import pytest

from tot import BFS, Classify, Propose, Task, Value, Vote, load_task, solve
from tot.decoders.request import Part
from tot.llm.parallel_steps import bodies, conclusion, said, title
from tot.tasks.creative_writing import CreativeWriting

SENTENCES = "It rained. She said: go. He #left. They met."


class Ideas(Task):
    templates: ClassVar = {
        "thought": "grow {{ thoughts | length }}",
        "propose": "propose {{ count }}",
        "value": "value {{ thought }}",
        "values": "values {{ candidates | join(', ') }}",
        "vote": "vote {{ candidates | join(', ') }}",
        "answer": "answer {{ thoughts[-1].thought }}",
    }
    depth = 2


@pytest.fixture
def parallel(scripted: Any) -> Any:
    """Make a scripted decoder that writes steps; its replies can have lists of titles and bodies, and a conclusion."""

    def completion(*steps: str, after: str = "", title: str = "Title") -> Any:
        parts = [Part("step", f"#### {title} {i}: {body}\n") for i, body in enumerate(steps, 1)]
        text = "".join(part.text for part in parts) + after
        return scripted.completion(text, parts=(Part("exact", ""), *parts, Part("exact", after)))

    def make(replies: dict[str, Any]) -> Any:
        decoder = scripted(replies)
        decoder.name, decoder.writes_steps = "pdos", True
        return decoder

    make.completion = completion  # type: ignore[attr-defined]
    return make


def test_the_text_of_a_reply_is_the_bodies_of_its_steps(parallel: Any, scripted: Any) -> None:
    reply = parallel.completion("one: two", "", "three", after="So 2.")
    assert bodies(reply) == ["one: two", "", "three"]
    assert said(reply) == "one: two\n\nthree"
    assert conclusion(reply) == "So 2."
    plain = scripted.completion("just text: yes")
    assert (bodies(plain), said(plain), conclusion(plain)) == ([], "just text: yes", "just text: yes")


def test_a_title_is_one_line_without_delimiters() -> None:
    assert title("Ends in: ## a\n b") == "Ends in, a b"


def test_proposals_are_steps_if_the_decoder_supports_them(parallel: Any, scripted: Any) -> None:
    replies = {"propose 2": parallel.completion("first\nmore of it", "second"), "answer first": "done"}
    decoder = parallel(replies)
    search = BFS(thoughts=2, breadth=1, depth=2)
    solution = solve(Ideas(), "Q", decoder=decoder, search=search, generator=Propose(), evaluator="random")
    assert [node.thought.text for node in solution.tree if node.thought] == ["first", "second"]
    assert decoder.requests[0].steps == ("Idea 1", "Idea 2")
    plain = scripted({"propose 2": "first\nsecond"})
    solve(Ideas(), "Q", decoder=plain, search=search, generator=Propose(), evaluator="random")
    assert plain.requests[0].steps == ()


def test_candidates_are_evaluated_in_steps_before_the_vote(parallel: Any) -> None:
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


def judged(decoder: Any, evaluator: Any, task: Any = Ideas, thoughts: int = 2, depth: int = 2) -> Any:
    search = BFS(thoughts=thoughts, breadth=2, depth=depth)
    solution = solve(task(), "Q", decoder=decoder, search=search, generator=Propose(), evaluator=evaluator)
    requests = [request for request in decoder.requests if request.purpose == "evaluate"]
    return solution, {node.thought.text: node.value for node in solution.tree if node.thought}, requests


@pytest.mark.parametrize(
    ("steps", "after", "values"),
    [
        (("poor, 3", "fine, 8"), "Candidate 1: 2\nCandidate 2: 9", {"a": 2, "b": 9}),
        (("poor, 3", "fine, 8"), "Candidate 2: 9\nCandidate 2: 7\n", {"a": 3, "b": 7}),  # the last line counts
        (("poor, 3", "fine, 8"), "Candidate 1: no number", {"a": 3, "b": 8}),
        (("poor", "fine, 8"), "Candidate 11: 5\nCandidate 1 is 5", {"a": 1, "b": 8}),  # the default is 1
    ],
)
def test_candidates_are_evaluated_in_steps_with_one_conclusion(
    parallel: Any, steps: tuple[str, ...], after: str, values: dict[str, float]
) -> None:
    reply = parallel.completion(*steps, after=after, title="Candidate")
    decoder = parallel({"propose 2": parallel.completion("a", "b"), "values a, b": reply})
    solution, values_by_text, requests = judged(decoder, Value())
    assert values_by_text == values
    (request,) = requests
    assert request.steps == ("Candidate 1", "Candidate 2")
    assert request.sampling.max_tokens == 16 + 2 * 48
    assert solution.parse_failures == list(values.values()).count(1)
    assert sum(node.usage.new_tokens for node in solution.tree) == 2 * decoder.tokens  # the one reply counts once


def test_values_of_several_samples_are_averaged(parallel: Any) -> None:
    replies = [parallel.completion("2", "4", title="Candidate"), parallel.completion("4", "9", title="Candidate")]
    decoder = parallel({"propose 2": parallel.completion("a", "b"), "values a, b": replies})
    _, values_by_text, (request,) = judged(decoder, Value(samples=2, temperature=1.0))
    assert values_by_text == {"a": 3, "b": 6.5}
    assert request.sampling.n == 2


def test_candidates_of_different_states_are_evaluated_separately(parallel: Any) -> None:
    class Deep(Ideas):
        templates: ClassVar = Ideas.templates | {"propose": "propose /{{ thoughts | map(attribute='thought') | join }}"}

    decoder = parallel({"propose /" + path: parallel.completion(path + "0", path + "1") for path in ("", "0", "1")})
    _, _, requests = judged(decoder, Value(), Deep, depth=3)
    assert [request.prompt[-1].content for request in requests] == ["values 0, 1", "values 00, 01", "values 10, 11"]


def test_evaluations_cut_off_by_a_budget_have_no_value(parallel: Any, scripted: Any) -> None:
    class Silent(Ideas):
        templates: ClassVar = Ideas.templates | {"answer": "answer"}

    decoder = parallel({"propose 2": parallel.completion("a", "b"), "values a, b": scripted.completion("", "budget")})
    solution, values_by_text, _ = judged(decoder, Value(), Silent)
    assert values_by_text == {"a": None, "b": None}
    assert solution.parse_failures == 0


def test_candidates_are_evaluated_one_by_one_without_templates_or_steps(parallel: Any, scripted: Any) -> None:
    class Plain(Task):
        templates: ClassVar = {name: text for name, text in Ideas.templates.items() if name != "values"}
        labels: ClassVar = {"good": 1, "bad": 0}
        depth = 2

    two = {"propose 2": parallel.completion("a", "b"), "value a": "3", "value b": "good"}
    for decoder, task, evaluator in (
        (parallel(two), Plain, Value()),  # no `values` template
        (parallel(two), Ideas, Value(template="value")),  # a template for one candidate
        (parallel(two), type("Labelled", (Ideas,), {"labels": Plain.labels}), Classify()),
        (scripted(two | {"propose 2": "a\nb"}), Ideas, Value()),  # a decoder without steps
    ):
        _, _, requests = judged(decoder, evaluator, task)
        assert [request.prompt[-1].content for request in requests] == ["value a", "value b"]
        assert not any(request.steps for request in requests)
    decoder = parallel({"propose 1": parallel.completion("a"), "value a": "3"})
    assert judged(decoder, Value(), thoughts=1)[1] == {"a": 3}


@pytest.mark.parametrize("name", ["creative_writing", "gsm8k", "multiple_choice"])
def test_values_prompts_contain_numbered_candidates(name: str) -> None:
    task = load_task(name)
    prompt = task.prompt("values", task.start(task.example()), candidates=["first one", "second one"])[-1].content
    assert re.search(r"Candidate 1:\s+first one\s+Candidate 2:\s+second one\s", prompt)
    assert prompt.endswith('on lines such as "Candidate 1: 6".')


def test_a_passage_is_written_paragraph_by_paragraph(parallel: Any) -> None:
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
