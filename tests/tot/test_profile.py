"""Profiles: seconds by purpose and part, lower bounds of forward passes, and command line output."""

from __future__ import annotations

import json
import re
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tot import BFS, solve
from tot.decoders import OptionError
from tot.decoders.timeline import Load, Span, Timeline
from tot.report.profile import Achieved, Demand, Profile

DECODE, PREFILL = ("generate", "decode"), ("evaluate", "prefill")
MIXED = Load({DECODE: 3, PREFILL: 1}, 2, 100, 40)
DECODING = Load({DECODE: 2}, 2, 60, 30)
PEAK = (1000.0, 4000.0)
DEMAND = Demand(10, 5, weight_size=2.0, key_operations=1, slot_bytes=2)


@pytest.fixture
def profile() -> Profile:
    """A second of loading and 20 seconds of run: a step of 10 seconds, one of 5, and one that failed."""
    spans = [
        Span("main", "loading", 99.0, 100.0),
        Span("engine", "draft", 100.0, 101.0),
        Span("engine", "attention", 102.0, 104.0),
        Span("engine", "linear", 104.5, 107.5),
        Span("engine", "forward", 101.0, 108.0),
        Span("target", "verify", 101.0, 108.0),
        Span("engine", "sampling", 108.0, 108.5),
        Span("engine", "commit", 108.5, 109.5),
        Span("engine", "step", 100.0, 110.0, load=MIXED),
        Span("engine", "forward", 112.0, 116.0),
        Span("engine", "step", 112.0, 117.0, load=DECODING),
        Span("engine", "linear", 118.0, 118.5),
        Span("engine", "forward", 118.0, 119.0),
        Span("engine", "run", 100.0, 120.0),
    ]
    made = Profile()
    made.timeline, made.demand = Timeline(spans=spans, detailed=True), DEMAND
    made.peak, made.machine = PEAK, "a machine"
    return made


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed peak rates, so that nothing is measured."""
    monkeypatch.setattr("tot.report.profile.read_bandwidth", lambda device: 1e9)
    monkeypatch.setattr("tot.report.profile.matrix_rate", lambda dtype, device: 2e9)


# -- arithmetic ---------------------------------------------------------------------------------------------------


def test_seconds_are_split_by_rows_and_add_up_to_the_wall_time(profile: Profile) -> None:
    times = profile.seconds()
    assert times == pytest.approx(
        {
            ("", "loading", ""): 1.0,
            ("", "between steps", ""): 2.0 + 2.0 + 1.0,
            ("generate", "draft", ""): 0.75,
            ("generate", "decode", "attention"): 1.5,
            ("generate", "decode", "linear"): 2.25,
            ("generate", "decode", ""): 1.5 + 4.0,
            ("generate", "sampling", ""): 0.375,
            ("generate", "commit", ""): 0.75,
            ("generate", "scheduling", ""): 0.375 + 1.0,
            ("evaluate", "draft", ""): 0.25,
            ("evaluate", "prefill", "attention"): 0.5,
            ("evaluate", "prefill", "linear"): 0.75,
            ("evaluate", "prefill", ""): 0.5,
            ("evaluate", "sampling", ""): 0.125,
            ("evaluate", "commit", ""): 0.25,
            ("evaluate", "scheduling", ""): 0.125,
        }
    )
    assert sum(times.values()) == pytest.approx(120.0 - 99.0)


def test_operations_and_bytes_of_a_tiny_model_by_hand(tiny: Any) -> None:
    with tiny() as decoder:
        demand = Demand.of(decoder.engine)
        words = decoder.model.config.vocab_size
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48  # q, k and v for 2 of 4 heads, o, the MLP
    assert (demand.body, demand.head, demand.weight_size) == (2 * layer, 32 * words, 4)
    assert demand.key_operations == 4 * 2 * 4 * 8
    assert demand.slot_bytes == 2 * 2 * 2 * 8 * 4
    assert demand.operations(MIXED) == 2 * (2 * layer * 4 + 32 * words * 2) + 256 * 100
    assert demand.bytes(MIXED) == 4 * (2 * layer + 32 * words) + 256 * 40
    assert demand.bytes(MIXED._replace(reads=0)) == 4 * 2 * layer + 256 * 40


def test_achieved_rates_are_compared_with_the_larger_limit(profile: Profile) -> None:
    mixed, decoding = 2 * (10 * 4 + 5 * 2) + 100, 2 * (10 * 2 + 5 * 2) + 60
    assert profile.achieved() == {
        "with prompts": Achieved(1, 4, 7.0, 110, mixed, 0.11),
        "without": Achieved(1, 2, 4.0, 90, decoding, 0.09),
        "all": Achieved(2, 6, 11.0, 200, mixed + decoding, 0.2),
    }
    profile.peak = (1e6, 4000.0)
    assert profile.achieved()["with prompts"].limit == mixed / 4000


def test_a_trace_is_valid_and_has_the_measurements(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    profile.save(path)
    trace = json.loads(path.read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in spans[:4]] == ["loading", "run", "step", "draft"]
    assert (spans[2]["ts"], spans[2]["dur"], spans[2]["args"]["keys"]) == (1e6, 10e6, 100)
    about = trace["otherData"]
    assert (about["machine"], about["peak bytes/s"], about["peak FLOP/s"]) == ("a machine", *PEAK)
    assert about["seconds"]["evaluate, prefill, linear"] == 0.75
    assert about["forwards"]["all"]["operations"] == 320


# -- searches -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
def test_a_search_is_profiled_from_end_to_end(letters: Any, tiny: Any) -> None:
    began = time.perf_counter()
    profile = Profile()
    with tiny() as decoder:
        solve(letters, "q", decoder=decoder, search=BFS(thoughts=2, breadth=1, depth=2), max_tokens=4, profile=profile)
        assert decoder.engine.timeline is None
        forwards = decoder.engine.forwards
    times = profile.seconds()
    assert {purpose for purpose, _, _ in times} == {"", "generate", "evaluate", "answer"}
    assert {part for _, part, _ in times} >= {"loading", "prefill", "decode", "sampling", "commit", "scheduling"}
    assert {at for _, part, at in times if part == "prefill"} == {""}  # only the engine in C measures its layers
    assert all(seconds >= 0 for seconds in times.values())
    assert sum(times.values()) < time.perf_counter() - began
    achieved = profile.achieved()
    assert achieved["all"].forwards == forwards
    assert 0 < achieved["all"].limit < achieved["all"].seconds


def test_a_model_that_runs_elsewhere_has_no_profile(letters: Any, scripted: Any) -> None:
    elsewhere: list[dict[str, Any]] = [
        {"decoder": scripted({})},
        {"decoder": "openai", "model": "some-model", "base_url": "http://127.0.0.1:9"},
        {"model": None},
    ]
    for options in elsewhere:
        with pytest.raises(OptionError, match="a profile needs a local model"):
            solve(letters, "q", **options, profile=Profile())


# -- the command line ---------------------------------------------------------------------------------------------

TASK = """
from tot import Task

