"""The benchmark `calls`: right tool calls of one sample and of a vote, on questions of the BFCL.

The questions are single turns in Python of the Berkeley Function Calling Leaderboard, from its package (`pip install
--no-deps bfcl-eval`), or from a folder with its files. Each side answers one question at a time, with an empty cache.
A call is right if the function is, and each argument is one of the possible answers, as in the leaderboard's AST check.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from pydantic import Field
from rich.console import Console
from rich.table import Table

from benchmarks.engines import about, forget
from benchmarks.harness import Bench, BenchOptions, Cells, Measured, timed
from tot.decoders import Function, LocalDecoder, Message, Request, Sampling, load_decoder
from tot.decoders.errors import OptionError
from tot.decoders.request import ToolCall
from tot.evaluation.estimate import estimate, paired
from tot.task.call_votes import elect

CATEGORIES = ("simple_python", "multiple", "parallel", "parallel_multiple")
ONE, FREE, GIVEN = "one answer, constrained", "one answer, free", "one answer, the template's form"
_TYPES = {"dict": "object", "float": "number", "tuple": "array"}
_BLANKS = re.compile(r"[ ,./\-_*^]")


class Options(BenchOptions):
    """Compare right tool calls of one sample, free and constrained, with a vote of samples."""

    data: Path | None = Field(None, description="The folder with the BFCL's files; by default the package's.")
    categories: tuple[str, ...] = Field(CATEGORIES, description="Comma-separated categories.")
    skip: int = Field(20, ge=0, description="First questions of each category to leave out; they choose options.")
    limit: int = Field(50, ge=1, description="Number of questions of each category after them.")
    samples: int = Field(5, ge=2, description="Samples of a vote.")
    temperature: tuple[float, ...] = Field((0.7,), description="Comma-separated temperatures of votes.")
    max_tokens: int = Field(256, ge=1, description="Maximum tokens of a text.")


class Question(NamedTuple):
    """A question with its possible answers."""

    request: Request
    right: Sequence[Mapping[str, Mapping[str, Sequence[Any]]]]


def run(asked: Options, console: Console) -> None:
    """Run the benchmark and print its table."""
    questions = [one for name in asked.categories for one in _questions(asked, name)]
    sides = {GIVEN: (0.0, 1), FREE: (0.0, 1), ONE: (0.0, 1)}
    sides |= {f"vote of {asked.samples}, T = {heat:g}": (heat, asked.samples) for heat in asked.temperature}
    with ExitStack() as stack:  # drafts come from a decoder's own earlier texts, so each side has one
        decoders: dict[str, LocalDecoder] = {
            name: stack.enter_context(load_decoder("auto", asked.model, prefix_cache=False)) for name in sides
        }
        decoders[GIVEN].calls = decoders[GIVEN].engine.codec.calls  # without a trial
        if decoders[GIVEN].calls == decoders[ONE].calls:
            del sides[GIVEN]
        bench = Bench(asked, console, f"{asked.model}; {about(decoders[ONE].engine)}")
        cells = bench.compare(
            f"{asked.limit} questions of {', '.join(asked.categories)}",
            {name: partial(_answered, decoders[name], name == FREE, *way) for name, way in sides.items()},
            questions,
            partial(_table, questions),
        )
        bench.show(_by_category(asked, questions, cells))


def _questions(asked: Options, category: str) -> list[Question]:
    """Return the questions of a category. Raises OptionError if a file is missing."""
    folder = asked.data
    if folder is None:
        package = find_spec("bfcl_eval")
        if package is None or package.origin is None:
            raise OptionError("there are no questions: run pip install --no-deps bfcl-eval, or give --data FOLDER")
        folder = Path(package.origin).parent / "data"
    rows, answers = (
        _rows(folder / part / f"BFCL_v4_{category}.json", asked.skip, asked.limit) for part in ("", "possible_answer")
    )
    return [_question(row, answer["ground_truth"], asked.max_tokens) for row, answer in zip(rows, answers, strict=True)]


def _rows(file: Path, skip: int, limit: int) -> list[Any]:
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise OptionError(f"cannot read {file} ({error.strerror}): give --data with the files of bfcl-eval") from None
    return [json.loads(line) for line in lines[skip : skip + limit]]


def _question(row: Any, right: Any, max_tokens: int) -> Question:
    tools = [
        Function(name=_name(one["name"]), description=one["description"], parameters=_schema(one["parameters"]))
        for one in row["function"]
    ]
    (turn,) = row["question"]
    request = Request(
        prompt=tuple(Message(role=message["role"], content=message["content"]) for message in turn),
        tools=tuple(tools),
        tool_choice="required",
        sampling=Sampling(max_tokens=max_tokens),
    )
    return Question(request, [{_name(name): possible for name, possible in call.items()} for call in right])


def _name(name: str) -> str:
    return name.replace(".", "_")


def _schema(given: Any) -> Any:
    """Return a schema of the BFCL with the names of types in JSON schemas."""
    if isinstance(given, list):
        return [_schema(one) for one in given]
    if not isinstance(given, dict):
        return given
    schema = {name: _schema(value) for name, value in given.items() if name not in ("optional", "default")}
    if isinstance(kind := schema.get("type"), str):
        schema["type"] = _TYPES.get(kind, kind)
        if kind == "any":
            del schema["type"]
    return schema


def _answered(decoder: LocalDecoder, free: bool, temperature: float, n: int, question: Question) -> Measured:
    sampling = question.request.sampling.model_copy(update={"temperature": temperature, "n": n})
    request = question.request.model_copy(update={"sampling": sampling})
    sent = request
    form = decoder.calls
    if free:  # the same prompt without the mask
        codec = decoder.engine.codec
        sent = Request(prompt=tuple(codec.encode_prompt(request.prompt, codec.options_of(request))), sampling=sampling)
    forget(decoder)
    seconds, texts = timed(lambda: decoder.generate([sent]))
    return {
        "seconds": seconds,
        "tokens": sum(text.usage.new_tokens for text in texts),
        "calls": [[(call.name, call.arguments) for call in form.parse(text.text)[1]] for text in texts],
        "logprobs": [text.logprob for text in texts],
        "cut": sum(text.finish_reason != "eos" for text in texts),
    }


def is_right(calls: Sequence[tuple[str, str]], question: Question) -> bool:
    """Return whether each call is one of the possible calls, in any order."""
    parsed = _parsed(calls, question)
    left = list(question.right)
    for name, arguments in parsed or []:
        fits = [right for right in left if name in right and _fits(arguments, right[name], question, name)]
        if not fits:
            return False
        left.remove(fits[0])
    return parsed is not None and not left


def _parsed(calls: Sequence[tuple[str, str]], question: Question) -> list[tuple[str, dict[str, Any]]] | None:
    """Return calls with their arguments; None without a call, or if one can't be parsed."""
    known = {tool.name for tool in question.request.tools}
    try:
        parsed = [(name, json.loads(arguments)) for name, arguments in calls]
    except ValueError:
        return None
    valid = bool(parsed) and all(name in known and isinstance(arguments, dict) for name, arguments in parsed)
    return parsed if valid else None


