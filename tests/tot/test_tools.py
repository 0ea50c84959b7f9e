"""Tools: the schemas and the results of functions."""

from __future__ import annotations

import asyncio
import threading
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import AfterValidator, BaseModel, Field

from tot import Tool
from tot.decoders import Function
from tot.decoders.errors import OptionError
from tot.generators import tool_calls
from tot.tasks.arithmetic import calculator

CALLED: list[tuple[Any, ...]] = []


class Place(BaseModel):
    name: str
    days: list[int] = []


def power(base: float, exponent: int = 2) -> float:
    """A number so often times itself.

    >>> power(2.0, 3)
    8.0
    """
    CALLED.append((base, exponent))
    return base**exponent


def visit(place: Place, when: date, *, price: Annotated[Decimal, Field(ge=0)] = Decimal(1)) -> str:
    return f"{place.name} {place.days} {when:%Y} {price}"


def known(city: str) -> str:
    if city not in ("Rome", "Oslo"):
        raise ValueError(f"there is no city {city}")
    return city


def weather(city: Annotated[str, AfterValidator(known)]) -> str:
    return "sunny"


@pytest.fixture(autouse=True)
def _called() -> None:
    CALLED.clear()


def result(arguments: str, function: Any = power) -> str:
    tool = Tool(function)
    return asyncio.run(tool.call(tool.check(arguments)))


# -- calls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (power, '{"base": 3.0}', "9.0"),
        (power, '{"exponent": 3, "base": 2}', "8.0"),
        (visit, '{"place": {"name": "Rome", "days": [1]}, "when": "2026-01-31"}', "Rome [1] 2026 1"),
        (visit, '{"place": {"name": "Rome"}, "when": "2026-01-31", "price": "0.10"}', "Rome [] 2026 0.10"),
        (weather, '{"city": "Rome"}', "sunny"),
        (calculator, '{"expression": "3 * (4 + 1.5)"}', "16.5"),
        (calculator, '{"expression": "24 * 17 + 1250"}', "1658"),
        (calculator, '{"expression": "1/3"}', "0.3333333333"),
        (calculator, '{"expression": "0.17 * 2,450"}', "416.5"),
        (calculator, '{"expression": "17% of 2,450"}', "416.5"),
        (calculator, '{"expression": "(1,000 + 1) * 10%"}', "100.1"),
        (calculator, '{"expression": "1 / 30000000000"}', "3.3333333333e-11"),
        (calculator, '{"expression": "-100000000000000001 / 2"}', "-50000000000000000.5"),
    ],
)
def test_a_call_gives_its_result(function: Any, arguments: str, expected: str) -> None:
    assert result(arguments, function) == expected


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (power, "", "power:  = '': Invalid JSON"),
        (power, "[2.0]", "power:  = .*Input should be an object"),
        (power, '{"base": 2.0', "power:  = .*Invalid JSON: EOF"),
        (power, "{}", "power: base = .*Field required"),
        (power, '{"base": 1.0, "times": 3}', "power: times = 3: Extra inputs are not permitted"),
        (power, '{"base": "2"}', "power: base = '2': Input should be a valid number"),
        (power, '{"base": 2.0, "exponent": 1.5}', "power: exponent = 1.5: Input should be a valid integer"),
        (power, '{"base": 2.0, "exponent": true}', "power: exponent = True: Input should be a valid integer"),
        (power, f'{{"base": 2.0, "exponent": {"9" * 9999}}}', "power: .*"),
        (power, "[" * 9999, "power: .*Invalid JSON: recursion limit"),
        (
            visit,
            '{"place": {"name": 1}, "when": "2026-01-31"}',
            "visit: place.name = 1: Input should be",
        ),
        (weather, '{"city": "Paris"}', "weather: city = 'Paris': there is no city Paris"),
    ],
)
def test_arguments_that_do_not_match_are_refused(function: Any, arguments: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        result(arguments, function)
    assert not CALLED


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (power, '{"base": 0.0, "exponent": -1}', "ZeroDivisionError: "),
        (calculator, '{"expression": "7 % 3"}', "ValueError: '7 % 3' can't be worked out"),
        (calculator, '{"expression": "two and two"}', "ValueError: 'two and two' can't be worked out"),
    ],
)
def test_an_exception_is_the_result(function: Any, arguments: str, expected: str) -> None:
    assert result(arguments, function).startswith(expected)


