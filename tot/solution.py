"""Solution: the result of a search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from tot.decoders.files import write_json
from tot.decoders.request import ToolCall, Usage
from tot.task.call_votes import is_calls
from tot.tree.saved import RUN
from tot.tree.tree import ThoughtTree


@dataclass(frozen=True, slots=True)
class Solution:
    """The result of a search."""

    answer: Any | None
    """Text, a list of actions for a planning task, the object of the answer's schema, or the calls of functions that
    the search does not execute (a tuple of `ToolCall`). None if the best state has no answer."""
    solved: bool
    """Whether the task verified the answer."""
    value: float | None
    """The best state's value on the task's scale."""
    tree: ThoughtTree = field(repr=False)
    usage: Usage
    calls: int
    """Number of samples requested from decoders."""
    parse_failures: int
    """Number of replies that could not be parsed."""
    rejected: int
    """Number of thoughts that were not legal, or returned to an earlier state of their path."""
    stopped: str | None
    """Why the search ended early or without a goal ("no goal among 40 thoughts", "interrupted", "budget: tokens (512 of
    500)"), or None."""
    filters: Mapping[str, float] = field(default_factory=dict)
    """The sampling filters: top_k, top_p, min_p."""
    verdict: str = "verified"
    """The task's word for a solved answer."""
    votes: tuple[int, int] | None = None
    """How many leaves voted for the answer, and how many voted; None if there was no vote."""
    certainty: float | None = None
    """Probability that the answer is right: 1 if the task verified it, otherwise calibrated from the votes. None means
    not known, as without a calibration for the task and the model."""
    gain: float | None = None
    """How much one more sample is expected to raise the certainty; None if the certainty is not calibrated."""
    measured: float | None = None
    """The score of the best state, negated if lower scores are better; None if the task measures no scores."""
    by_model: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Calls, prompt tokens and new tokens by model; empty if there is only one."""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The answer, if it is calls of functions; otherwise empty."""
        return self.answer if is_calls(self.answer) else ()

    def to_json(self) -> dict[str, Any]:
        """Return the run as JSON data: the result and the tree, with a format version."""
        return {**RUN, **self.result(), "tree": self.tree.to_json()}

    def result(self) -> dict[str, Any]:
        """Return the run as JSON data without its tree."""
        return {
            **self.summary(),
            "calls": self.calls,
            "parse_failures": self.parse_failures,
            "rejected": self.rejected,
            "stopped": self.stopped,
            "verdict": self.verdict,
            "votes": self.votes,
            "filters": dict(self.filters),
        }

    def summary(self) -> dict[str, Any]:
        """Return answer, certainty, solved, value and usage; with several models also usage by model."""
        about = {name: getattr(self, name) for name in ("certainty", "gain", "solved", "value")}
        about = {"answer": to_jsonable_python(self.answer), **about}
        return about | {"usage": asdict(self.usage)} | ({"by_model": self.by_model} if self.by_model else {})

    def save(self, path: str | Path) -> None:
        """Write the run with its tree as JSON, which `tot report` opens. Raises TaskError if it can't be written."""
        write_json(Path(path), self.to_json())