def _fits(arguments: dict[str, Any], possible: Mapping[str, Sequence[Any]], question: Question, name: str) -> bool:
    (parameters,) = (dict[str, Any](tool.parameters) for tool in question.request.tools if tool.name == name)
    required, types = parameters.get("required", []), parameters["properties"]
    wrong: dict[Any, Any] = {"integer": (float, str), "number": str, "boolean": str, "array": str, "object": str}
    if not (set(required) <= arguments.keys() <= possible.keys() & types.keys()):
        return False
    if any("" not in values for name, values in possible.items() if name not in arguments):
        return False
    return all(
        not isinstance(value, wrong.get(types[name].get("type"), ()))
        and any(_same(value, one) for one in possible[name])
        for name, value in arguments.items()
    )


def _same(value: Any, right: Any) -> bool:
    """Return whether a value is a possible one: of objects, each property has a list of possible values."""
    if isinstance(value, dict):
        return (
            isinstance(right, dict)
            and value.keys() <= right.keys()
            and all("" in values for name, values in right.items() if name not in value)
            and all(any(_same(one, other) for other in right[name]) for name, one in value.items())
        )
    if isinstance(value, list):
        pairs = zip(value, right, strict=False) if isinstance(right, list) and len(right) == len(value) else [(0, 1)]
        return all(_same(one, other) for one, other in pairs)
    if isinstance(value, str):
        return isinstance(right, str) and _plain(value) == _plain(right)
    return isinstance(value, bool) == isinstance(right, bool) and bool(value == right)


def _plain(text: str) -> str:
    return _BLANKS.sub("", text).lower().replace("'", '"')


def _table(questions: Sequence[Question], cells: Cells) -> Table:
    """Build a table of the sides; differences are paired with one constrained call, seconds with the same question."""
    heads = ("parsed", "right", "minus one call", "any sample right", "seconds", "of one call's seconds", "new tokens")
    table = Table("", *heads, title=f"n = {len(cells.of(ONE))}")
    base = _scores(questions, cells, ONE)
    for side in cells.sides:
        own, right = cells.of(side), _scores(questions, cells, side)
        shared = sorted(right.keys() & base.keys())
        less = paired([right[turn] - base[turn] for turn in shared])
        ratios = [own[turn]["seconds"] / cells.of(ONE)[turn]["seconds"] for turn in shared]
        samples = [(turn, calls) for turn, cell in own.items() for calls in cell["calls"]]
        anyone = [any(is_right(calls, questions[turn]) for calls in cell["calls"]) for turn, cell in own.items()]
        table.add_row(
            side,
            f"{fmean(_parsed(calls, questions[turn]) is not None for turn, calls in samples):.1%}",
            estimate([*right.values()]).format(".1%"),
            "" if side == ONE else less.format("+.1%"),
            f"{fmean(anyone):.1%}",
            f"{fmean(cell['seconds'] for cell in own.values()):.2f}",
            "" if side == ONE else f"{median(ratios):.2f}x",
            f"{fmean(cell['tokens'] for cell in own.values()):.0f}",
        )
    return table


def _by_category(asked: Options, questions: Sequence[Question], cells: Cells) -> Table:
    table = Table("right", *asked.categories)
    for side in cells.sides:
        scores = _scores(questions, cells, side)
        places = (range(i * asked.limit, (i + 1) * asked.limit) for i in range(len(asked.categories)))
        found = ([scores[turn] for turn in place if turn in scores] for place in places)
        table.add_row(side, *(f"{fmean(one):.0%}" if one else "" for one in found))
    return table


def _scores(questions: Sequence[Question], cells: Cells, side: str) -> dict[int, float]:
    """Return by question whether the side's answer is right: the elected one of its samples with calls."""
    scores = {}
    for turn, cell in cells.of(side).items():
        samples = [calls for calls in cell["calls"] if _parsed(calls, questions[turn]) is not None]
        answers = [tuple(ToolCall(name=name, arguments=text) for name, text in calls) for calls in samples]
        chosen = elect(answers, [1.0] * len(answers))[1] if answers else None
        scores[turn] = float(chosen is not None and is_right(samples[chosen], questions[turn]))
    return scores
