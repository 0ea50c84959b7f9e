"""`tot bench decoders` measures the same search with every decoder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tot.bench.decoders import BenchProblem, Watched, forget, hold_beginnings, ways
from tot.bench.harness import Measured, Measurements
from tot.bench.overlap import in_flight, interval, overlap_table
from tot.cli.app import main
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
        assert main(["bench", "decoders", *models, *questions, "--out", str(out), *options]) == 0
        return capfd.readouterr().out, json.loads(out.read_text())["searches, T = 1.0"]["cells"]

    return run


def test_every_side_decodes_the_same_search(compare: Callable[..., Any], tmp_path: Path) -> None:
    printed, cells = compare("--limit", "2", "--k-configs", "1-1,2-1", "--picture", str(tmp_path / "speed.svg"))
    expected = ways(["1-1", "2-1"])
    assert sorted({cell["side"] for cell in cells}) == sorted(expected)
    for turn in (0, 1):
        here = {cell["side"]: cell for cell in cells if cell["round"] == turn}
        for name, (_, _, options) in expected.items():
            cell, plain = here[name], here["ar, packed"]
            assert cell["seconds"] >= sum(cell["by purpose"].values()) > 0
            assert set(cell["by purpose"]) == {"generate", "evaluate", "answer"}
            assert sum(count for _, count in cell["in flight"]) == cell["forwards"]
            assert cell["tokens"] == sum(cell[f"{purpose} tokens"] for purpose in cell["by purpose"])
            assert cell["accepted"] <= cell["reached"] <= cell["drafted"]
            if "rule" not in options:  # samples of another distribution
                assert cell["tokens"] == plain["tokens"]
            if options.get("adapt") is False and "rule" not in options:
                assert 0 < cell["forwards"] < plain["forwards"]
    assert "overlap of drafts and verifications" in printed
    rows = [line.split("│")[1].strip() for line in printed.splitlines() if line.startswith("│")]
    assert "speed of ar, serial" in (tmp_path / "speed-1.0.svg").read_text()
    assert "0.9" in rows  # drafts by a copy of the target are mostly accepted


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


def test_one_part_can_be_measured_alone(compare: Callable[..., Any]) -> None:
    _, cells = compare("--limit", "1", "--parts", "packed")
    assert [cell["side"] for cell in cells] == ["ar, packed", "seed, packed"]


def test_an_invalid_draft_configuration_is_rejected(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for config in ("2-0", "2-a", "", "2--1"):
        assert main(["bench", "decoders", "--k-configs", config, "--out", str(tmp_path / "n.json")]) == 2
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


# -- overlap ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "verify", "branches", "devices", "times"),
    [
        (1.0, 1.0, 1, 1, 1.0),  # no draft work to overlap
        (1.0, 1.0, 2, 1, 2.0),
        (0.3, 1.0, 3, 1, 1.3),  # the target never waits
        (2.0, 1.0, 3, 1, 1.5),  # the target waits for the draft
        (2.0, 1.0, 3, 3, 3.0),
        (4.0, 1.0, 3, 3, 3.0),  # few distinct texts
    ],
)
def test_the_expected_gain_of_overlap(draft: float, verify: float, branches: int, devices: int, times: float) -> None:
    assert (draft + verify) / interval(draft, verify, branches, devices) == pytest.approx(times)


def test_texts_in_flight_become_fewer_as_they_end() -> None:
    assert in_flight([5, 2, 5]) == {3: 6, 2: 6}
    assert in_flight([4]) == {1: 4}
    assert in_flight([]) == {}


def test_overlap_is_expected_to_lose_if_draft_and_target_slow_each_other_down() -> None:
    """The slowdown of the target alone, 1.9x of 51 ms, would be paid by the drafts of 55 ms that it hides."""

    def searched(side: str, seconds: float, draft: float = 0.0, verify: float = 0.0) -> Measured:
        spent = {"draft": 100 * draft, "verify": 100 * verify}
        cell = {"side": side, "column": "gsm8k", "round": 0, "seconds": seconds}
        return {**cell, "tokens": 200, "forwards": 100, "spent": spent, "in flight": [[1, 20], [3, 80]]}

    cells = [
        searched("ar, serial", 15.9),
        searched("seed (1), rounds, no overlap", 12.6, 0.055, 0.051),
        searched("seed (1), rounds, overlap", 14.0, 0.118, 0.097),
    ]
    table = overlap_table(Measurements(["gsm8k"], 1, cells), 3, ["ar, serial", "ar, packed"])
    headings, values = (list(column.cells) for column in table.columns)
    cell = dict(zip(headings, values, strict=True))
    assert table.columns[1].header == "seed (1), rounds"
    # 106 ms, and with overlap 118 ms for three texts and 215 ms for one.
    assert cell["overlap, of no overlap: expected"] == "0.77x"
    assert cell["measured"] == "0.90x"
    assert cell["a draft alone and beside the other, ms"] == "55, 118"
    # 106 ms become 55 ms for three texts, with a device per branch 51 ms.
    assert cell["without contention, 1 draft device: of ar, serial"] == "1.87x"
    assert cell["without contention, 3 draft devices: of ar, serial"] == "1.94x"
    assert not any("ar, packed" in heading for heading in headings)
