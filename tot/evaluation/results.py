"""Aggregate an evaluation's samples: score, parse failures, tokens, time, and score at token budgets."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tot.evaluation.estimate import COVERAGES, Estimate, Reliability, bootstrap, estimate, reliability


@dataclass(frozen=True, slots=True)
class Results:
    """The results of one evaluation. Intervals are 95% intervals over questions."""

    questions: int
    samples: int
    """Questions times repeats."""
    score: Estimate | None
    """The mean over questions of the mean over repeats; a failed search scores 0. None if all failed."""
    any: Estimate | None
    """The mean over questions of the best repeat; None if all searches failed."""
    judged: Estimate | None
    """The mean rating of the answers that the judge rated, on the task's scale; None without a judge."""
    solved: int
    """Samples whose answer the task itself verified."""
    parse_failures: Estimate
    """The share of samples without a readable answer, not counting samples that a budget stopped."""
    unreadable: int
    """Number of intermediate replies, over all searches, that could not be parsed."""
    errors: int
    """Number of failed searches."""
    bad_rows: int
    """Number of rows without a valid question, which are not samples."""
    thoughts: int
    tokens: int
    """New tokens of all samples."""
    prompt_tokens: int
    forwards: int
    """Forward passes, summed over searches, which share them."""
    seconds: float
    """Latency: seconds from the start to the end of a search, summed over searches, which run concurrently."""
    acceptance_rate: float | None
    """Accepted over reached draft positions; None if nothing was drafted or positions were not counted."""
    by_purpose: dict[str, dict[str, int]]
    """Calls, prompt tokens and new tokens, by purpose (generate, evaluate, answer, escalate)."""
    by_model: dict[str, dict[str, int]]
    """The same by model; empty if there is only one."""
    certainty: Reliability | None = None
    """How well certainties predict scores; None if no answer has a certainty."""
    verdict: str = "verified"
    """The task's word for a solved answer."""
    searched: int = 0
    """Samples that this run searched; the others are of an earlier run that it resumed."""
    wall_seconds: float | None = None
    """Wall-clock seconds of this run, loading the model included; None if nothing was searched in it."""
    folder: Path | None = None
    """The evaluation's folder."""

    @property
    def score_text(self) -> str:
        """The score as text, such as "31.0% (22.8% to 40.6%)"."""
        return "none: every search failed" if self.score is None else self.score.format()

    @property
    def figures(self) -> list[tuple[str, str, str]]:
        """(name, value, note) rows for the terminal and the report."""
        rows = [_mean("Score", self.score)]
        if self.errors < self.samples and not any(used["calls"] for used in self.by_purpose.values()):
            rows.append(("Model", "never asked", "rules and actions of the task gave all answers"))
        if self.judged is not None:
            rows.append(("Judge", self.judged.format(".2f"), "mean rating of the answers"))
        repeated = self.samples > self.questions
        if self.wall_seconds and self.searched:
            each = f"{self.wall_seconds / self.searched:,.1f} s per {'sample' if repeated else 'question'}"
            rows.append(("Wall time", f"{self.wall_seconds:,.1f} s", f"{each}, loading included"))
        rows.append(("Latency", f"{self.seconds / self.samples:,.1f} s", "mean of a search, while others run"))
        rows.append(("Questions", f"{self.questions:,}", f"{self.samples:,} samples" if repeated else ""))
        if repeated:
            rows.append(_mean("Best repeat", self.any))
        if self.solved:
            checked = (
                "verified by the task" if self.verdict == "verified" else f"{self.verdict}; nothing else is checked"
            )
            rows.append(("Verified", f"{self.solved:,}", f"samples, {checked}"))
        if (sure := self.certainty) is not None:
            scores = " / ".join(f"{sure.score_at_coverage[share]:.1%}" for share in COVERAGES)
            error = f"expected, between certainty and score, {sure.samples:,} samples"
            rows.append(("Calibration error", f"{sure.error:.1%}", error))
            shares = " / ".join(map(str, COVERAGES))
            rows.append(("Score by coverage", scores, f"of the most certain {shares}% of the samples"))
        if self.score:
            rows.append(("Unreadable", f"{self.parse_failures.mean:.1%}", "answers, of samples"))
        bad = f"searches, and {self.bad_rows:,} invalid rows" if self.bad_rows else "searches"
        rows.append(("Failed", f"{self.errors:,}", bad))
        rows.append(("New tokens", f"{self.tokens:,}", f"{self.tokens / self.samples:,.0f} per sample"))
        rows += [(model, f"{used['new_tokens']:,}", "of the new tokens") for model, used in self.by_model.items()]
        rows.append(("Thoughts", f"{self.thoughts:,}", f"{self.thoughts / self.samples:,.1f} per sample"))
        if self.acceptance_rate is not None:
            rows.append(("Acceptance rate", f"{self.acceptance_rate:.0%}", "of reached draft positions"))
        return rows

    def to_json(self) -> dict[str, Any]:
        """Return the contents of results.json."""
        numbers = asdict(self)
        del numbers["folder"]  # the folder may be moved
        if self.judged is not None and not math.isfinite(self.judged.high):
            numbers["judged"] |= {"low": None, "high": None}
        return {"format": "tot.results", "version": 1, **numbers}


