"""The benchmarks `peers` and `start`, with scripted peers; and worker processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from rich.console import Console

from benchmarks import peers, start
from benchmarks.__main__ import main
from benchmarks.branches import Branches, decoded
from benchmarks.harness import SideError
from benchmarks.peer_process import PeerProcess

pytestmark = pytest.mark.benches

METRICS = ("", ": prefill tokens/s", ": decoding tokens/s")
WORKER = """#!{python}
import json, sys, time
load = json.loads(sys.stdin.readline())
print("starting up: {{not JSON", flush=True)
print(json.dumps({{"about": "fake 1.0 with " + load["model"]}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if load["model"] == "dies":
        print("out of memory", file=sys.stderr)
        sys.exit(3)
    if load["model"] == "hangs":
        time.sleep(60)
    if load["model"] == "errs":
        print(json.dumps({{"error": "too many sequences"}}), flush=True)
        continue
    print('"a string"', flush=True)
    samples = [[1] * asked["max_tokens"]] * asked["n"]
    if load["model"].startswith("short"):
        samples[0] = samples[0][1:]
    print(json.dumps({{"seconds": 0.5, "prefill": 0.25, "samples": samples}}), flush=True)
"""
WORK = Branches([1, 2, 3], 2, 4)


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter that runs the scripted worker instead of any program."""
    path = tmp_path / "python"
    path.write_text(WORKER.format(python=sys.executable))
    path.chmod(0o755)
    return path


@pytest.fixture
def process(python: Path) -> Iterator[Callable[..., PeerProcess]]:
    """Start a worker that answers, "dies", "hangs", raises ("errs") or samples too few tokens ("short")."""
    with ExitStack() as stack:

        def run(model: str = "well", **options: Any) -> PeerProcess:
            started = PeerProcess(python, "llama_worker", {"model": model}, **options)
            stack.callback(started.close)
            return started

        yield run


def test_replies_are_found_in_other_output(process: Any) -> None:
    side = process()
    assert side.about == "fake 1.0 with well"
    for measured in (side.run(WORK), side.run(WORK)):
        assert measured.pop("resident") > 2**20
        assert measured == {"seconds": 0.5, "prefill": 0.25, "tokens": 8}


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("dies", {}, r"it ended with status 3 \| out of memory"),
        ("errs", {}, "too many sequences"),
        ("hangs", {"patience": 0.3}, "no reply within 0 s"),
        ("short", {}, "it sampled 7 tokens instead of 8"),
    ],
)
def test_a_failing_worker_is_an_error_with_its_reason(process: Any, model: str, options: Any, message: str) -> None:
    side = process(model, **options)
    for _ in range(1 if options else 2):
        with pytest.raises(SideError, match=message):
            side.run(WORK)


def test_a_missing_interpreter_or_package_is_named() -> None:
    with pytest.raises(SideError, match="/nowhere/python can't be started"):
        PeerProcess(Path("/nowhere/python"), "llama_worker", {})
    with pytest.raises(SideError, match="No module named 'no_such_engine'"):
        PeerProcess(Path(sys.executable), "no_such_engine", {})


@pytest.fixture
def among(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the benchmarks use these sides beside tot with a tiny model."""

    def put(**others: Any) -> None:
        monkeypatch.setattr(peers, "load_decoder", lambda *names, **options: tiny())
        monkeypatch.setattr(peers, "BUSY", 1000.0)
        monkeypatch.setattr(peers, "mixed_ids", lambda *options: list(range(10, 60)))
        monkeypatch.setattr(peers, "open_peers", lambda *options: others)

    return put


def cells_of(path: Path, *titles: str) -> list[dict[str, Any]]:
    numbers = json.loads(path.read_text())
    return [cell for name, found in numbers.items() if name.partition(": ")[2].startswith(titles) for cell in found]


def first_column(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("|")]


def test_rates_of_branches_are_written_and_ratios_printed(
    among: Any, paced: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    among(vLLM=paced("vLLM", lambda samples: 1000.0))
    options: Any = {"branches": "1,15", "rounds": 2, "new_tokens": 3, "sides": "vllm"}
    asked = peers.Options(out=tmp_path / "n.json", markdown=True, **options)
    peers.run(asked, Console(width=150, highlight=False))
    decoded = cells_of(tmp_path / "n.json", "new tokens/s")
    assert sorted((cell["side"], cell["column"], cell["round"]) for cell in decoded) == [
        (side, column, turn) for side in ("tot", "vLLM") for column in (1, 15) for turn in (0, 1)
    ]
    assert {cell["tokens"] for cell in decoded if cell["column"] == 15} == {45}
    names = [f"{side}{metric}" for metric in METRICS for side in ("tot", "vLLM", "tot / vLLM")]
    assert first_column(capsys)[-10:] == [*names, "tot: GiB resident"]
    assert all(2**25 < cell["resident"] < 2**38 for cell in decoded if cell["side"] == "tot")
    assert {(cell["prefilled"], cell["decoded"]) for cell in decoded if cell["side"] == "vLLM"} == {
        (50 / 500, count * 2 / 500) for count in (1, 15)
    }
    assert all(0 < cell["prefill"] < cell["seconds"] for cell in decoded)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sides", "llama,sglang"), "option sides: Input should be 'none', "),
        (("--branches", "1,few"), "option branches: Input should be a valid integer"),
        (("--out", "nowhere/n.json"), "does not exist: create it first"),
    ],
)
def test_invalid_options_are_rejected(
    arguments: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["peers", *arguments]) == 2
    assert message in capfd.readouterr().err


def test_a_missing_peer_is_skipped_with_a_hint_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(peers, "find_model", lambda name: tmp_path / "a.Q4_1.gguf")
    monkeypatch.setattr("benchmarks.peer_process.find_model", lambda name: tmp_path / "a.Q4_1.gguf")
    messages: list[str] = []
    asked = peers.Options(llama=tmp_path / "absent", sides="llama")  # type: ignore[arg-type]
    assert peers.open_peers(asked, ExitStack(), messages.append) == {}
    assert messages[1] == (
        f"llama.cpp is left out: {tmp_path / 'absent'} does not exist: run `make peers`, or give an interpreter with "
        "--llama PYTHON"
    )


def test_llama_runs_with_the_fastest_setting_of_each_number_of_branches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """F16 prefills faster, Q4_0 decodes faster."""

    def scripted(*options: Any, setting: tuple[str, ...], **others: Any) -> Any:
        def run(work: Branches) -> dict[str, float]:
            if "BF16" in setting:
                raise SideError("no such kernel")
            prefill = 1.0 if "F16" in setting else 2.0
            a_token = 0.001 if "Q4_0" in setting else 0.01 if "F16" in setting else 0.1
            a_token *= 0.5 if "no flash attention" in setting else 1
            return {"seconds": prefill + a_token * work.count * work.new, "prefill": prefill}

        return SimpleNamespace(run=run, about="scripted")

    monkeypatch.setattr(peers, "find_model", lambda name: tmp_path / "a.Q4_1.gguf")
    monkeypatch.setattr("benchmarks.peer_process.llama_process", scripted)
    messages: list[str] = []
    lengths = {"prompt_tokens": len(peers._TRIAL_PROMPT), "new_tokens": peers._TRIAL_NEW}
    asked = peers.Options(sides="llama", branches=(1, 30), **lengths)  # type: ignore[arg-type]
    with ExitStack() as stack:
        sides = peers.open_peers(asked, stack, messages.append)
    assert list(sides) == ["llama.cpp, F16, no flash attention", "llama.cpp, Q4_0, no flash attention"]
    assert "BF16: left out, no such kernel" in messages
    assert "default setting: 1: 3.70 s, 30: 53.00 s" in messages


# -- beside other programs, and start ----------------------------------------------------------------------------


def test_both_sides_run_idle_and_beside_a_busy_core(
    among: Any, paced: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    among(**{"llama.cpp": paced("llama.cpp", lambda samples: 1000.0)})
    options: Any = {"branches": "1,3", "rounds": 1, "new_tokens": 3, "out": tmp_path / "n.json", "markdown": True}
    before = set(psutil.Process().children())
    peers.run(peers.Options(busy=True, **options), Console(width=200, highlight=False))
    assert set(psutil.Process().children()) <= before  # the busy programs ended
    cells = cells_of(tmp_path / "n.json", "new tokens/s")
    busy = peers.BESIDE
    assert {cell["side"] for cell in cells} == {"tot", f"tot, {busy}", "llama.cpp", f"llama.cpp, {busy}"}
    assert {cell["tokens"] for cell in cells if cell["column"] == 3} == {9}
    assert {"tot / llama.cpp", f"tot, {busy} / tot", f"llama.cpp, {busy} / llama.cpp"} <= {*first_column(capsys)}


@pytest.mark.real
def test_our_start_is_measured_warm(smollm2: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: Any = {"parts": "warm", "rounds": 1, "out": tmp_path / "n.json", "llama": Path("missing")}
    start.run(start.Options(model=smollm2, **options), Console(width=150, highlight=False))
    assert "llama.cpp is left out: give a .gguf file as --model, and run `make peers`" in capsys.readouterr().out
    (cell,) = cells_of(tmp_path / "n.json", "seconds to the first token")
    assert (cell["side"], cell["column"], cell["round"]) == ("tot", "warm", 0)
    assert cell["prompt_tokens"] > 40
    assert cell["ended"] > cell["seconds"] > 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_peer_is_measured_from_its_start_to_its_token(python: Path, tmp_path: Path, fails: bool) -> None:
    file = tmp_path / ("short.gguf" if fails else "model.gguf")
    file.write_bytes(b"GGUF")
    if fails:
        python.write_text(python.read_text().replace('.startswith("short")', ".endswith('short.gguf')"))
        with pytest.raises(SideError, match="it sampled 0 tokens instead of 1"):
            start.start_llama(python, str(file), 7)
    else:
        assert start.start_llama(python, str(file), 7)["seconds"] > 0


def test_a_command_that_fails_is_an_error_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["start", "--model", "absent.gguf", "--rounds", "1"]) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert "--max-tokens 1 --json` failed with status 2: tot: " in err


def test_branches_are_decoded_together_from_an_empty_cache(tiny: Any) -> None:
    with tiny() as decoder:
        for _ in range(2):
            measured = decoded(decoder, Branches(range(10, 60), 3, 4))
            assert measured["tokens"] == 12
            assert 0 < measured["prefill"] < measured["seconds"]
            assert decoder.engine.cache.stored == 50 + 3 * 3  # of this run alone
