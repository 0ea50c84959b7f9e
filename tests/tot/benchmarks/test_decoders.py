"""`python -m benchmarks decoders` measures the same search with every decoder; `schedule` simulates them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.decoders import Watched, first_prompts, hold_beginnings, ways
from benchmarks.engines import forget
from benchmarks.simulation import Machine, Schedule, Wave, simulate
from tot.decoders import Request, Sampling, load_decoder
from tot.decoders.drafting.latency_model import LatencyModel
from tot.task.task import Task

TASK = """
from tot import Task

class Count(Task):
    depth = 3
    templates = {
        "thought": "{{ question }}{% for t in thoughts %} {{ t.thought }}.{% endfor %} Next:",
        "answer": "{{ question }}{% for t in thoughts %} {{ t.thought }}.{% endfor %} So:",
        "value": "{{ question }}{% for t in thoughts %} {{ t.thought }}.{% endfor %} Good?",
    }
    sampling = {"thought": {"max_tokens": 9, "stop": (".",)}, "answer": {"max_tokens": 4}, "explain": {"max_tokens": 8}}
"""
STOPS = """
    def parse_thought(self, template, text):
        import os, signal
        os.kill(os.getpid(), signal.SIGTERM)
        return text
"""


@pytest.fixture
def compare(small: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run the benchmark on a tiny model with itself as draft; return the status, the output and the cells."""
    (tmp_path / "count.py").write_text(TASK)
    (tmp_path / "rows.jsonl").write_text('{"question": "1 2"}\n{"question": "3 4"}\n{"question": "5 6"}\n')

    def run(*options: str) -> tuple[int, str, list[dict[str, Any]]]:
        questions = ("--questions", f"{tmp_path / 'count.py'}:Count={tmp_path / 'rows.jsonl'}", "--temperatures", "1")
        out, models = tmp_path / "numbers.json", ("--model", str(small), "--draft", str(small))
        status = main(["decoders", *models, *questions, "--out", str(out), *options])
        return status, " ".join(capfd.readouterr().out.split()), json.loads(out.read_text())["searches, T = 1.0"]

    return run


@pytest.mark.benches
def test_every_side_decodes_a_search(compare: Callable[..., Any]) -> None:
    status, printed, cells = compare("--limit", "2", "--k-configs", "1-1,2-1")
    expected = ways(["1-1", "2-1"])
    assert status == 0
    assert sorted({cell["side"] for cell in cells}) == sorted(expected)
    for cell in cells:
        accepted, reached, drafted = (sum(cell[name]) for name in ("accepted", "reached", "drafted"))
        assert accepted <= reached <= drafted
        if cell["side"] != "seed, packed":  # which drafts only if that pays
            assert (drafted > 0) == (expected[cell["side"]].method != "ar")
        assert 0 < cell["verified"] < cell["seconds"]
        assert sum(sum(lengths) for lengths, _ in cell["waves"]) == cell["tokens"] > 0
    for title in ("forwards, alone", "speed relative to ar, serial, simulated", "acceptance by purpose"):
        assert title in printed


@pytest.mark.benches
def test_one_part_can_be_measured_alone_and_a_stopped_search_is_not_kept(
    compare: Callable[..., Any], tmp_path: Path
) -> None:
    options = ("--limit", "1", "--parts", "packed")
    status, _, cells = compare(*options)
    assert (status, [cell["side"] for cell in cells]) == (0, ["ar, packed", "seed, packed"])
    (tmp_path / "numbers.json").unlink()
    (tmp_path / "count.py").write_text(TASK + STOPS)
    status, _, cells = compare(*options)
    assert (status, cells) == (130, [])


@pytest.mark.benches
def test_shared_prompt_prefixes_are_computed_once(tiny: Callable[..., Any]) -> None:
    examples = {"thought": "{{ 'An example. ' * 20 }}{{ question }}", "value": "{{ 'Judge. ' * 9 }}{{ question }}"}
    short = type("Short", (Task,), {"templates": examples})()
    with tiny() as closed:
        small = closed.model
    with tiny() as plain, load_decoder("sd", engine=plain.engine, draft=small) as drafting:
        hold_beginnings(drafting, first_prompts(drafting, short, "1 2"))
        forget(drafting)
        for runner in (drafting.engine.runner, drafting.drafter.runner):
            prompt = plain.engine.codec.encode_prompt(short.prompt("thought", short.start("3 4")))
            assert 240 <= runner.cache.computed_length(runner.cache.open(prompt)) < len(prompt)
            assert runner.cache.stored > 300  # the value prompt's prefix, too


@pytest.mark.benches
def test_sample_i_has_the_same_text_serially_and_packed(tiny: Callable[..., Any]) -> None:
    with tiny() as plain, load_decoder("sd", engine=plain.engine) as drafting:
        sampling = Sampling(max_tokens=12, temperature=1.0, n=3, seed=7, ignore_eos=True)
        requests = [Request(prompt="the rain", sampling=sampling)]
        sides = [Watched(decoder, serial) for decoder in (plain, drafting) for serial in (True, False)]
        texts = [[one.tokens for one in side.generate(requests)] for side in sides]
    assert texts == [texts[0]] * 4
    assert len(set(texts[0])) == 3


@pytest.mark.parametrize("config", ["2-0", "2-a", "", "2--1"])
def test_an_invalid_draft_configuration_is_rejected(config: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["decoders", "--k-configs", config]) == 2
    assert "k_configs" in capfd.readouterr().err


