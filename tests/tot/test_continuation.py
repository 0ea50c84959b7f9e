"""Continue: thoughts are pieces of one message of the model."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from tot import BFS, Continue, LogProb, Random, SelfConsistency, Solution, Task, solve
from tot.decoders import Completion, Usage
from tot.decoders.request import Part
from tot.tasks import GSM8K

ASK = (
    "{% block user %}{{ question }}{% endblock %}{% block assistant %}"
    "{% for t in thoughts %}{{ t.step }}{% endfor %}{{ step | default('') }}{% endblock %}"
)


class Letter(Task):
    """One message, in pieces."""

    thought = ("step",)
    depth = 9
    templates: ClassVar = {"step": ASK, "chain": ASK, "answer": ASK}
    sampling: ClassVar = {"step": {"max_tokens": 40}, "chain": {"max_tokens": 40}, "answer": {"max_tokens": 40}}


def grown(decoder: Any, thoughts: int = 1, **options: Any) -> Solution:
    options = {"generator": Continue(temperature=1.0), "evaluator": Random(), **options}
    return solve(
        options.pop("task", Letter()), "why", decoder=decoder, search=BFS(thoughts=thoughts, breadth=9), **options
    )


def path(solution: Solution) -> list[str]:
    return [node.thought.text for node in solution.tree if node.thought]


# -- ends of pieces -----------------------------------------------------------------------------------------------


def test_pieces_continue_until_the_model_ends_its_message(scripted: Any) -> None:
    stop = scripted.completion
    decoder = scripted(
        {"why": stop("First.\n\n", "stop"), "First.\n\n": stop("Then.\n\n", "stop"), "First.\n\nThen.\n\n": "So 7."}
    )
    solution = grown(decoder)
    assert path(solution) == ["First.\n\n", "Then.\n\n", "So 7."]
    assert [node.thought.ended for node in solution.tree if node.thought] == [False, False, True]
    assert solution.answer == "First.\n\nThen.\n\nSo 7."
    assert {request.purpose for request in decoder.requests} == {"generate"}  # no request after the end
    sampling = decoder.requests[1].sampling
    assert (sampling.stop, sampling.keep_stop, sampling.max_tokens) == (("\n\n",), True, 40)


def test_a_label_starts_a_thought(scripted: Any) -> None:
    stop = scripted.completion
    decoder = scripted(
        {
            "why": stop("**Step 1:**\n\n", "stop"),
            "**Step 1:**\n\n": stop("### Costs\n\n", "stop"),
            "**Step 1:**\n\n### Costs\n\n": "They are 3.",
        }
    )
    solution = grown(decoder)
    assert path(solution) == ["**Step 1:**\n\n### Costs\n\nThey are 3."]
    assert solution.usage.new_tokens == 15
    assert solution.parse_failures == 0


@pytest.mark.parametrize("again", ["  first it  is.\n\n", "  \n", ""])
def test_repeated_and_empty_pieces_are_rejected(scripted: Any, again: str) -> None:
    stop = scripted.completion
    decoder = scripted({"why": stop("First it is.\n\n", "stop"), "First it is.\n\n": stop(again, "stop")})
    solution = grown(decoder)
    assert path(solution) == ["First it is.\n\n"]
    assert solution.parse_failures == 1


def test_thinking_is_a_thought_but_not_an_answer(scripted: Any) -> None:
    stop, task = scripted.completion, GSM8K().with_prompts("chat")
    prompt = task.prompt("step", task.start("why"))[-1].content
    thinking = "<think>\nIs it \\boxed{5}?\n\n"
    decoder = scripted({prompt: stop(thinking, "stop"), thinking: "No.\n</think>\nIt is 7."})
    solution = grown(decoder, task=task)
    assert (path(solution), solution.answer) == ([thinking, "No.\n</think>\nIt is 7."], "7")


@pytest.mark.parametrize(("rest", "answer"), [("No, 6 + 1", None), ("No.</think>\nIt is \\boxed{7}.", "7")])
def test_thinking_that_the_chat_template_opened_is_not_an_answer(scripted: Any, rest: str, answer: str | None) -> None:
    """A local decoder reports where a piece thinks; here it is cut at the end or closed."""
    task = GSM8K().with_prompts("chat")
    prompt = task.prompt("step", task.start("why"))[-1].content
    first, closed = "Is it \\boxed{5}?\n\n", rest.partition("</think>\n")[2]
    thinking = rest.removesuffix(closed)
    parts = [Part("thinking", first)], [Part("thinking", thinking), Part("exact", closed)]
    decoder = scripted(
        {
            prompt: scripted.completion(first, "stop", parts=tuple(parts[0])),
            first: scripted.completion(rest, "eos", parts=tuple(parts[1])),
        }
    )
    solution = grown(decoder, task=task)
    assert (path(solution), solution.answer) == ([first, rest], answer)
    assert [node.thought.thinking for node in solution.tree if node.thought] == [len(first), len(thinking)]


@pytest.mark.parametrize(
    ("chains", "answer"),
    [
        (["<think>5? 6?</think>It is 7.", "<think>5"], "7"),
        (["a template began it: 5</think>7"], "7"),
        (["<think>It is 5."], None),
    ],
)
def test_thinking_has_no_vote(scripted: Any, chains: list[str], answer: str | None) -> None:
    task = GSM8K().with_prompts("chat")
    decoder = scripted({task.prompt("chain", task.start("why"))[-1].content: chains})
    assert solve(task, "why", decoder=decoder, search=SelfConsistency(samples=len(chains))).answer == answer


# -- values of texts ----------------------------------------------------------------------------------------------


def completion(text: str, *logprobs: float) -> Completion:
    tokens = tuple(range(len(logprobs)))
    return Completion(text, tokens, sum(logprobs), "eos", Usage(new_tokens=5), logprobs=logprobs)


@pytest.mark.parametrize(("window", "best"), [(None, "b"), (1, "a")])
def test_texts_are_valued_by_their_own_probability(scripted: Any, window: int | None, best: str) -> None:
    decoder = scripted({"why": [completion("a", -1.0, -1.0), completion("b", -1.5, -0.1)]})
    solution = grown(decoder, thoughts=2, evaluator=LogProb(window=window))
    assert solution.answer == best
    values = {node.thought.text: node.value for node in solution.tree if node.thought}
    assert values["a"] == pytest.approx(0.3679, abs=1e-4)
    assert values["b"] == pytest.approx(0.4493 if window is None else 0.2231, abs=1e-4)
