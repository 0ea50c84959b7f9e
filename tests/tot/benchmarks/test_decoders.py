"""`python -m benchmarks decoders` measures the same search with every decoding method."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.decoders import Watched, ways
from tot.decoders import Request, Sampling, load_decoder

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
        assert cell["tokens"] > 0
    assert "acceptance by purpose" in printed


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