class Grow(Task):
    templates = {"thought": "grow {{ question }}", "value": "value {{ question }}", "answer": "answer {{ question }}"}
    depth = 2
"""
SOLVE = ("solve", "task.py:Grow", "q", "--thoughts", "2", "--breadth", "1", "--max-tokens", "4")


@pytest.fixture
def command(tot: Any, tiny: Any, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command line with a tiny model and a task file."""
    (tmp_path / "task.py").write_text(TASK)

    def load(*_: Any, **__: Any) -> AbstractContextManager[Any]:
        made: AbstractContextManager[Any] = tiny()
        return made

    monkeypatch.setattr("tot.llm.decoders.load_decoder", load)
    return tot


def test_the_profile_follows_the_answer(command: Any) -> None:
    status, out, err = command(*SOLVE, "--profile")
    assert (status, err) == (0, "")
    answer, seconds, forwards = (out.index(text) for text in ("Answer", "where the time went", "machine's peak"))
    assert answer < seconds < forwards
    parts = dict(re.findall(r"^│ ([a-z][a-z,: ]+?) +│.* (\d+\.\d\d) │ +\d+\.\d% │$", out, re.MULTILINE))
    assert list(parts) == [
        *("loading the model", "prefill", "decode", "sampling", "text and stops", "scheduling"),
        *("search, templates, waiting", "total"),
        *(name for name in parts if name.startswith("forwards: ")),
    ]
    assert {name for name in parts if name.startswith("forwards: ")} == {"forwards: everything else"}
    assert re.search(r"│ part +│ generate │ evaluate │ answer │ +all │ +share │".replace("│", "[│┃]"), out)
    assert "measured peak: 1.0 GB/s read, 2.0 GFLOP/s" in out


def test_with_json_the_profile_is_on_standard_error(command: Any) -> None:
    status, out, err = command(*SOLVE, "--json", "--profile")
    assert (status, out.count("\n")) == (0, 1)
    assert list(json.loads(out)) == ["answer", "certainty", "solved", "value", "usage"]
    assert "where the time went" in err
    assert "where the time went" not in command(*SOLVE, "--json")[2]


def test_a_trace_is_written_to_the_given_file(command: Any, tmp_path: Path) -> None:
    status, out, _ = command(*SOLVE, "--profile-out", "trace.json")
    assert status == 0
    assert "where the time went" in out
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"loading", "run", "step", "forward"} <= {event["name"] for event in events}


def test_an_unwritable_trace_is_rejected_before_the_model_is_loaded(command: Any) -> None:
    status, out, err = command(*SOLVE, "--profile-out", "absent/trace.json")
    assert (status, out) == (2, "")
    assert err.startswith("tot: --profile-out absent/trace.json: the folder ")


def test_a_server_cannot_be_profiled(command: Any) -> None:
    for options in (("--decoder", "openai"), ("--model", "none")):
        status, out, err = command(*SOLVE, *options, "--profile")
        assert (status, out) == (2, "")
        assert err.startswith("tot: a profile needs a local model: leave profile out")
