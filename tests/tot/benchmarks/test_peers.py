"""The benchmark `peers`: output and results file, also of an interrupted run; invalid options and missing peers."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.__main__ import main
from benchmarks.engines import SideError
from benchmarks.harness import Measured
from benchmarks.options import PeersOptions
from benchmarks.peers import peers
from benchmarks.peers.peers import run
from benchmarks.peers.settings import Setting
from benchmarks.peers.sides import _TRIAL_NEW, _TRIAL_PROMPT, Peer, open_ours, open_sides
from benchmarks.workloads import Waves, branches, drawn, mixed_ids, requests
from tot.decoders import LocalDecoder, load_decoder

pytestmark = pytest.mark.benches

METRICS = ("", ": prefill tokens/s", ": decoding tokens/s")


@pytest.fixture
def among(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the benchmark use these sides beside tot with a tiny model."""

    def loaded(name: str, model: str, **options: Any) -> LocalDecoder:
        made: LocalDecoder = tiny()
        return made

    def put(*others: Peer) -> None:
        monkeypatch.setattr("benchmarks.peers.sides.load_decoder", loaded)
        monkeypatch.setattr("benchmarks.peers.peers.mixed_ids", lambda *options: list(range(10, 60)))
        monkeypatch.setattr("benchmarks.peers.peers.BUSY", 1000.0)

        def open_scripted(options: PeersOptions, stack: ExitStack, say: Any) -> list[Peer]:
            return [open_ours(options.model, stack, True, "tot"), *others]

        monkeypatch.setattr("benchmarks.peers.peers.open_sides", open_scripted)

    return put


def test_numbers_are_written_and_ratios_printed(
    among: Any, paced: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    among(paced("vLLM", lambda samples: 1000.0))
    options = PeersOptions(
        branches=(1, 15),
        rounds=2,
        new_tokens=3,
        parts=("decode",),
        patience=1e9,
        out=tmp_path / "n.json",
        markdown=True,
        sides=("vllm",),
    )
    run(options, Console(width=150, highlight=False))
    numbers = json.loads((tmp_path / "n.json").read_text())
    (decoded,) = (found["cells"] for name, found in numbers.items() if isinstance(found, dict) and "cells" in found)
    assert sorted((cell["side"], cell["column"], cell["round"]) for cell in decoded) == [
        (side, column, turn) for side in ("tot", "vLLM") for column in (1, 15) for turn in (0, 1)
    ]
    assert {cell["tokens"] for cell in decoded if cell["column"] == 15} == {45}
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    names = [f"{side}{metric}" for metric in METRICS for side in ("tot", "vLLM", "tot / vLLM")]
    assert rows[-10:] == [*names, "tot: GiB resident"]
    assert all(2**25 < cell["resident"] < 2**38 for cell in decoded if cell["side"] == "tot")
    assert {(cell["prefilled"], cell["decoded"]) for cell in decoded if cell["side"] == "vLLM"} == {
        (50 / 500, count * 2 / 500) for count in (1, 15)
    }
    assert all(0 < cell["prefill"] < cell["seconds"] for cell in decoded)


def test_a_step_and_a_search_are_measured(
    among: Any, paced: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, letters: Any
) -> None:
    among(paced("vLLM", lambda samples: 0.5), paced("llama.cpp, A", lambda samples: 0.5))
    monkeypatch.setattr(peers, "STEPS", 4)
    monkeypatch.setattr(peers, "THOUGHTS", (2,))
    monkeypatch.setattr(peers, "DEPTH", 2)
    monkeypatch.setattr(peers, "load_task", lambda name: letters())
    monkeypatch.setattr(peers, "questions", lambda task, data, count: ["why?", "where?"][:count])
    options = PeersOptions(
        branches=(1, 4), rounds=1, problems=2, parts=("limit", "tree"), patience=1e9, out=tmp_path / "n.json"
    )
    run(options, Console(quiet=True))
    numbers = json.loads((tmp_path / "n.json").read_text())
    steps = numbers["milliseconds of a step, by branches"]["cells"]
    assert [(cell["side"], cell["column"]) for cell in steps] == [("tot", 1), ("tot", 4)]
    assert all(cell["least"] > 0 for cell in steps)
    (searched,) = (found["cells"] for name, found in numbers.items() if name.startswith("seconds a GSM8K search"))
    assert sorted({cell["side"] for cell in searched}) == ["llama.cpp, A", "tot", "vLLM"]
    assert {cell["round"] for cell in searched} == {0, 1}


def test_an_interrupted_run_prints_its_results(among: Any, paced: Any, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []

    def interrupted(samples: int) -> float:
        calls.append(samples)
        if calls == [1, 4, 1, 4]:  # two warm-ups, and the second cell of the first round
            raise KeyboardInterrupt
        return 2.0

    among(paced("vLLM", interrupted))
    options = PeersOptions(branches=(1, 4), rounds=1, new_tokens=6, parts=("decode",), patience=1e9)
    with pytest.raises(KeyboardInterrupt):
        run(options, Console(width=150))
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "│ vLLM " in line)
    assert row.split("│")[2].strip() == "3.0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--parts", "decode,speed"), "option parts: Input should be 'decode', "),
        (("--sides", "llama,sglang"), "option sides: Input should be 'none', "),
        (("--branches", "1,few"), "option branches: Input should be a valid integer"),
    ],
)
def test_unknown_parts_sides_and_branches_are_rejected(
    arguments: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["peers", *arguments]) == 2
    assert message in capfd.readouterr().err


