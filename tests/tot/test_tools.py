"""Tools: parsing of calls, their results, and a search whose model calls them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tot import Task, solve
from tot.decoders.errors import OptionError
from tot.generators import tool_calls as tools_module
from tot.generators.tool_calls import Tool, run_call, tools_prompt
from tot.tasks.arithmetic import calculator
from tot.tree.thought import Observation

CALLED: list[tuple[Any, ...]] = []


def power(base: float, exponent: int = 2) -> float:
    """A number so often times itself.

    >>> power(2.0, 3)
    8.0
    """
    CALLED.append((base, exponent))
    return base**exponent


def shout(words: list[str]) -> str:
    return " ".join(words).upper()


TOOLS = [Tool(power), Tool(shout), Tool(calculator)]


@pytest.fixture(autouse=True)
def _called() -> None:
    CALLED.clear()


def result(line: str, *functions: Any) -> str:
    return asyncio.run(run_call(line, [Tool(one) for one in functions] or TOOLS)).text


# -- calls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("power(3.0)", "9.0"),
        ("power(2, 3)", "8.0"),
        (" power( base = 2.0, exponent=4 ) ", "16.0"),
        ("power(-2.0, exponent=3)  # a comment", "-8.0"),
        ('shout(["a", "b"])', "A B"),
        ('calculator("3 * (4 + 1.5)")', "16.5"),
        ('calculator("24 * 17 + 1250")', "1658"),
        ('calculator("1/3")', "0.3333333333"),
        ('calculator("0.17 * 2,450")', "416.5"),
        ('calculator("17% of 2,450")', "416.5"),
        ('calculator("(1,000 + 1) * 10%")', "100.1"),
        ('calculator("1 / 30000000000")', "3.3333333333e-11"),
        ('calculator("-100000000000000001 / 2")', "-50000000000000000.5"),
    ],
)
def test_a_call_gives_its_result(line: str, expected: str) -> None:
    assert result(line) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", "SyntaxError: that is no call of power, shout, calculator"),
        ("power(", "SyntaxError: that is no call"),
        ("power", "SyntaxError: that is no call"),
        ("power(2.0) + 1", "SyntaxError: that is no call"),
        ("x = power(2.0)", "SyntaxError: that is no call"),
        ("power(2.0); power(3.0)", "SyntaxError: that is no call"),
        ("[power(2.0)]", "SyntaxError: that is no call"),
        ("power.__globals__(1)", "SyntaxError: that is no call"),
        ("(lambda: 1)()", "SyntaxError: that is no call"),
        ("(" * 9000, "SyntaxError: that is no call"),
        ("power(\x00)", "SyntaxError: that is no call"),
        ("powr(2.0)", "NameError: there is no powr, but power, shout, calculator"),
        ("__import__('os')", "NameError: there is no __import__"),
        ("eval('1')", "NameError: there is no eval"),
        ("power(power(2.0))", "ValueError: write the arguments out, as numbers and texts"),
        ("power(__import__('os').getpid())", "ValueError: write the arguments out"),
        ("power(*[2.0])", "ValueError: write the arguments out"),
        ("power(**{'base': 2.0})", "ValueError: write the arguments out"),
        ("power()", "TypeError: missing a required argument: 'base'"),
        ("power(1.0, 2, 3)", "TypeError: too many positional arguments"),
        ("power(1.0, times=3)", "TypeError: got an unexpected keyword argument 'times'"),
        ("power('2')", "power: 0 = '2': Input should be a valid number"),
        ("power(2.0, 1.5)", "power: 1 = 1.5: Input should be a valid integer"),
        ("power(2.0, exponent=True)", "power: exponent = True: Input should be a valid integer"),
        ("shout('ab')", "shout: 0 = 'ab': Input should be a valid list"),
        ("power(0.0, -1)", "ZeroDivisionError: "),
        ('calculator("7 % 3")', "ValueError: '7 % 3' can't be worked out"),
        ('calculator("two and two")', "ValueError: 'two and two' can't be worked out"),
    ],
)
def test_an_invalid_call_gives_an_error_message(line: str, expected: str) -> None:
    assert result(line).startswith(expected)
    assert CALLED in ([], [(0.0, -1)])


def test_a_hanging_tool_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    over, ended = threading.Event(), []

    def wait() -> None:
        over.wait(60)
        ended.append("wait")

    async def rest() -> None:
        await asyncio.sleep(60)
        ended.append("rest")

    monkeypatch.setattr(tools_module, "_TIMEOUT", 0.2)
    assert result("wait()", wait) == "wait did not answer within 0.2 s"
    assert result("rest()", rest) == "rest did not answer within 0.2 s"
    assert ended == []
    over.set()


def test_a_long_result_is_truncated_and_marked() -> None:
    def lots() -> str:
        return "x" * 10_000_000

    assert result("lots()", lots) == "x" * 1000 + "… (cut: 10000000 characters)"


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x, "is not a named function"),
        ("power", "is not a named function"),
        (7, "is not a named function"),
        (print, r"takes any arguments \(\*args\): name each|cannot read the type hints"),
    ],
)
def test_an_invalid_tool_is_rejected(function: Any, expected: str) -> None:
    with pytest.raises(OptionError, match=expected):
        Tool(function)


def test_arguments_without_types_are_rejected() -> None:
    def area(radius, pi: float = 3.14):  # type: ignore[no-untyped-def]
        return pi * radius**2

    with pytest.raises(OptionError, match="tool area has no type for 'radius': write, for example, radius: str"):
        Tool(area)

    def later(x: Unknown) -> None:  # type: ignore[name-defined]  # noqa: F821
        pass

    with pytest.raises(OptionError, match=r"cannot read the type hints of tool later .*Unknown"):
        Tool(later)


def test_the_description_has_signatures_and_examples() -> None:
    text = tools_prompt(TOOLS)
    assert "power(base: 'float', exponent: 'int' = 2)" in text
    assert ">>> power(2.0, 3)\n    8.0" in text
    assert "shout(words" in text


# -- a search with tools ----------------------------------------------------------------------------------------


class Sums(Task):
    """The answer is the end of the message."""

    templates: ClassVar = {
        "step": "{% block user %}{{ question }}{% endblock %}\n{% block assistant %}"
        "{% for one in thoughts %}{{ one.step }}{% endfor %}{{ step | default('') }}{% endblock %}",
        "answer": "{{ question }}",
    }
    thought = ("step",)
    depth = 6

    def is_answered(self, message: str) -> bool:
        return message.endswith("!")

    def parse_answer(self, text: str) -> str | None:
        return text.split()[-1].rstrip("!") if text.endswith("!") else None


ASKED = "q\n\n" + tools_prompt([Tool(power)])
SCRIPT = {
    ASKED: "I square it.\n>>> ",
    "I square it.\n>>> ": "power(3.0)\n",
    "I square it.\n>>> power(3.0)\n9.0\n": "So it is 9!",
}


def run(decoder: Any, task: type[Task] = Sums, **options: Any) -> Any:
    for prompt, text in decoder.replies.items():
        if isinstance(text, str) and not text.endswith("!"):
            decoder.replies[prompt] = decoder.completion(text, "stop")
    options = {"search": "bfs:thoughts=1,breadth=1", "evaluator": "random", "tools": [power], **options}
    return solve(task, "q", decoder=decoder, **options)


def test_a_result_is_inserted_after_its_call_and_the_message_continues(scripted: Any) -> None:
    decoder = scripted(SCRIPT)
    solution = run(decoder)
    assert decoder.prompts == [[prompt] for prompt in SCRIPT]
    assert CALLED == [(3.0, 2)]
    assert solution.answer == "9"
    first, second = [node.thought for node in solution.tree if node.thought is not None]
    assert first.parts == {"step": "I square it.\n>>> power(3.0)\n9.0\n"}
    assert first.observation == Observation(text="9.0")
    assert second.observation is None
    assert second.ended


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"search": "cot"}, "ChainOfThought decodes whole solutions at once and does not support tools: choose bfs"),
        ({"search": "self-consistency"}, "SelfConsistency decodes whole solutions at once"),
        ({"search": "refine"}, "Refine decodes whole solutions at once"),
        ({"generator": "sample"}, "generator Sample does not support tools: use generator='continue'"),
        ({"tools": ["calculater"]}, r"unknown tool 'calculater' \(did you mean calculator\?\)"),
        ({"tools": [len]}, "tool len has no type|can't be read"),
    ],
)
def test_options_that_conflict_with_tools_are_rejected_before_loading(options: Any, expected: str) -> None:
    with pytest.raises(OptionError, match=expected):
        solve(Sums, "q", model="no such model", **{"tools": [power], **options})


def test_the_command_line_accepts_tools_by_name_and_from_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tot.cli.app import main

    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def bare(x):\n    return x\n")
    assert main(["solve", "gsm8k", "--tool", "mine.py:bare", "q"]) == 2
    assert "tool bare has no type for 'x'" in capsys.readouterr().err
    assert main(["solve", "gsm8k", "--tool", "calculater", "q"]) == 2
    assert "unknown tool 'calculater' (did you mean calculator?)" in capsys.readouterr().err
