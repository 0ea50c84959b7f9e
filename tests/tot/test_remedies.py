"""Remedies in error messages exist: flags, commands, parts and environment variables."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import typer

import tot
import tot.tasks
from benchmarks.__main__ import make_app as make_benchmarks
from tot import solve
from tot.cli.app import make_app
from tot.decoders import OptionError
from tot.registry import EVALUATORS, GENERATORS, SEARCHES, named
from tot.tasks import MultipleChoice

ROOT = Path(__file__).parents[2]
FOLDERS = ("tot", "decoders", "tasks", "benchmarks")
OTHER_PROGRAMS = {
    "--no-deps",
    "--head",
    "--address",
    "--chat-template",
    "--enable-auto-tool-choice",
    "--tool-call-parser",
}
"""Flags of pip, ray, vLLM and SGLang."""


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.name.endswith("_worker.py") and not any(parent.is_symlink() for parent in path.parents):
                yield path, ast.parse(path.read_text(encoding="utf-8"))


@cache
def messages() -> tuple[str, ...]:
    """Return the sentences in code, without docstrings; placeholders are "{}"."""
    texts = []
    for _, module in sources():
        skipped = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}
        for node in ast.walk(module):
            if isinstance(node, ast.JoinedStr):
                skipped |= {id(part) for part in node.values}
        for node in ast.walk(module):
            if id(node) in skipped:
                continue
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
                )
    return tuple(text for text in texts if " " in text)


def matches(pattern: str) -> set[Any]:
    return {found for text in messages() for found in re.findall(pattern, text)}


def commands() -> dict[str, Any]:
    """Return every command by path, such as "train cllm"."""
    by_path: dict[str, Any] = {}

    def walk(command: Any, path: str) -> None:
        by_path[path] = command
        for name, child in getattr(command, "commands", {}).items():
            walk(child, f"{path} {name}".strip())

    walk(typer.main.get_command(make_app()), "")
    walk(typer.main.get_command(make_benchmarks()), "benchmarks")
    return by_path


def test_every_flag_in_a_message_exists() -> None:
    known = {flag for command in commands().values() for option in command.params for flag in option.opts} | {"--help"}
    flags = matches(r"(?<![\w-])(--[a-z][a-z-]*[a-z])(?![\w{-])")
    assert len(flags) > 20
    assert flags - known - OTHER_PROGRAMS == set()


def test_every_command_in_a_message_exists() -> None:
    named_commands = matches(r"\btot (train [a-z]+|(?<=`tot )[a-z]+)")
    assert {"train collect"} <= named_commands
    assert named_commands - commands().keys() == set()


@pytest.mark.parametrize(
    ("kind", "known"), [("search", SEARCHES), ("generator", GENERATORS), ("evaluator", EVALUATORS)]
)
def test_every_part_in_a_message_can_be_chosen(kind: str, known: Any) -> None:
    texts = matches(rf"\b{kind}='?([a-z][a-z-]*(?::[a-z]+=[a-z0-9]+(?:\.[0-9]+)?)?)")
    assert texts
    for text in texts:
        named(text, known)


def test_every_object_in_a_message_can_be_built() -> None:
    calls = matches(r"(?<![\w.])([A-Z][a-z]\w*\([^(){}.]*\))")
    assert {"Sample(samples=8)", "Enumerate(prior='uniform')", "Heuristic()"} <= calls
    for text in calls:
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call), text
        assert isinstance(call.func, ast.Name), text
        if call.args:  # names of the reader's own objects
            continue
        made = getattr(tot, call.func.id, None) or getattr(tot.tasks, call.func.id)
        made(**{word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg})


def test_every_environment_variable_in_a_message_is_read() -> None:
    exact = {
        node.value
        for _, module in sources()
        for node in ast.walk(module)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    names = matches(r"\b(TOT_[A-Z_]+)\b")
    assert "TOT_CACHE" in names
    assert names - exact == set()


def test_a_choice_can_be_generated_as_text(scripted: Any) -> None:
    """The remedy for a decoder without choice scores."""

    class Text(MultipleChoice):
        name = "multiple_choice"
        choices: ClassVar[Any] = lambda self, state: ()

    question = "What is 1 + 1?\nA) 2\nB) 3"
    options: dict[str, Any] = {"search": "bfs:thoughts=1", "evaluator": "random", "prompts": "papers"}
    with pytest.raises(OptionError, match=r"a subclass whose `choices` returns \(\)"):
        solve(MultipleChoice, question, decoder=Says(scripted), **options)
    assert solve(Text, question, decoder=Says(scripted), **options).answer == "A"


class Says:
    """A decoder with one reply for all prompts and without choice scores."""

    def __init__(self, scripted: Any) -> None:
        self.scripted = scripted

    def generate(self, requests: Any) -> list[Any]:
        return [self.scripted.completion("The answer is A.") for one in requests for _ in range(one.sampling.n)]
