"""A solution truncated by the token limit has an answer only if its text announces one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tot import Solution, solve
from tot.decoders import Completion, Request, Usage


class Wordy:
    """A chat model whose every reply is truncated by the token limit."""

    chats = True

    def __init__(self, text: str) -> None:
        self.text = text

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        one = Completion(self.text, (), 0.0, "length", Usage(new_tokens=9))
        return [one for request in requests for _ in range(request.sampling.n)]


def solved(text: str, search: str, **options: int) -> Solution:
    return solve("gsm8k", "How many pens?", decoder=Wordy(text), search=search, generator="sample", **options)


@pytest.mark.parametrize("search", ["cot", "self-consistency:samples=3"])
def test_the_last_number_of_a_truncated_text_is_not_an_answer(search: str) -> None:
    solution = solved("She has 3 pens.\nThen she buys 2", search, max_tokens=60)
    assert solution.answer is None
    assert solution.stopped == "the text was truncated at max_tokens=60, before its answer: raise it (--max-tokens)"


def test_an_answer_announced_before_the_limit_counts() -> None:
    solution = solved("The answer is 5. To check, 3 +", "self-consistency:samples=3", max_tokens=60)
    assert (solution.answer, solution.stopped) == ("5", None)


def test_the_warning_of_truncation_names_the_limit_of_the_task() -> None:
    assert "Task.sampling" in (solved("She has 3 pens.\nThen 2", "cot").stopped or "")


def test_truncated_solutions_have_no_vote() -> None:
    class Mixed(Wordy):
        def generate(self, requests: Sequence[Request]) -> list[Completion]:
            done = super().generate(requests)
            done[-1] = Completion("The answer is 7.", (), 0.0, "eos", Usage(new_tokens=5))
            return done

    solution = solve("gsm8k", "How many?", decoder=Mixed("She has 3"), search="self-consistency:samples=3")
    assert solution.answer == "7"
