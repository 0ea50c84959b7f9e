"""A model as the judge of answers, from 1 to 5 (PDOS, section 4.2 and appendix C).

The mark is the expected one: all five are scored as what the judge says next, so that there is always one to be read.
"""

from __future__ import annotations

from collections.abc import Sequence

from tot.decoders.decoder import Decoder
from tot.decoders.request import Message, Request
from tot.evaluators.model import expected

MARKS = (1, 2, 3, 4, 5)
_RUBRIC = """\
You mark answers. Take account of whether the answer is right, of how much it helps, and of how well it reads:
1 - wrong or of no use, or unreadable.
2 - wrong in the main, or of little use, or hard to read.
3 - right in the main and of some use, readable.
4 - right and of use, with small faults.
5 - right in all it says, complete, clear and in good order."""


def marks(judge: Decoder, asked: Sequence[tuple[str, str | None, str]]) -> list[float]:
    """The mark of each (question, right answer if there is one, answer), from 1 to 5."""
    completions = judge.generate([_request(*one) for one in asked])
    return [expected(MARKS, [choice.total for choice in one.choice_logprobs]) for one in completions]


def _request(question: str, reference: str | None, answer: str) -> Request:
    right = "" if reference is None else f"\n\nA right answer:\n{reference}"
    told = f"{_RUBRIC}\n\nThe question:\n{question}{right}\n\nThe answer to be marked:\n{answer}\n\nGive only the mark."
    return Request(
        prompt=(Message(role="user", content=told), Message(role="assistant", content="Mark:")),
        choices=tuple(f" {mark}" for mark in MARKS),
        close_choices=True,
    )