def summarise(samples: Iterable[Mapping[str, Any]], bad_rows: int = 0) -> Results:
    """Aggregate at least one sample into results."""
    scores: defaultdict[int, list[float]] = defaultdict(list)
    each: list[float] = []
    failures: list[float] = []
    certainties: list[float | None] = []
    judged: list[float] = []
    counts: Counter[str] = Counter()
    measured: defaultdict[str, float] = defaultdict(float)
    purposes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    models: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for sample in samples:
        scores[sample["index"]].append(sample["score"])
        each.append(sample["score"])
        certainties.append(sample.get("certainty"))
        failures.append(float(sample["parse_failure"]))
        judged += [] if sample.get("judged") is None else [sample["judged"]]
        counts.update({name: int(sample[name]) for name in ("thoughts", "unreadable", "solved")})
        counts.update(errors=int(sample["error"] is not None))
        for name, value in sample["measured"].items():
            measured[name] += value
        for groups, usages in ((purposes, sample["usage"]), (models, sample.get("by_model", {}))):
            for group, usage in usages.items():
                groups[group].update(usage)
    failed = counts["errors"] == len(each)
    return Results(
        questions=len(scores),
        samples=len(each),
        score=None if failed else estimate([sum(repeats) / len(repeats) for repeats in scores.values()]),
        any=None if failed else estimate([max(repeats) for repeats in scores.values()]),
        judged=bootstrap(judged) if judged else None,
        solved=counts["solved"],
        parse_failures=estimate(failures),
        unreadable=counts["unreadable"],
        errors=counts["errors"],
        bad_rows=bad_rows,
        thoughts=counts["thoughts"],
        tokens=sum(usage["new_tokens"] for usage in purposes.values()),
        prompt_tokens=sum(usage["prompt_tokens"] for usage in purposes.values()),
        forwards=int(measured["forwards"]),
        seconds=measured["seconds"],
        acceptance_rate=measured["accepted"] / measured["reached"] if measured["reached"] else None,
        by_purpose={purpose: dict(usage) for purpose, usage in purposes.items()},
        by_model={model: dict(usage) for model, usage in models.items()},
        certainty=reliability(certainties, each),
    )


def _mean(name: str, score: Estimate | None) -> tuple[str, str, str]:
    if score is None:
        return name, "none", "every search failed"
    return name, f"{score.mean:.1%}", f"95%: {score.low:.1%} to {score.high:.1%}"


def tokens_of(sample: Mapping[str, Any]) -> int:
    """Return the number of new tokens of a sample's search."""
    return sum(usage["new_tokens"] for usage in sample["usage"].values())
