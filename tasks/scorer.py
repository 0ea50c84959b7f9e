"""Scorers of programs: a script that runs in the sandbox, or a Python function.

A script imports the program as the module `candidate`, and prints one number, or one JSON object, on a line of its own.
The program runs in another sandbox: it can't read the script and its files, and can't print a score.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tot.decoders.errors import OptionError
from tot.sandbox import Sandbox
from tot.tasks.checks import ended_early, run_judge

Measured = Callable[[str], float | Mapping[str, float]]
"""A scorer in Python: it receives the program's text."""
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?)", re.IGNORECASE)
_SHOWN = 1000
"""Maximum characters of a program's output, and of its scorer's, that the model sees."""
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

    source: str | Measured
    files: Mapping[str, str] = field(default_factory=dict)
    """Files beside the script, by name."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of the numbers in a JSON object, whose weighted sum is the score. By default its "score"."""
    seconds: float = 10.0
    """Time limit of a run."""
    repeats: int | None = None
    """Runs for each program. None runs a scorer once, unless its first scores differ between two runs."""

    def __post_init__(self) -> None:
        if self.repeats is not None and self.repeats < 1:
            raise OptionError(f"repeats is {self.repeats}: score each program at least once")
        if reserved := {"plain.py", "program.py", "tests.json"} & self.files.keys():
            raise OptionError(f"a file beside the scorer is named {min(reserved)}, which the sandbox uses: rename it")
        self._noisy: bool | None = None if self.repeats is None else False
        self._known: dict[str, Scored] = {}

    @property
    def digest(self) -> str:
        """A digest of the script, its files and the weights, by which a resumed run recognizes the same scorer."""
        source = getattr(self.source, "__qualname__", "") if callable(self.source) else self.source
        about = json.dumps([source, dict(self.files), dict(self.weights)])
        return hashlib.blake2b(about.encode(), digest_size=8).hexdigest()

    def score(self, program: str) -> Scored:
        """Score a program, or return its known result."""
        if program not in self._known:
            self._known[program] = self._score(program)
        return self._known[program]

    def _score(self, program: str) -> Scored:
        runs = [self._run(program)]
        if runs[0].score is not None and self._noisy is None:
            runs.append(self._run(program))
            self._noisy = runs[1].score is not None and runs[0].score != runs[1].score
        repeats = NOISY_REPEATS if self._noisy else self.repeats or 1
        while len(runs) < repeats and runs[-1].score is not None:
            runs.append(self._run(program))
        scores = [run.score for run in runs if run.score is not None]
        if len(scores) < len(runs):
            return next(run for run in runs if run.score is None)
        margin = _margin(scores) if len(set(scores)) > 1 else 0.0
        parts = {name: fmean(run.parts[name] for run in runs if name in run.parts) for name in runs[0].parts}
        return Scored(fmean(scores), margin, parts, runs[0].text)

    def _run(self, program: str) -> Scored:
        return self._call(program) if callable(self.source) else self._run_script(self.source, program)

    def _call(self, program: str) -> Scored:
        assert callable(self.source)
        try:
            result = self.source(program)
        except Exception as error:  # the user's code may raise anything  # noqa: BLE001
            return Scored(text=f"The scorer failed: {type(error).__name__}: {error}"[:_SHOWN])
        return self._read(dict(result) if isinstance(result, Mapping) else result, "")

    def _run_script(self, source: str, program: str) -> Scored:
        sandbox = Sandbox(seconds=self.seconds)
        judge, run, lines = run_judge({**self.files, "score.py": source}, program, sandbox)
        printed = run.output.strip()[-_SHOWN:]
        if len(lines) == 1 and lines[0] is not None:  # the program can't be loaded
            return Scored(text=str(lines[0]))
        if len(lines) != 2:
            return Scored(text=f"The program can't be scored: {ended_early(judge, run, sandbox)}.")
        if (error := lines[1]["error"]) is not None:
            whose = "The program failed" if error["candidate"] else "The scorer failed on it"
            return Scored(text=f"{whose}: {error['text']}")
        read = [(line, _result(line.strip())) for line in lines[1]["printed"].splitlines()]
        results = [result for _, result in read if result is not None]
        if len(results) != 1:
            found = f"{len(results)} scores" if results else "no score"
            return Scored(text=f"The scorer printed {found}: it must print one number or one JSON object.")
        notes = "\n".join(line for line, result in read if result is None).strip()[-_SHOWN:]
        return self._read(results[0], "\n".join(filter(None, [notes, printed])))

    def _read(self, result: Any, text: str) -> Scored:
        """Return the score in a number or an object."""
        parts = {} if not isinstance(result, dict) else {k: v for k, v in result.items() if _is_number(v)}
        if isinstance(result, dict):
            missing = next((name for name in self.weights or {"score"} if name not in parts), None)
            if missing is not None:
                return Scored(text=f"The scorer's object has no number {missing!r}.")
            weights = self.weights or {"score": 1.0}
            result = math.fsum(weight * parts[name] for name, weight in weights.items())
        if not _is_number(result):
            return Scored(text=f"The scorer returned {result!r:.60}: it must return a number.")
        if not math.isfinite(result):
            return Scored(text=f"The score is {result}: it must be finite.")
        return Scored(float(result), 0.0, {name: float(value) for name, value in parts.items()}, text)


def _margin(scores: Sequence[float]) -> float:
    """Return half the width of the 95% interval of the mean (Student's t)."""
    from scipy.stats import t  # takes a second

    return float(t.ppf(0.975, len(scores) - 1)) * stdev(scores) / math.sqrt(len(scores))


def _is_number(value: Any) -> bool:
    """Return whether the value is a number that fits a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _result(line: str) -> float | dict[str, Any] | None:
    """Return the number or the JSON object in a line; None for other text."""
    if _NUMBER.fullmatch(line):
        return float(line)
    try:
        found = json.loads(line) if line.startswith("{") else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def files_beside(script: Path, others: Sequence[str]) -> dict[str, str]:
    """Return the text files beside a script by name, without the script, hidden files and `others`."""
    files = {}
    for path in sorted(script.parent.iterdir()):
        if path.is_file() and path.name not in (script.name, *others) and not path.name.startswith("."):
            try:
                files[path.name] = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
    return files
