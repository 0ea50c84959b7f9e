"""Options of a search: one model, shared by Python and the command line."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import typer
from pydantic import BaseModel, Field, ValidationError

from tot import Budget, EngineOptions, Model, evaluate, load_task, solve
from tot.api import SolveOptions
from tot.cli.flags import is_given, takes
from tot.config import SearchConfig
from tot.decoders import OptionError
from tot.llm.models import Models


class Base(BaseModel):
    """Options of several commands."""

    names: list[str] = Field([], description="Some.")


class Few(Base):
    """Options of the command under test."""

    place: str = Field(description="Has to be somewhere.")
    hidden: int = 1
    size: int | None = Field(None, ge=2, description="How large.")


@pytest.fixture
def called() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def command(called: list[dict[str, Any]]) -> Any:
    """A command called as main() calls commands: command(["--size", "3"])."""
    app = typer.Typer(rich_markup_mode=None)

    @app.command()
    @takes(Few)
    def run(context: typer.Context, *, first: str = "x", given: dict[str, Any], last: int = 0) -> None:
        called.append({"first": first, "given": given, "last": last, "last_given": is_given(context, "last")})

    cli = typer.main.get_command(app)
    return lambda arguments: cli.main(args=arguments, prog_name="run", standalone_mode=False)


def test_a_command_receives_the_given_options(command: Any, called: list[dict[str, Any]]) -> None:
    command(["--size", "3", "--names", "a", "--names", "b", "--last", "7"])
    command([])
    assert called == [
        {"first": "x", "given": {"size": 3, "names": ["a", "b"]}, "last": 7, "last_given": True},
        {"first": "x", "given": {}, "last": 0, "last_given": False},
    ]


def test_the_limits_of_the_model_apply_to_the_command(command: Any, called: list[dict[str, Any]]) -> None:
    with pytest.raises(typer.TyperException, match=r"1 is not in the range x>=2|greater than or equal to 2"):
        command(["--size", "1"])
    with pytest.raises(typer.TyperException, match="No such option"):
        command(["--hidden", "1"])
    assert called == []


def test_help_lists_a_models_own_options_first_without_undefined_defaults(command: Any, capsys: Any) -> None:
    command(["--help"])
    out = capsys.readouterr().out
    assert re.findall(r"^\W*(--(?:place|size|names))\b", out, re.MULTILINE) == ["--place", "--size", "--names"]
    assert "Undefined" not in out


def test_texts_become_parts_and_options() -> None:
    config = SearchConfig.of(
        None,
        {"model": "none", "decoder": "generate=seed, evaluate=ar", "decoder_option": ["k=4"], "dtype": "fp32",
         "budget_tokens": 9, "temperature": 0.5, "tool": "calculator"},
    )  # fmt: skip
    parts = SearchConfig.of(config, {"tools": ()}).parts(load_task("gsm8k").with_prompts("papers"))
    assert parts["generator"].temperature == 0.5
    exact = EngineOptions(dtype="fp32")
    assert config.model.by_purpose == {
        "generate": Model(None, decoder="seed", options={"k": "4"}, engine=exact),
        "evaluate": Model(None, decoder="ar", engine=exact),
        "answer": Model(None, engine=exact),
    }
    assert (config.budget, config.tools) == (Budget(tokens=9), ("calculator",))
    assert SearchConfig.of(config, {"budget_seconds": 3}).budget == Budget(tokens=9, seconds=3)


def test_invalid_texts_are_rejected() -> None:
    with pytest.raises(OptionError, match=r"--decoder 'generate=' can't be read"):
        SearchConfig.of(None, {"decoder": "generate="})
    with pytest.raises(OptionError, match=r"unknown decoder 'sed'"):
        SearchConfig.of(None, {"decoder": "sed"})
    with pytest.raises(OptionError, match=r"--decoder-option 'dtype=fp32' can't be read"):
        SearchConfig.of(None, {"decoder_option": ["dtype=fp32"]})
    with pytest.raises(ValidationError, match="max_tokens"):
        SearchConfig(model=Models.of(), max_tokens=0)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"model": None, "search": "mcts:iterations=3", "tools": ("calculator",), "budget": Budget(seconds=1.5)},
        {"model": Model(decoder="seed", options={"k_config": (2, 1)}, engine=EngineOptions(dtype="float32"))},
        {"model": {"generate": Model("a", "seed", {"k": 2}), "evaluate": Model("b", engine=EngineOptions(threads=2))}},
        {"model": {"generate": Model("a", "ar"), "escalate": Model("gpt", "openai", {"base_url": "http://host/v1"})}},
        {"until": 0.9, "temperature": 0.0, "top_k": 5, "prompts": "chat", "seed": 7},
    ],
)
def test_options_round_trip_through_json(given: dict[str, Any]) -> None:
    written = SearchConfig.of(None, given).to_json()
    assert SearchConfig.of(None, json.loads(json.dumps(written))).to_json() == written


def test_written_options_contain_no_secrets() -> None:
    options = {"api_key": "sk-1", "base_url": "http://me:pw@host/v1"}
    config = SearchConfig.of(None, {"model": Model("m", "openai", options)})
    assert config.to_json()["decoder_option"] == ["base_url=http://host/v1"]
    assert "api_key=sk-1" in config.to_json(secrets=True)["decoder_option"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"serach": "mcts"}, r"unknown option 'serach' \(did you mean search\?\)"),
        ({"base_url": "x"}, "unknown option 'base_url': .*; options of a decoder or an engine are fields of Model"),
        ({"models": {"first": "a", "then": "b"}}, "option 'models' was removed: give model="),
        ({"escalate": "b.gguf"}, "option 'escalate' was removed: give model={'generate': MODEL, 'escalate': MODEL}"),
        ({"watch": print}, r"option 'watch' was removed: iterate over astream\(\.\.\.\)"),
    ],
)
def test_an_unknown_option_is_rejected_even_without_a_model(option: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        solve("game24", "4 9 10 13", model=None, generator="enumerate:prior=uniform", evaluator="random", **option)


@pytest.mark.parametrize("decoder", ["auto", "sd", "openai", "object"])
def test_a_mistyped_option_names_its_neighbour_with_every_decoder(decoder: str, scripted: Any) -> None:
    chosen: Any = scripted({}) if decoder == "object" else decoder
    with pytest.raises(OptionError, match=r"unknown option 'serch' \(did you mean search\?\)"):
        solve("game24", "4 9 10 13", decoder=chosen, serch="bfs")  # type: ignore[call-arg]
    with pytest.raises(OptionError, match=r"unknown option 'ofset' \(did you mean offset\?\)"):
        evaluate("game24", "absent.jsonl", decoder=chosen, ofset=1)


def test_solve_has_17_keywords_that_a_config_has() -> None:
    keywords = set(SolveOptions.__annotations__)
    assert len(keywords) == 17
    assert keywords - SearchConfig.names() == {"hooks", "checkpoint"}
