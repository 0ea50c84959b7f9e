"""`python -m benchmarks decoders` measures the same search with every decoder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.decoders import BenchProblem, Watched, hold_beginnings, schedule_of, ways
from benchmarks.engines import forget
from benchmarks.schedule import Schedule
from tot.decoders import Request, Sampling, load_decoder
from tot.task.task import Task

pytestmark = pytest.mark.benches

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
def compare(tiny: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run the benchmark on a tiny model with a copy of it as draft; return the output and the cells."""
    (tmp_path / "count.py").write_text(TASK)
    (tmp_path / "rows.jsonl").write_text('{"question": "1 2"}\n{"question": "3 4"}\n{"question": "5 6"}\n')
    with tiny() as decoder:
        pass  # closing the decoder restores the model's own attention
    for name in ("model", "draft"):
        decoder.model.save_pretrained(tmp_path / name)
        decoder.tokenizer.save_pretrained(tmp_path / name)

    def run(*options: str) -> tuple[str, list[dict[str, Any]]]:
        models = ("--model", str(tmp_path / "model"), "--draft", str(tmp_path / "draft"), "--dtype", "fp32")
        questions = ("--questions", f"{tmp_path / 'count.py'}:Count={tmp_path / 'rows.jsonl'}", "--temperatures", "1")
        out = tmp_path / "numbers.json"
        assert main(["decoders", *models, *questions, "--out", str(out), *options]) == 0
        return capfd.readouterr().out, json.loads(out.read_text())["searches, T = 1.0"]["cells"]

    return run


def test_every_side_decodes_the_same_search(compare: Callable[..., Any]) -> None:
    printed, cells = compare("--limit", "2", "--k-configs", "1-1,2-1")
    expected = ways(["1-1", "2-1"])
    assert sorted({cell["side"] for cell in cells}) == sorted(expected)
    for turn in (0, 1):
        here = {cell["side"]: cell for cell in cells if cell["round"] == turn}
        for name, (_, _, options) in expected.items():
            cell, plain = here[name], here["ar, packed"]
            assert sum(sum(lengths) for lengths, _ in cell["waves"]) == cell["tokens"]
            assert cell["tokens"] == sum(cell[f"{purpose} tokens"] for purpose in ("generate", "evaluate", "answer"))
            assert cell["accepted"] <= cell["reached"] <= cell["drafted"]
            if "rule" not in options:  # samples of another distribution
                assert cell["tokens"] == plain["tokens"]
            if options.get("adapt") is False and "rule" not in options:
                assert 0 < cell["forwards"] < plain["forwards"]
    assert "forwards, alone" in printed
    assert "speed relative to ar, serial, simulated" in " ".join(printed.split())
    assert "acceptance by purpose" in " ".join(printed.split())


def test_shared_prompt_prefixes_are_computed_once(tiny: Callable[..., Any]) -> None:
    examples = {"thought": "{{ 'An example. ' * 20 }}{{ question }}", "value": "{{ 'Judge. ' * 9 }}{{ question }}"}
    short = type("Short", (Task,), {"templates": examples})()
    with tiny() as closed:
        small = closed.model
    with tiny() as plain, load_decoder("sd", engine=plain.engine, draft=small) as drafting:
        hold_beginnings(drafting, BenchProblem("short", short, "1 2"))
        forget(drafting)
        for runner in (drafting.engine.runner, drafting.drafter.runner):
            prompt = plain.engine.codec.encode_prompt(short.prompt("thought", short.start("3 4")))
            assert 240 <= runner.cache.computed_length(runner.cache.open(prompt)) < len(prompt)
            assert runner.cache.stored > 300  # the value prompt's prefix, too


def test_a_stopped_search_is_not_kept(compare: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "count.py").write_text(TASK + STOPS)
    with pytest.raises(AssertionError):
        compare("--limit", "1", "--parts", "packed")
    assert json.loads((tmp_path / "numbers.json").read_text())["searches, T = 1.0"]["cells"] == []


def test_one_part_can_be_measured_alone(compare: Callable[..., Any]) -> None:
    _, cells = compare("--limit", "1", "--parts", "packed")
    assert [cell["side"] for cell in cells] == ["ar, packed", "seed, packed"]


def test_an_invalid_draft_configuration_is_rejected(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for config in ("2-0", "2-a", "", "2--1"):
        assert main(["decoders", "--k-configs", config, "--out", str(tmp_path / "n.json")]) == 2
        assert "k_configs" in capfd.readouterr().err


def test_sample_i_has_the_same_text_serially_and_packed(tiny: Callable[..., Any]) -> None:
    with tiny() as plain, load_decoder("sd", engine=plain.engine) as drafting:
        sampling = Sampling(max_tokens=12, temperature=1.0, n=3, seed=7, ignore_eos=True)
        requests = [Request(prompt="the rain", sampling=sampling)]
        sides = [Watched(decoder, serial) for decoder in (plain, drafting) for serial in (True, False)]
        texts = [[one.tokens for one in side.generate(requests)] for side in sides]
    assert texts == [texts[0]] * 4
    assert len(set(texts[0])) == 3


def test_the_papers_rules_run_serially_and_in_rounds_for_the_first_chain_and_tree() -> None:
    rules = {
        name: options["rule"] for name, (_, _, options) in ways(["1-1", "2-1", "1-1-1"]).items() if "rule" in options
    }
    assert rules == {
        "sd (1,1), leviathan's rule, serial": "leviathan",
        "seed (1,1), leviathan's rule, rounds": "leviathan",
        "mcsd (2,1), mcsd's rule, serial": "mcsd",
        "seed (2,1), mcsd's rule, rounds": "mcsd",
    }
    assert {"mcsd (2,1), mcsd's rule, serial", "sd (1,1), leviathan's rule, serial"} <= ways(["2-1", "1-1"]).keys()


def test_schedules_are_those_of_the_sides() -> None:
    schedules = {name: schedule_of(way) for name, way in ways(["1-1", "2-1"]).items()}
    assert schedules["ar, serial"] == Schedule("serial")
    assert schedules["ar, packed"] == Schedule("packed")
    assert schedules["sd (1,1), serial"] == Schedule("serial", (1, 1))
    assert schedules["mcsd (2,1), serial"] == Schedule("serial", (2, 1))
    assert schedules["seed (2,1), rounds"] == Schedule("rounds", (2, 1), overlap=None)
    assert schedules["seed (1,1), rounds, no overlap"] == Schedule("rounds", (1, 1), overlap=False)
    assert schedules["seed, packed"] == Schedule("packed", (2, 1, 1, 1, 1, 1), adapt=True, overlap=None)
