"""Question: a request, and functions that read and score its answers. For training and for choosing caps."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from tot.decoders.request import Completion, Request


@dataclass(frozen=True)
class Question:
    """A request with the parser and the score of its answers."""

    request: Request
    parse: Callable[[str], Any]
    """Return the answer in a text, or None."""
    canonical: Callable[[Any], Hashable]
    """Return a key that equivalent answers share."""
    score: Callable[[Any], float]
    """Return the score of an answer or None, from 0 to 1."""
    solution: str | None = None
    """A known solution."""

    def answer(self, completion: Completion) -> Any | None:
        """Return the most likely choice, otherwise the answer in the text, of a rationale after its trigger."""
        if completion.choice_logprobs:
            scores = [choice.total for choice in completion.choice_logprobs]
            return self.request.choices[scores.index(max(scores))].strip()
        trigger = self.request.answer_trigger
        return self.parse(completion.text if trigger is None else f"{trigger}{completion.answer}")

    def read(self, answer: Any | None) -> str | None:
        """Return an answer in canonical form for comparisons; None if it is missing."""
        return None if answer is None else str(self.canonical(answer))
