"""Scorers of programs: a script that runs in the sandbox, or a Python function.

A script imports the program as the module `candidate`, and prints one number or JSON object with one call of print. The
program runs in another sandbox: it can't read the script and its files, and can't print a score.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tot.decoders.errors import OptionError, describe
from tot.sandbox import Files, Sandbox
from tot.tasks.checks import ended_early, run_judge

Measured = Callable[[str], float | Mapping[str, float]]
"""A scorer in Python: it receives the program's text."""
_SHOWN = 1000
"""Maximum characters of a program's output that the model sees."""
NOISY_REPEATS = 5
"""Runs of a scorer whose scores differ between runs, unless the user gives a number."""


@dataclass(frozen=True)
class Scored:
    """The result of scoring a program."""

    score: float | None = None
    """The mean score of all runs; None if the program failed."""
    margin: float = 0.0
    """Half the width of the mean's 95% interval."""
    parts: dict[str, float] = field(default_factory=dict)
    """The numbers of a JSON object, for example from several instances."""
    text: str = ""
    """The program's error, or the rest of the output of the scorer and the program."""


@dataclass
class Scorer:
    """Scores programs with `source`, the text of a script, or a function."""

    source: str | bytes | Measured
    files: Files = field(default_factory=dict)
    """Files beside the script, by name."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of the numbers in a JSON object, whose weighted sum is the score. By default its "score"."""
    seconds: float = 10.0
    """Time limit of a run."""
    repeats: int | None = None
    """Runs for each program. None: once, or `NOISY_REPEATS` if its scores differ between two runs. The first program
    and each one that is better than all before it run twice."""
    minimize: bool = False
    """Whether lower scores are better."""
    packages: tuple[str, ...] = ()
    """Installed packages that a script and its programs can import."""

    def __post_init__(self) -> None:
        if self.repeats is not None and self.repeats < 1:
            raise OptionError(f"repeats is {self.repeats}: score each program at least once")
        if reserved := {"plain.py", "program.py", "tests.json"} & self.files.keys():
            raise OptionError(f"a file beside the scorer is named {min(reserved)}, which the sandbox uses: rename it")
        self._noisy = False
        self._best: float | None = None
        self._known: dict[str, Scored] = {}

    @property
    def digest(self) -> str:
        """A digest of the script, its files and the weights, by which a resumed run recognizes the same scorer."""
        source = getattr(self.source, "__qualname__", "") if callable(self.source) else self.source
        about = repr([source, dict(self.files), dict(self.weights)])
        return hashlib.blake2b(about.encode(), digest_size=8).hexdigest()

    def score(self, program: str) -> Scored:
        """Score a program, or return its known result."""
        if program not in self._known:
            self._known[program] = self._score(program)
        return self._known[program]

    def _score(self, program: str) -> Scored:
        runs, repeats = [self._run(program)], self.repeats or (NOISY_REPEATS if self._noisy else 1)
        if self.repeats is None and self._is_best(runs[0].score):  # it may have been lucky
            runs.append(self._run(program))
            if runs[1].score != runs[0].score:
                self._noisy, repeats = self._noisy or self._best is None, NOISY_REPEATS
        while len(runs) < repeats and runs[-1].score is not None:
            runs.append(self._run(program))
        scores = [run.score for run in runs if run.score is not None]
        if len(scores) < len(runs):
            return next(run for run in runs if run.score is None)
        margin = _margin(scores) if len(set(scores)) > 1 else 0.0
        if self._is_best(fmean(scores)):
            self._best = fmean(scores)
        parts = {name: fmean(run.parts[name] for run in runs if name in run.parts) for name in runs[0].parts}
        return Scored(fmean(scores), margin, parts, runs[0].text)

    def _is_best(self, score: float | None) -> bool:
        sign = -1 if self.minimize else 1
        return score is not None and (self._best is None or sign * score > sign * self._best)

    def _run(self, program: str) -> Scored:
        return self._call(program) if callable(self.source) else self._run_script(self.source, program)

    def _call(self, program: str) -> Scored:
        assert callable(self.source)
        try:
            result = self.source(program)
        except (Exception, SystemExit) as error:  # the user's code may raise anything  # noqa: BLE001
            return Scored(text=f"The scorer failed: {describe(error)}"[:_SHOWN])
        return self._read(result, "")

    def _run_script(self, source: str | bytes, program: str) -> Scored:
        sandbox = Sandbox(seconds=self.seconds, packages=self.packages)
        judge, run, lines = run_judge({**self.files, "score.py": source}, program, sandbox)
        printed = run.output.strip()[-_SHOWN:]
        if len(lines) == 1 and lines[0] is not None:  # the program can't be loaded
            return Scored(text=self._explained(str(lines[0])))
        if len(lines) != 2:
            return Scored(text=f"The program can't be scored: {ended_early(judge, run, sandbox)}.")
        if (error := lines[1]["error"]) is not None:
            whose = "The program failed" if error["candidate"] else "The scorer failed on it"
            return Scored(text=self._explained(f"{whose}: {error['text']}"))
        if len(scores := lines[1]["scores"]) != 1:
            found = f"{len(scores)} scores" if scores else "no score"
            return Scored(text=f"The scorer printed {found}: it must print one number or one JSON object.")
        return self._read(scores[0], "\n".join(filter(None, [lines[1]["text"], printed])))

    def _explained(self, text: str) -> str:
        """Return an error, with the option that helps if a package is missing."""
        if (missing := re.search(r"No module named '(\w+)", text)) is None:
            return text
        known = " and ".join(["Python's standard library", *self.packages])
        option = "+".join([*self.packages, missing[1]])
        return f"{text}. Only {known} can be imported: the option packages={option} adds it"

    def _read(self, result: Any, text: str) -> Scored:
        """Return the score in a number or an object."""
        parts = {}
        if isinstance(result, Mapping):
            parts = {name: number for name, value in result.items() if (number := _number(value)) is not None}
            weights = self.weights or {"score": 1.0}
            missing = next((name for name in weights if name not in parts), None)
            if missing is not None:
                return Scored(text=f"The scorer's object has no number {missing!r}.")
            result = sum(weight * parts[name] for name, weight in weights.items())
        score = _number(result)
        if score is None:
            return Scored(text=f"The scorer returned {result!r:.60}: it must return a number.")
        if not math.isfinite(score):
            return Scored(text=f"The score is {score}: it must be finite.")
        return Scored(score, 0.0, parts, text)


