"""Ways to answer or to search, given as 'NAME: option=value; option=value' with options of `tot eval`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from benchmarks.harness import BenchOptions
from tot.decoders.errors import OptionError
from tot.evaluation.estimate import estimate, paired


class WaysOptions(BenchOptions):
    """Options of benchmarks that compare ways to answer the same questions."""

    data: str | None = Field(None, description="Questions with answers, as for tot eval; by default the task's own.")
    task: str = Field("gsm8k", description="The task of these questions.")
    limit: int = Field(100, ge=1, description="Number of questions.")
    offset: int = Field(0, ge=0, description="Rows to skip first.")

    @property
    def rows(self) -> dict[str, Any]:
        """The options of an evaluation that all ways share."""
        return {name: getattr(self, name) for name in ("task", "data", "model", "limit", "offset")}


def read_ways(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the options of each way by name. Raises OptionError for an invalid one."""
    ways: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, colon, options = text.partition(":")
        if not (name.strip() and colon):
            raise OptionError(f"--way {text!r} can't be read: write 'NAME: option=value; option=value'")
        if name.strip() in ways:
            raise OptionError(f"--way {name.strip()!r} is given twice: give each way a name of its own")
        ways[name.strip()] = read_options(options, f"--way {text!r} can't be read: write 'NAME: option=value")
    return ways


def read_options(text: str, problem: str) -> dict[str, Any]:
    """Parse 'option=value; option=value'; a repeated option becomes a list. Raises OptionError with the problem."""
    options: dict[str, Any] = {}
    for option, equals, value in (pair.partition("=") for pair in text.split(";") if pair.strip()):
        if not equals:
            raise OptionError(f"{problem}; option=value'")
        name, new = option.strip(), value.strip()
        before = options.get(name, [])
        options[name] = [*([before] if isinstance(before, str) else before), new] if name in options else new
    return options


def compared(scores: Mapping[str, Mapping[Any, float]]) -> Iterator[tuple[str, str]]:
    """Yield the mean score of each way, and the mean of its paired differences from the first way; both with intervals.

    `scores` has the scores of each way by question.
    """
    first = next(iter(scores.values()), {})
    for own in scores.values():
        differences = [score - first[question] for question, score in own.items() if question in first]
        shown = "" if own is first or not differences else paired(differences).format("+.1%")
        yield estimate([*own.values()]).format(), shown