def test_a_hanging_tool_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    over, ended = threading.Event(), []

    def wait() -> None:
        over.wait(60)
        ended.append("wait")

    async def rest() -> None:
        await asyncio.sleep(60)
        ended.append("rest")

    monkeypatch.setattr(tool_calls, "_TIMEOUT", 0.2)
    assert result("{}", wait) == "wait did not answer within 0.2 s"
    assert result("{}", rest) == "rest did not answer within 0.2 s"
    assert ended == []
    over.set()


def test_a_long_result_is_truncated_and_marked() -> None:
    def lots() -> str:
        return "x" * 10_000_000

    assert result("{}", lots) == "x" * 1000 + "… (cut: 10000000 characters)"


def test_a_result_need_not_be_text_and_an_exit_is_an_error() -> None:
    def pair() -> Any:
        return {"a": [1, None]}

    def leave() -> None:
        raise SystemExit(3)

    async def leave_later() -> None:
        raise SystemExit(3)

    assert result("{}", pair) == "{'a': [1, None]}"
    assert result("{}", leave) == result("{}", leave_later) == "RuntimeError: SystemExit(3)"


# -- descriptions -----------------------------------------------------------------------------------------------


def test_the_description_has_types_defaults_and_examples() -> None:
    about = Tool(power).about
    assert (about.name, about.parameters["required"]) == ("power", ["base"])
    assert ">>> power(2.0, 3)\n8.0" in about.description
    properties: Any = about.parameters["properties"]
    assert properties["exponent"] == {"default": 2, "title": "Exponent", "type": "integer"}
    place: Any = Tool(visit).about.parameters
    assert place["properties"]["place"] == {"$ref": "#/$defs/Place"}
    assert place["$defs"]["Place"]["properties"]["days"]["items"] == {"type": "integer"}
    assert place["properties"]["price"]["default"] == "1"


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x, "is not a named function"),
        ("power", "is not a named function"),
        (7, "is not a named function"),
        (print, r"takes \*args without a name|cannot read the type hints"),
    ],
)
def test_an_invalid_tool_is_rejected(function: Any, expected: str) -> None:
    with pytest.raises(OptionError, match=expected):
        Tool(function)


def test_arguments_without_types_and_names_that_no_model_can_write_are_rejected() -> None:
    def area(radius, pi: float = 3.14):  # type: ignore[no-untyped-def]
        return pi * radius**2

    def later(x: Unknown) -> None:  # type: ignore[name-defined]  # noqa: F821
        pass

    def first(x: int, /) -> None:
        pass

    def call(function: threading.Event) -> None:
        pass

    def größe() -> None:
        pass

    def auto() -> None:
        pass

    for function, expected in (
        (area, "tool area has no type for 'radius': write, for example, radius: str"),
        (later, r"cannot read the type hints of tool later .*Unknown"),
        (first, "tool first takes x without a name: name each argument"),
        (call, "cannot read the type hints of tool call"),
        (größe, "tool größe: name = 'größe': String should match pattern"),
        (auto, "a function is named 'auto', which is a value of tool_choice: rename it"),
    ):
        with pytest.raises(OptionError, match=expected):
            Tool(function)


def test_only_functions_can_be_executed() -> None:
    assert [Tool(power).readonly, Tool(power, readonly=False).readonly] == [True, False]
    about = Function(name="f")
    assert (Tool(about).readonly, Tool(about).about) == (False, about)


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