def _margin(scores: Sequence[float]) -> float:
    """Return half the width of the 95% interval of the mean (Student's t)."""
    from scipy.stats import t  # takes a second

    return float(t.ppf(0.975, len(scores) - 1)) * stdev(scores) / math.sqrt(len(scores))


def _number(value: Any) -> float | None:
    """Return a number of any type as a float; None for other values, and for numbers that do not fit."""
    try:
        value = value.item() if hasattr(value, "item") else value  # of NumPy or PyTorch
        return None if isinstance(value, bool | str | bytes | bytearray) else float(value)
    except (TypeError, ValueError, ArithmeticError, RuntimeError):
        return None


def files_beside(script: Path, others: Sequence[str]) -> dict[str, bytes]:
    """Return the files beside a script by name, without the script, hidden files and `others`.

    Raises OptionError if they are too large for the sandbox, or can't be read.
    """
    names = {script.name, *others}
    paths = [path for path in sorted(script.parent.iterdir()) if path.is_file() and path.name not in names]
    paths = [path for path in paths if not path.name.startswith(".")]
    size, limit = sum(path.stat().st_size for path in paths) >> 20, Sandbox().disk
    if size >= limit:
        raise OptionError(
            f"the files beside {script} have {size} MiB, at most {limit} are possible: move some elsewhere"
        )
    try:
        return {path.name: path.read_bytes() for path in paths}
    except OSError as error:
        raise OptionError(f"a file beside {script} can't be read: {error}") from None
