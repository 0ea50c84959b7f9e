"""Optimize a program: a scorer rates each candidate, and the search looks for the program with the best score."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import tokenize
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from io import BytesIO
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tot.decoders.errors import OptionError, TaskError, validated
from tot.decoders.files import write_text
from tot.llm.context import derive
from tot.running import in_thread
from tot.sandbox import confines, pool
from tot.task.task import Task
from tot.tasks.edits import EditError, edited, region_of, written
from tot.tasks.scorer import Scored, Scorer, files_beside
from tot.tree.thought import Observation, State, Thought

log = logging.getLogger(__name__)
_DESCRIPTION, _START, _SCORE = "task.md", "start.py", "score.py"
"""Files of a folder with a task."""
_IMPORT = re.compile(r"^\s*(?:import|from)\s+(\w+)", re.MULTILINE)
_LONG = 80
"""Lines of a program, or of its region, above which the model writes search/replace blocks."""
_HINTS = (
    "Change one number of the program, or replace it by a formula.",
    "Add a special case: an `if` for one situation in which another rule is better.",
    "Add a second criterion, with a weight.",
    "Replace a formula by a different one, such as a power, a ratio, or a step at a threshold.",
    "Think of the situation in which the program decides worst, and change its decision there alone.",
    "Replace the whole idea of the program by a better one.",
)
INSTANCES, HELD_OUT, REFERENCE = "instances.py", "held_out.py", "reference.py"
"""The scorer's instances; others that replace them, for a test of the best program; and a known program."""


def _packages(given: Any) -> Any:
    """Parse names such as "numpy+scipy". Raises ValueError for a package that is not installed."""
    names = [name for name in given.split("+") if name] if isinstance(given, str) else given
    if missing := [name for name in names if not str(name).isidentifier() or find_spec(name) is None]:
        raise ValueError(f"{missing[0]} is not installed: install it, or leave it out")
    return names


def _weights(given: Any) -> Any:
    """Parse weights such as "speed:1+size:-0.5"."""
    if not isinstance(given, str):
        return given
    pairs = [pair.partition(":") for pair in given.split("+")]
    return {name: weight or "1" for name, _, weight in pairs}


class OptimizeOptions(BaseModel):
    """Options of `Optimize`."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    folder: Path | None = None
    """A folder with score.py, and optionally start.py and task.md, the description; other files are for score.py."""
    score: Path | Callable[..., Any] | None = None
    """A script that prints a number or a JSON object, or a function of the program's text that returns one."""
    start: Path | None = None
    """The first program; None begins with an empty one."""
    best: Path | None = None
    """Write the best program so far to this file."""
    minimize: bool = False
    """Whether lower scores are better."""
    weights: Annotated[dict[str, float], BeforeValidator(_weights)] = {}
    """Weights of the numbers in the scorer's JSON object; by default its "score"."""
    seconds: float = Field(10.0, gt=0)
    """Time limit of a run of the scorer."""
    repeats: int | None = Field(None, ge=1)
    """Runs of the scorer for each program. None: once, twice for a new best program, or five times if scores differ."""
    packages: Annotated[tuple[str, ...], BeforeValidator(_packages)] = ("numpy",) if find_spec("numpy") else ()
    """Installed packages that the scorer and the programs can import."""


