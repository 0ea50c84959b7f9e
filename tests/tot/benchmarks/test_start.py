"""The benchmark `start`: processes are measured from their start to the first token, and a failing one is reported."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.__main__ import main
from benchmarks.options import StartOptions
from benchmarks.start import run, start_llama

pytestmark = pytest.mark.benches

PEER = """#!{python}
import json, sys
load = json.loads(sys.stdin.readline())
print(json.dumps({{"about": load["model"]}}), flush=True)
(wave,) = json.loads(sys.stdin.readline())["waves"]
print(json.dumps({{"seconds": 1.0, "prefill": 0.5, "tokens": {tokens}}}), flush=True)
"""


@pytest.mark.real
def test_our_start_is_measured_warm(smollm2: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = StartOptions(model=smollm2, parts=("warm",), rounds=2, out=tmp_path / "n.json", llama=Path("missing"))
    run(options, Console(width=150, highlight=False))
    printed = capsys.readouterr().out
    assert "llama.cpp is left out: give a .gguf file as --model, and run `make peers`" in printed
    numbers = json.loads((tmp_path / "n.json").read_text())
    (measured,) = (value for name, value in numbers.items() if "seconds to the first token" in name)
    assert [(cell["side"], cell["column"], cell["round"]) for cell in measured["cells"]] == [
        ("tot", "warm", 0),
        ("tot", "warm", 1),
    ]
    assert all(cell["prompt_tokens"] > 40 and cell["ended"] > cell["seconds"] > 0 for cell in measured["cells"])


@pytest.mark.parametrize(("tokens", "fails"), [(1, False), (2, True)])
def test_a_peer_is_measured_from_its_start_to_its_token(tmp_path: Path, tokens: int, fails: bool) -> None:
    python = tmp_path / "python"
    python.write_text(PEER.format(python=sys.executable, tokens=tokens))
    python.chmod(0o755)
    if fails:
        with pytest.raises(Exception, match="2"):
            start_llama(python, tmp_path / "model.gguf", 7)
    else:
        assert start_llama(python, tmp_path / "model.gguf", 7)["seconds"] > 0


def test_a_command_that_fails_is_an_error_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["start", "--task", "chess", "--rounds", "1"]) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert "--max-tokens 1 --json` failed with status 2: tot: unknown task 'chess'" in err
