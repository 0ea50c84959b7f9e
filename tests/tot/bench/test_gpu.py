"""`tot bench gpu`: what it writes, and what it refuses."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch

from tot.cli.app import main

pytestmark = pytest.mark.benches


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_every_part_is_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "numbers.json"
    options = ["--new-tokens", "8", "--branches", "4,1", "--rounds", "1"]
    assert main(["bench", "gpu", "--model", "tiny", "--device", "cpu", *options, "--out", str(out)]) == 0
    numbers = json.loads(out.read_text())
    printed = capsys.readouterr().out
    assert numbers["finished"]
    assert numbers["limits"]["weight_bytes"] < 10**6 < numbers["limits"]["read_bandwidth"]
    packed = numbers["tiny: new tokens/s, samples of one prompt at T = 1"]["cells"]
    assert [(cell["side"], cell["column"], cell["tokens"]) for cell in packed] == [
        ("tot", 1, 8),
        ("generate", 1, 8),
        ("tot", 4, 32),
        ("generate", 4, 32),
    ]
    assert "tot / generate" in printed
    (seed,) = (found["cells"] for name, found in numbers.items() if "drafts of 4" in name)
    assert {cell["side"] for cell in seed} == {"seed, adapted", "seed, packed", "seed, rounds", "ar"}
    assert 0 < statistics.fmean(cell["acceptance"] for cell in seed if cell["side"] == "seed, packed") < 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "cuda"], "torch finds no CUDA device here"),
        (["--device", "cpu"], "llama-2-7b would take hours on a CPU"),
        (["--model", "tinny", "--device", "cpu"], "'tinny' is not one of"),
        (["--model", "tiny", "--parts", "packd", "--device", "cpu"], "option parts: Input should be 'limits', "),
        (["--branches", "0,4"], "option branches: Input should be greater than 0"),
    ],
)
def test_bad_options_are_refused_before_anything_is_made(
    options: list[str],
    said: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    out = tmp_path / "numbers.json"
    assert main(["bench", "gpu", *options, "--out", str(out)]) == 2
    assert said in " ".join(capfd.readouterr().err.split())
    assert not out.exists()