def test_a_missing_peer_is_skipped_with_a_hint_how_to_install_it(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("benchmarks.peers.sides.load_decoder", lambda name, model, **options: tiny())
    monkeypatch.setattr("benchmarks.peers.sides.find_model", lambda name: tmp_path / "a.Q4_1.gguf")
    messages: list[str] = []
    nowhere = tmp_path / "python"
    with ExitStack() as stack:
        sides = open_sides(PeersOptions(model="any", llama=nowhere, sides=("llama",)), stack, messages.append)
    assert [side.name for side in sides] == ["tot"]
    assert messages[1] == (
        f"llama.cpp is left out: {nowhere} does not exist: run `make peers`, or give an interpreter with --llama PYTHON"
    )


def test_llama_runs_with_the_fastest_setting_of_each_number_of_branches(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """F16 prefills faster, Q4_0 decodes faster."""

    class Worker:
        def __init__(self, setting: Setting) -> None:
            self.setting, self.about = setting, "scripted"

        def run(self, waves: Waves) -> Measured:
            if self.setting.file == "BF16":
                raise SideError("no such kernel")
            prefill = 1.0 if self.setting.file == "F16" else 2.0
            decoding = {"Q4_0": 0.001, "F16": 0.01}.get(self.setting.file, 0.1) * (1 if self.setting.flash else 0.5)
            return {"seconds": prefill + decoding * drawn(waves), "prefill": prefill}

    monkeypatch.setattr("benchmarks.peers.sides.load_decoder", lambda name, model, **options: tiny())
    monkeypatch.setattr("benchmarks.peers.sides.find_model", lambda name: tmp_path / "a.Q4_1.gguf")
    monkeypatch.setattr(
        "benchmarks.peers.sides.llama_process", lambda model, python, stack, setting, tokens: Worker(setting)
    )
    messages: list[str] = []
    options = PeersOptions(
        model="any", sides=("llama",), branches=(1, 30), prompt_tokens=len(_TRIAL_PROMPT), new_tokens=_TRIAL_NEW
    )
    with ExitStack() as stack:
        sides = open_sides(options, stack, messages.append)
    assert [side.name for side in sides] == [
        "tot",
        "llama.cpp, F16, no flash attention",
        "llama.cpp, Q4_0, no flash attention",
    ]
    assert "BF16: left out, no such kernel" in messages
    assert "default setting: 1: 3.70 s, 30: 53.00 s" in messages


@pytest.mark.real
def test_branches_share_almost_no_prefix(smollm2: str) -> None:
    """Shared beginnings of samples are computed once by tot alone, so they would favour it."""
    with load_decoder("ar", smollm2) as decoder:
        (wave,) = branches(mixed_ids(decoder.tokenizer, 300), 8, 24)
        texts = [one.tokens for one in decoder.generate(list(requests(wave)))]
    assert len({text[:end] for text in texts for end in range(1, 25)}) > 0.9 * 8 * 24
