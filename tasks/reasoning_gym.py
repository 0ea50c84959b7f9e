"""Reasoning Gym: generated questions of more than 100 kinds, with verifiers (Stojanovski et al., 2025).

The package `reasoning-gym` generates the questions and verifies the answers: `tot eval reasoning-gym:countdown`. A
question is the first one of a data set for a seed. Seeds below 1,000 are for choosing prompts and options, the others
for results.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Hashable, Mapping, Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from tot.decoders.errors import OptionError, TaskError, unknown
from tot.sandbox import ProgramResult, Sandbox
from tot.tasks.formulas import boxed
from tot.tasks.number_answers import value_of
from tot.tasks.printed import PrintedAnswers

ALL = "all"
_ANNOUNCED = re.compile(r"(?i)\banswer(?:[ \t]+is)?[ \t*]*:[ \t*]*|\banswer is[ \t*]+")
_SAID = re.compile(r"\b(?:is|are)[ \t]+(?:equal to[ \t]+)?(\S.*)")
_WHOLE = re.compile(r"-?\d+\.0")
_FENCED = re.compile(r"(?s)\A```\w*\n(.*?)\n?```\Z")
_BOXED = re.compile(r"(?s)\\boxed\{(.*?)\}\$?\.?\Z")
_CHUNK = 50
"""Number of questions that are generated together: the library loads slowly."""
_LIMIT = 10
"""Seconds for a question or an answer."""
_PROGRAM = """
import json, reasoning_gym, signal

def late(*_):
    raise TimeoutError("it took more than LIMIT seconds")

signal.signal(signal.SIGALRM, late)
with open("asked.json", encoding="utf-8") as file:
    mark, asked = json.load(file)
for name, settings, answer in asked:
    signal.alarm(LIMIT)
    try:
        data = reasoning_gym.create_dataset(name, **settings)
        entry = data[0]
        found = [entry["question"], entry["answer"]] if answer is None else float(data.score_answer(answer, entry))
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    signal.alarm(0)
    print("\\n" + mark + json.dumps(found), flush=True)
""".replace("LIMIT", str(_LIMIT))
"""Generates questions and verifies answers in the sandbox, whose programs have one order of sets: some generators
depend on it, and some verifiers evaluate answers as formulas."""


class ReasoningGym(PrintedAnswers):
    """Input: a question of a data set. Output: the answer, as text in the form that the question asks for.

    `dataset` is a name in the library, or "all" for all of them in turn; its settings are further options:
    `reasoning-gym:countdown,max_numbers=4`. Score: the one of the library's verifier, from 0 to 1; no search uses it.
    """

    name = "reasoning_gym"
    variants = "dataset"
    data_set = "instances:1000-1039"
    thought = ("step",)
    depth = 16
    generator = "continue"
    evaluator = "logprob"
    labels: ClassVar[Mapping[str, float]] = {"Yes": 1.0, "No": 0.0}
    scale = (0, 1)
    filters: ClassVar[Mapping[str, float]] = {"top_p": 0.8, "top_k": 20}
    sampling: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        **{template: {"max_tokens": 256} for template in ("step", "chain", "answer")},
        "program": {"max_tokens": 256, "stop": ("\n```",)},
        "propose": {"max_tokens": 256},
    }

    def __init__(self, dataset: str = ALL, **settings: Any) -> None:
        super().__init__()
        if dataset != ALL and dataset not in datasets():
            raise OptionError(unknown("data set of reasoning-gym", dataset, {ALL, *datasets()}))
        if dataset == ALL and settings:
            raise OptionError(f"reasoning-gym:{ALL} has no settings: leave {', '.join(settings)} out")
        self.dataset = dataset
        self._settings = json.dumps({name: _value(value) for name, value in settings.items()}, sort_keys=True)

    def example(self) -> str:
        return str(self.instance(0)["question"])

    def instance(self, seed: int) -> dict[str, Any]:
        """Return the question of a seed, with an answer and its data set. Raises TaskError if the library fails."""
        first = seed - seed % _CHUNK
        name = datasets()[seed % len(datasets())] if self.dataset == ALL else self.dataset
        found = _generated(self.dataset, self._settings, first)[seed - first]
        if not isinstance(found, list):
            why = "it took too long" if found is None else found["error"]
            raise TaskError(f"reasoning-gym:{name} gave no question for the seed {seed}: {why}")
        return {"question": found[0], "answer": found[1], "dataset": name, "seed": seed}

    def reference_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the data set, the seed and an answer, from which the verifier has its facts."""
        return {"dataset": row["dataset"], "seed": row["seed"], "answer": row["answer"]}

    def parse_answer(self, text: str) -> str | None:
        """Return the text after the last "Answer:"; without one, the last box, or the end of the last line."""
        if found := [match.end() for match in _ANNOUNCED.finditer(text)]:
            return tidy(text[found[-1] :])
        if (box := boxed(text)) is not None:
            return tidy(box)
        line = text.strip().rpartition("\n")[2]
        said = list(_SAID.finditer(line))
        return tidy(said[-1][1] if said else line)

    def parse_truncated(self, text: str) -> str | None:
        """Return None: the text after "Answer:" may be incomplete."""
        return None

    def parse_output(self, output: str) -> str | None:
        found = _ANNOUNCED.match(output)
        answer = tidy(output[found.end() :] if found else output)
        return answer.removesuffix(".0") if answer and _WHOLE.fullmatch(answer) else answer

    def canonical(self, answer: Any) -> Hashable:
        text = " ".join(str(answer).replace('"', "'").split())
        value = value_of(text)
        return text if value is None else value

    def score(self, answer: str | None, reference: Mapping[str, Any]) -> float:
        """Return the verifier's score of an answer; 0 if it raises or takes more than 10 seconds."""
        return self.scores([(answer, reference)])[0]

    def scores(self, answers: Sequence[tuple[str | None, Mapping[str, Any]]]) -> list[float]:
        """Return the scores of answers with their references, verified together: the library loads slowly."""
        given: dict[int, tuple[str, dict[str, Any], str]] = {
            i: (reference["dataset"], {**json.loads(self._settings), "seed": reference["seed"], "size": 1}, answer)
            for i, (answer, reference) in enumerate(answers)
            if answer is not None
        }
        scores = [0.0] * len(answers)
        for i, score in zip(given, _run(list(given.values())), strict=True):
            scores[i] = min(max(score, 0.0), 1.0) if isinstance(score, float) and score == score else 0.0
        return scores


