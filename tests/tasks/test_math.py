"""Math: formulas as answers, equal ones share a ballot, programs print them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from tot import Solution, asolve, solve
from tot.decoders import Completion, Request, TaskError, Usage
from tot.tasks import Math, formulas

QUESTION = "Two fair coins are tossed. Find the probability of at least one head."


class Chat:
    """A chat model whose n-th sample is the n-th text."""

    chats = True

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [
            Completion(self.texts[i % len(self.texts)], (-1.0,), -1.0, "eos", Usage(new_tokens=5))
            for request in requests
            for i in range(request.sampling.n)
        ]


def solved(*texts: str, **options: Any) -> Solution:
    votes = {"search": f"self-consistency:samples={len(texts)}", "generator": "sample", "evaluator": "random"}
    return solve("math", QUESTION, decoder=Chat(*texts), **votes | options)


def test_equal_formulas_vote_together() -> None:
    solution = solved(r"\boxed{1}", r"So \boxed{\frac34}.", r"\boxed{0.75}", r"\boxed{1/2}", r"It is $\frac{6}{8}$.")
    assert Math().score(solution.answer, "3/4") == 1
    assert solution.votes == (3, 5)


@pytest.mark.parametrize(
    "options",
    [
        {"search": "self-consistency:samples=2", "generator": "sample"},
        {"search": "bfs:thoughts=1,breadth=1,depth=2", "generator": "sample"},
    ],
)
def test_other_searches_proceed_while_a_formula_is_compared(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    started, proceeded = threading.Event(), threading.Event()
    waits: list[bool] = []

    def slow(kind: str, *texts: str) -> None:
        started.set()
        waits.append(proceeded.wait(5))

    async def other() -> None:
        while not started.is_set():
            await asyncio.sleep(0.001)
        proceeded.set()

    async def both() -> Solution:
        search = asolve("math", QUESTION, decoder=Chat(r"\boxed{x + 1}"), evaluator="random", **options)
        return (await asyncio.gather(search, other()))[0]

    monkeypatch.setattr(formulas, "_ask", slow)
    assert asyncio.run(both()).answer == "x + 1"
    assert waits
    assert all(waits)


def test_solutions_without_a_formula_have_no_vote() -> None:
    assert solved("I do not know.", "No idea.").answer is None
    solution = solved("I do not know.", r"\boxed{\frac34}", "No idea.")
    assert (solution.answer, solution.votes) == (r"\frac34", (1, 1))


def test_a_hostile_formula_is_outvoted() -> None:
    solution = solved(r"\boxed{9^{9^{9^{9}}}}", r"\boxed{\frac34}", r"\boxed{0.75}")
    assert (Math().canonical(solution.answer), solution.votes) == ("0.75", (2, 3))


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("3/4", "0.75"),
        ("Answer: 3/4", "0.75"),
        ("The probability is 0.75", "0.75"),
        ("x**2 + 1", "x**2 + 1"),
        ("(3, pi/2)", "(3, 1.57079632679)"),
        ("$7$", "7"),
    ],
)
def test_a_program_prints_a_formula(line: str, answer: str) -> None:
    printed = Math().parse_output(line)
    assert printed is not None
    assert Math().canonical(printed) == answer


def test_a_program_that_prints_nothing_has_no_answer() -> None:
    assert Math().parse_output(" ") is None


def test_a_program_votes_with_a_written_solution() -> None:
    class Both(Chat):
        def generate(self, requests: Sequence[Request]) -> list[Completion]:
            program = ["```python" in request.prompt[-1].content for request in requests]
            texts = ["print(3 / 4)" if one else r"\boxed{\frac{3}{4}}" for one in program]
            return [Completion(text, (), 0.0, "eos", Usage(new_tokens=5)) for text in texts]

    solution = solve(
        "math", QUESTION, decoder=Both(), search="self-consistency:samples=2,solutions=chain+program",
        generator="sample", evaluator="random",
    )  # fmt: skip
    assert solution.votes == (2, 2)


@pytest.mark.parametrize(
    ("text", "answered"),
    [("So \\boxed{\\frac{1}{2}}\n", True), ("So \\boxed{\\frac{1}{2}}", False), ("So \\boxed{\\frac{1}{2}\n", False)],
)
def test_a_complete_box_ends_decoding(text: str, answered: bool) -> None:
    assert Math().is_answered(text) is answered


def test_a_truncated_text_has_an_answer_only_in_a_box() -> None:
    assert Math().parse_truncated(r"First \boxed{5}, then 7 + ") == "5"
    assert Math().parse_truncated("The answer is 7") is None


def test_rows() -> None:
    assert Math().reference_of({"answer": r"\frac12"}) == r"\frac12"
    assert Math().reference_of({"answer": r"So it is \boxed{\frac12}."}) == r"\frac12"
    with pytest.raises(TaskError, match="its answer is None"):
        Math().reference_of({"answer": None})
    assert Math().score(None, "1") == 0
    assert Math().score("0.5", r"\frac12") == 1
    for row in Math().prompts.data("questions"):
        assert Math().score(Math().parse_answer(rf"So \boxed{{{row['answer']}}}."), Math().reference_of(row)) == 1