def test_the_papers_rules_run_serially_and_in_rounds_for_the_first_chain_and_tree() -> None:
    sides = ways(["1-1", "2-1", "1-1-1"])
    assert {name: way.options["rule"] for name, way in sides.items() if "rule" in way.options} == {
        "sd (1,1), leviathan's rule, serial": "leviathan",
        "seed (1,1), leviathan's rule, rounds": "leviathan",
        "mcsd (2,1), mcsd's rule, serial": "mcsd",
        "seed (2,1), mcsd's rule, rounds": "mcsd",
    }
    assert {name: way.options["overlap"] for name, way in sides.items() if "overlap" in way.options} == {
        "seed (1,1), rounds, overlap": True,
    }


# -- simulation ---------------------------------------------------------------------------------------------------

ROWS = LatencyModel((1, 11), (1.0, 2.0))
"""A tenth of a second for each further row."""
CHAIN = (1, 1, 1)


def flat(seconds: float) -> LatencyModel:
    return LatencyModel((1,), (seconds,))


def seconds(schedule: Schedule, machine: Machine, texts: int = 1, chance: float = 0.0, length: int = 300) -> float:
    return simulate(schedule, [Wave([length] * texts)], machine, chance)


@pytest.mark.parametrize(
    ("draft", "verify", "texts", "devices", "times"),
    [
        (1.0, 1.0, 1, 1, 1.0),  # no draft work to overlap
        (1.0, 1.0, 2, 1, 2.0),
        (0.3, 1.0, 3, 1, 1.3),  # the target never waits
        (2.0, 1.0, 3, 1, 1.5),  # the target waits for the draft
        (2.0, 1.0, 3, 3, 3.0),
        (4.0, 1.0, 3, 3, 3.0),  # few distinct texts
    ],
)
def test_the_gain_of_overlap(draft: float, verify: float, texts: int, devices: int, times: float) -> None:
    machine = Machine(flat(verify), flat(draft / 3), devices=devices)
    apart, beside = (seconds(Schedule("rounds", CHAIN, overlap=overlap), machine, texts) for overlap in (False, True))
    assert apart / beside == pytest.approx(times, rel=0.02)
    assert apart == seconds(Schedule("serial", CHAIN), machine, texts)


def test_rounds_lose_if_draft_and_target_slow_each_other_down() -> None:
    machine = Machine(flat(0.05), flat(0.02), worker=1.5, draft_beside=2.2, verify_beside=1.9)
    apart, beside = (seconds(Schedule("rounds", CHAIN, overlap=overlap), machine, 3) for overlap in (False, True))
    # The draft of 60 ms takes 132 ms beside the target, which is always at work, since it takes 95 ms of them.
    assert beside / apart == pytest.approx(0.12 / 0.11, rel=0.1)


def test_forwards_and_prompts_of_packed_and_serial_texts() -> None:
    machine = Machine(ROWS, flat(9.0))
    assert seconds(Schedule("serial"), machine, 3, length=100) == pytest.approx(300 * 1.0)
    assert seconds(Schedule("packed"), machine, 3, length=100) == pytest.approx(100 * 1.2)
    assert simulate(Schedule("packed"), [Wave([10, 20])], machine, 0.0) == pytest.approx(10 * 1.1 + 10 * 1.0)
    machine, prompt = Machine(LatencyModel((1, 64), (1.0, 64.0)), LatencyModel((1, 64), (0.5, 32.0))), [Wave([], 100)]
    assert simulate(Schedule("packed"), prompt, machine, 0.0) == pytest.approx(100)
    assert simulate(Schedule("packed", CHAIN), prompt, machine, 0.0) == pytest.approx(150)


def test_accepted_drafts_save_forwards() -> None:
    machine = Machine(ROWS, flat(0.1))
    every = seconds(Schedule("serial", CHAIN), machine, chance=1.0, length=100)
    assert every == pytest.approx(25 * (1.3 + 0.3))
    some = seconds(Schedule("serial", CHAIN), machine, chance=0.5, length=30_000)
    assert some == pytest.approx(30_000 / (1 + 0.5 + 0.25 + 0.125) * (1.3 + 0.3), rel=0.02)
    tree = seconds(Schedule("serial", (2, 2)), Machine(ROWS, ROWS), chance=1.0, length=99)
    assert tree == pytest.approx(33 * (ROWS.of(1 + 2 + 4) + ROWS.of(1) + ROWS.of(2)))


def test_an_adaptive_schedule_drafts_only_what_pays() -> None:
    machine = Machine(ROWS, flat(0.1))
    packed = Schedule("packed", CHAIN, adapt=True)
    assert seconds(packed, machine, 8, chance=0.0) == seconds(Schedule("packed"), machine, 8)
    assert seconds(packed, machine, 1, chance=0.9) < 0.7 * seconds(Schedule("packed"), machine, 1)
    slow = replace(machine, draft=flat(3.0))
    assert seconds(packed, slow, 1, chance=0.9) == seconds(Schedule("packed"), slow, 1)


@pytest.mark.benches
def test_the_map_of_schedules(small: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = (
        "schedule",
        "--model",
        str(small),
        "--texts",
        "1,8",
        "--shares",
        "0.1",
        "--out",
        str(tmp_path / "n.json"),
    )
    assert main([*command, "--draft", str(small)]) == 0
    printed = capfd.readouterr().out
    assert printed.count("rounds, of packed seed") == 4 * 2  # machines, shares
    assert "a draft device per text, rows cost nothing" in printed
    measured = json.loads((tmp_path / "n.json").read_text())["forwards"]
    assert measured["target"]["seconds"][0] > 0 < measured["draft"]["seconds"][0]
    assert main([*command, "--draft", "lookup"]) == 2
    assert "'lookup' is no model" in capfd.readouterr().err