def _run(asked: Sequence[tuple[str, dict[str, Any], str | None]]) -> list[Any]:
    """Return the result of the program for each of `asked`; None for one that took too long or ended the program."""
    results: list[Any] = []
    while len(results) < len(asked):
        mark = secrets.token_hex(8)
        run = _sandbox().run(_PROGRAM, {"asked.json": json.dumps((mark, asked[len(results) :]))})
        found = [line.removeprefix(mark) for line in run.output.splitlines() if line.startswith(mark)]
        if not found and re.search("ImportError|ModuleNotFoundError", run.error):
            raise _unloaded(run)
        results += map(json.loads, found)
        if not found:
            results.append(None)
    return results


@lru_cache(maxsize=256)
def _generated(dataset: str, settings: str, first: int) -> list[Any]:
    """Return questions with their answers for the seeds from `first` on."""
    names = [dataset] if dataset != ALL else datasets()
    return _run(
        [
            (names[seed % len(names)], {**json.loads(settings), "seed": seed, "size": 1}, None)
            for seed in range(first, first + _CHUNK)
        ]
    )


@cache
def datasets() -> Sequence[str]:
    """Return the names of the data sets, in order. Raises OptionError if the library can't be loaded."""
    run = _sandbox().run("import reasoning_gym.factory\nprint(*sorted(reasoning_gym.factory.DATASETS))")
    if not run.ok:
        raise _unloaded(run)
    return [name for name in run.output.splitlines()[-1].split() if name != "composite"]  # it consists of others


def _unloaded(run: ProgramResult) -> OptionError:
    why = (run.error.strip().splitlines() or [run.ended])[-1]
    return OptionError(f"reasoning-gym can't be loaded ({why}): install it again, pip install 'tot[reasoning-gym]'")


def tidy(text: str) -> str | None:
    """Return an answer without Markdown, boxes, quotation marks and the full stop around it; None if it is empty."""
    text = text.strip().strip("*").strip()
    for pattern in (_FENCED, _BOXED):
        if match := pattern.search(text):
            text = match[1].strip()
    text = text.strip("$`").strip()
    if "\n" not in text and text.endswith(".") and not text.endswith(".."):
        text = text[:-1]
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" and text.count(text[0]) == 2:
        text = text[1:-1]
    return text.strip() or None


def _value(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text


@cache
def _sandbox() -> Sandbox:
    """Return a sandbox in which programs can import all installed packages. Raises OptionError without the library."""
    spec = find_spec("reasoning_gym")
    if spec is None or spec.origin is None:
        raise OptionError("reasoning-gym is not installed: pip install 'tot[reasoning-gym]'")
    return Sandbox(seconds=120, memory=4096, output=1024, folders=(str(Path(spec.origin).parent.parent),))
