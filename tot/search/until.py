"""Searches whose answer is a vote, and which can stop when the vote is sure."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from tot.search.base import Search, SearchState
from tot.search.votes import Ballot, cast, stays_ahead


class VotesUntilSure(Search):
    """A search that collects answers. With `until`, it stops when more answers would hardly change the result."""

    until: Annotated[float, Field(gt=0, le=1)] | None = None
    """Stop when the posterior that the leading answer stays ahead with all answers reaches this (`stays_ahead`)."""

    @model_validator(mode="after")
    def _votes(self) -> Self:
        if self.until is not None and self.aggregate == "best":
            raise ValueError("until counts votes: set aggregate to vote or majority")
        return self

    def ballots(self, search: SearchState) -> list[Ballot]:
        """Return the votes of the solutions that have ended."""
        answers = [(node, search.answer_at(node)) for node in search.complete() if search.is_end(node)]
        answered = [(node, answer) for node, answer in answers if answer is not None]
        question = search.tree.state(search.tree.root).question
        return cast(search.checked, question, answered, self.aggregate == "majority")[0]

    def is_sure(self, ballots: list[Ballot], remaining: int) -> bool:
        """Return whether the vote can stop, if at most `remaining` more ballots can follow."""
        return self.until is not None and len(ballots) > 1 and stays_ahead(ballots, max(0, remaining)) >= self.until