class Optimize(Task):
    """Input: a description of the wanted program. Output: the best program.

    A thought is an edit of the program, which is then scored. The prompt shows the program, its score, and its error or
    output. The value of a state is the score of its program, with a margin for noise; the answer is the best program on
    the path to it.
    """

    name = "optimize"
    thought = ("edit",)
    depth = 9
    search = "ab-mcts"
    evaluator = "measured"
    sampling: ClassVar[Mapping[str, Mapping[str, Any]]] = {"edit": {"max_tokens": 1024, "stop": ("\n```\n",)}}
    filters: ClassVar[Mapping[str, float]] = {"top_p": 0.95}

    def __init__(self, **options: Any) -> None:
        """Create the task; `OptimizeOptions` has the options. Raises OptionError for invalid ones."""
        super().__init__()
        chosen: OptimizeOptions = validated(OptimizeOptions, options, "task optimize")
        folder = chosen.folder
        score, start = chosen.score, chosen.start
        if folder is not None:
            score = folder / _SCORE if score is None else score
            start = folder / _START if start is None and (folder / _START).exists() else start
        if score is None:
            raise OptionError("optimize needs a scorer: give --score score.py, or a folder with score.py")
        self.options = chosen
        self._start = None if start is None else _read_text(start)
        others = [_DESCRIPTION, _START, HELD_OUT, REFERENCE, *([] if start is None else [start.name])]
        self.scorer = Scorer(
            _read(score) if isinstance(score, Path) else score,
            files_beside(score, others) if isinstance(score, Path) and folder is not None else {},
            chosen.weights,
            chosen.seconds,
            chosen.repeats,
            chosen.minimize,
            chosen.packages,
        )
        self._saved: dict[str, float] = {}
        """By question: the value of the program in the file `best`."""

    @property
    def version(self) -> str:
        """A digest of the scorer and the start."""
        return f"{self.scorer.digest} {derive(self._start or '', self.options.minimize):x}"

    def example(self) -> str:
        """Return the folder's description."""
        path = None if self.options.folder is None else self.options.folder / _DESCRIPTION
        if path is None or not path.exists():
            raise OptionError("the wanted program is not described: give a description, or a folder with task.md")
        return _read_text(path)

    def start(self, question: str) -> State:
        """Return the root state with the scored start. Raises TaskError if the start fails."""
        if not callable(self.scorer.source):
            confines()
        state = super().start(question)
        if self._start is not None:
            try:
                region_of(self._start)
            except EditError as error:
                raise TaskError(f"the start is invalid: {error}") from None
            scored = self.scorer.score(self._start)
            if scored.score is None:
                raise TaskError(f"the start can't be scored. {scored.text}")
            self._save(state)
        return state

    def variables(self, state: State) -> dict[str, Any]:
        program, scored = self._last(state)
        return {
            **super().variables(state),
            "program": program and program.rstrip("\n"),
            "partial": program is not None and region_of(program)[0] != "",
            "long": program is not None and region_of(program)[1].count("\n") > _LONG,
            "score": _shown(scored.score),
            "output": scored.text,
            "parts": {name: _shown(value) for name, value in scored.parts.items()},
            "scores": [_shown(one.score) or "failed" for _, one in self._path(state)],
            "minimize": self.options.minimize,
            "packages": [name for name in self.scorer.packages if name in _IMPORT.findall(program or "")],
        }

    def hints(self, state: State) -> Sequence[str]:
        """Return kinds of changes for a program that works: otherwise small models write the same few programs."""
        return _HINTS if self._last(state)[1].score is not None else ()

    def parse_thought(self, template: str, text: str) -> str | None:
        return text.strip("\n") or None

    async def act(self, state: State, thought: Thought) -> Observation | None:
        """Score the program after an edit. Return None if the edit can't be applied or changes nothing."""
        program, _ = self._last(state)
        try:
            program = edited(program, thought.text) if program else f"{written(thought.text)}\n"
            region_of(program)  # refuse a marker without its partner
        except EditError as error:
            log.debug("an edit was refused: %s", error)
            return None
        if callable(self.scorer.source):  # which may never return
            scored = await in_thread(partial(self.scorer.score, program), "tot-scorer")
        else:
            scored = await asyncio.get_running_loop().run_in_executor(pool(), self.scorer.score, program)
        data: Any = {"program": program, **asdict(scored)}
        return Observation(text=f"Score: {_shown(scored.score) or 'failed'}\n{scored.text}".strip(), data=data)

    def step(self, state: State, thought: Thought) -> State | None:
        """Return the state after an edit; None if it was refused."""
        if thought.observation is None or not isinstance(thought.observation.data, dict):
            return None
        after = state.then(thought)
        self._save(after)
        return after

    def key(self, state: State) -> str:
        return str(self._last(state)[0])

    def is_goal(self, state: State) -> bool:
        """No program is known to be the best one."""
        return False

    def measured(self, state: State) -> float | None:
        """Return the score at the worse end of its interval, negated if lower is better; None if the program failed."""
        refused = state.thoughts and state.thoughts[-1].observation is None
        return None if refused else self.value_of(self._last(state)[1])

    def answer_at(self, state: State) -> str | None:
        """Return the best program on the path; the first of equal ones."""
        working = [(value, program) for program, one in self._path(state) if (value := self.value_of(one)) is not None]
        return max(working, key=itemgetter(0))[1] if working else None

    def score(self, answer: str | None, reference: Any) -> float:
        """Return 1 if the program's score is at least as good as the reference, a number."""
        scored = Scored() if answer is None else self.scorer.score(answer)
        sign = -1 if self.options.minimize else 1
        return float(scored.score is not None and sign * scored.score >= sign * float(reference))

    def _path(self, state: State) -> list[tuple[str, Scored]]:
        """Return the programs on the path, with their results."""
        results: list[Any] = [one.observation.data for one in state.thoughts if one.observation is not None]
        start = [] if self._start is None else [(self._start, self.scorer.score(self._start))]
        return start + [(one["program"], Scored(**{k: v for k, v in one.items() if k != "program"})) for one in results]

    def _last(self, state: State) -> tuple[str | None, Scored]:
        """Return the state's program and its result."""
        path = self._path(state)
        return path[-1] if path else (None, Scored())

    def value_of(self, scored: Scored) -> float | None:
        """Return a score at the worse end of its interval, negated if lower is better; None if the program failed."""
        if scored.score is None:
            return None
        return (-scored.score if self.options.minimize else scored.score) - scored.margin

    def _save(self, state: State) -> None:
        """Write the state's program to the file `best` if it is the best one so far."""
        (program, scored), question = self._last(state), state.question
        value = self.value_of(scored)
        if self.options.best is None or value is None or value <= self._saved.get(question, -math.inf):
            return
        self._saved[question] = value
        try:
            write_text(self.options.best, str(program))
        except (OSError, TaskError) as error:
            log.warning("the best program can't be written: %s", error)


def held_out_of(task: Optimize, folder: Path) -> Scorer | None:
    """Return the task's scorer with other instances; None if the folder has none."""
    path, scorer = folder / HELD_OUT, task.scorer
    if not path.exists():
        return None
    return replace(scorer, files={**scorer.files, INSTANCES: path.read_bytes()}, seconds=6 * scorer.seconds)


def _shown(score: float | None) -> str:
    return "" if score is None else f"{score:.6g}"


def _read(path: Path) -> bytes:
    """Return a file's content. Raises OptionError if it can't be read."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise OptionError(f"{path} can't be read: {error}") from None
    if not content.strip():
        raise OptionError(f"{path} is empty")
    return content


def _read_text(path: Path) -> str:
    """Return a file's text, a program's in the encoding that it declares. Raises OptionError if it can't be read."""
    content = _read(path)
    try:
        python = path.name != _DESCRIPTION
        encoding = tokenize.detect_encoding(BytesIO(content).readline)[0] if python else "utf-8-sig"
        return content.decode(encoding).replace("\r\n", "\n")
    except (UnicodeDecodeError, SyntaxError) as error:
        raise OptionError(f"{path} can't be read: {error}") from None
