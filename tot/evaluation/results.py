"""What an evaluation's samples come to: score, readable answers, tokens, time, and the score at token budgets."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tot.evaluation.estimate import Estimate, estimate


@dataclass(frozen=True, slots=True)
class Results:
    """The numbers of one evaluation. Intervals are of 95%, over problems."""

    problems: int
    samples: int
    """Problems times repeats."""
    score: Estimate | None
    """The mean over problems of the mean over repeats; a search that failed scores 0. None where all failed."""
    any: Estimate | None
    """The mean over problems of the best repeat; None likewise."""
    solved: int
    """Samples whose answer the task itself verified."""
    parse_failures: Estimate
    """The share of samples that ended without an answer that could be read, those left out that a budget ended."""
    unreadable: int
    """Replies on the way, of all searches, that could not be read."""
    errors: int
    """Searches that failed."""
    bad_rows: int
    """Rows that could not be asked; they are no samples."""
    thoughts: int
    tokens: int
    """New tokens of all samples."""
    prompt_tokens: int
    forwards: int
    """Forward passes of each search, added up: searches share them."""
    seconds: float
    """Seconds of each search, added up: searches run side by side."""
    acceptance: float | None
    """Accepted of drafted tokens; None where nothing was drafted."""
    acceptance_rate: float | None
    """Accepted over positions of drafts that were reached; None where nothing was drafted, or that was not counted."""
    cost: float
    """What a remote server takes for all of it, by the prices given; 0 for local models."""
    by_purpose: dict[str, dict[str, int]]
    """Calls, prompt tokens and new tokens of what was generated, evaluated and answered."""
    score_at_tokens: dict[int, float]
    """By number of new tokens: the score if searches that took more had scored 0. None where all failed."""
    folder: Path | None = None
    """Where all of it is kept."""

    @property
    def score_text(self) -> str:
        """Such as "31.0% (22.8% to 40.6%)"."""
        return "none: every search failed" if self.score is None else self.score.format()

    @property
    def figures(self) -> list[tuple[str, str, str]]:
        """Name, value and note of the numbers that people read."""
        each = 1 / self.samples
        repeated = self.samples > self.problems
        bad = f"searches, and {self.bad_rows:,} rows not asked" if self.bad_rows else "searches"
        shown: list[tuple[str, str, str] | None] = [
            _mean("Score", self.score),
            ("Problems", f"{self.problems:,}", f"{self.samples:,} samples" if repeated else ""),
            _mean("Best repeat", self.any) if repeated else None,
            ("Verified", f"{self.solved:,}", "samples, by the task itself") if self.solved else None,
            ("Unread answers", f"{self.parse_failures.mean:.1%}", "of samples") if self.score else None,
            ("Failed", f"{self.errors:,}", bad),
            ("New tokens", f"{self.tokens:,}", f"{each * self.tokens:,.0f} a sample"),
            ("Seconds", f"{self.seconds:,.0f}", f"of searches, added up: {each * self.seconds:,.1f} a sample"),
            ("Thoughts", f"{self.thoughts:,}", f"{each * self.thoughts:,.1f} a sample"),
            None if self.acceptance is None else ("Accepted", f"{self.acceptance:.0%}", "of drafted tokens"),
            None
            if self.acceptance_rate is None
            else ("Acceptance rate", f"{self.acceptance_rate:.0%}", "of positions reached"),
            ("Cost", f"{self.cost:.4g}", "by the prices given") if self.cost else None,
        ]
        return list(filter(None, shown))

    def to_json(self) -> dict[str, Any]:
        """What results.json holds."""
        numbers = asdict(self)
        del numbers["folder"]  # it may be moved
        return {"format": "tot.results", "version": 1, **numbers}


def summarise(samples: Iterable[Mapping[str, Any]], bad_rows: int = 0) -> Results:
    """The results of at least one sample."""
    scores: defaultdict[int, list[float]] = defaultdict(list)
    spent: list[tuple[int, float]] = []
    failures: list[float] = []
    total: Counter[str] = Counter()
    seconds = cost = 0.0
    purposes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for sample in samples:
        tokens = tokens_of(sample)
        scores[sample["index"]].append(sample["score"])
        spent.append((tokens, sample["score"]))
        failures.append(float(sample["parse_failure"]))
        measured = sample["measured"]
        seconds += measured["seconds"]
        cost += measured.get("cost", 0.0)
        total.update({name: measured[name] for name in ("forwards", "drafted", "accepted")})
        if "reached" in measured:
            total.update({"reached": measured["reached"], "accepted of reached": measured["accepted"]})
        total.update({name: sample[name] for name in ("thoughts", "unreadable")})
        total.update({"solved": int(sample["solved"]), "errors": int(sample["error"] is not None)})
        for purpose, usage in sample["usage"].items():
            purposes[purpose].update(usage)
    failed = total["errors"] == len(spent)
    return Results(
        problems=len(scores),
        samples=len(spent),
        score=None if failed else estimate([sum(each) / len(each) for each in scores.values()]),
        any=None if failed else estimate([max(each) for each in scores.values()]),
        solved=total["solved"],
        parse_failures=estimate(failures),
        unreadable=total["unreadable"],
        errors=total["errors"],
        bad_rows=bad_rows,
        thoughts=total["thoughts"],
        tokens=sum(usage["new_tokens"] for usage in purposes.values()),
        prompt_tokens=sum(usage["prompt_tokens"] for usage in purposes.values()),
        forwards=total["forwards"],
        seconds=seconds,
        acceptance=total["accepted"] / total["drafted"] if total["drafted"] else None,
        acceptance_rate=total["accepted of reached"] / total["reached"] if total["reached"] else None,
        cost=cost,
        by_purpose={purpose: dict(usage) for purpose, usage in purposes.items()},
        score_at_tokens={} if failed else _at_budgets(spent),
    )


def _mean(name: str, of: Estimate | None) -> tuple[str, str, str]:
    if of is None:
        return name, "none", "every search failed"
    return name, f"{of.mean:.1%}", f"95%: {of.low:.1%} to {of.high:.1%}"


def tokens_of(sample: Mapping[str, Any]) -> int:
    """The new tokens that a sample's search took."""
    return sum(usage["new_tokens"] for usage in sample["usage"].values())


def _at_budgets(spent: list[tuple[int, float]]) -> dict[int, float]:
    """At powers of two, from the first that some search kept to, up to the first that all did."""
    fewest, most = min(tokens for tokens, _ in spent), max(tokens for tokens, _ in spent)
    budgets = [2 ** (max(fewest, 1) - 1).bit_length()]
    while budgets[-1] < most:
        budgets.append(2 * budgets[-1])
    return {budget: sum(score for tokens, score in spent if tokens <= budget) / len(spent) for budget in budgets}
