"""The command: what it prints and writes, also when it is interrupted, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tot.bench.peers.here import Tot
from tot.bench.peers.run import Options, run
from tot.bench.peers.sides import Plan, open_sides
from tot.cli.app import main


@pytest.fixture
def among(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has the bench find these sides beside our own, which is a tiny model."""

    def put(*others: Any) -> None:
        monkeypatch.setattr("tot.bench.peers.here.load_decoder", lambda name, model, **options: tiny())
        monkeypatch.setattr("tot.bench.peers.run.few_shot_ids", lambda tokenizer: list(range(10, 60)))

        def opened(plan: Plan, stack: Any, say: Any) -> list[Any]:
            ours = Tot("tot", plan.model)
            stack.callback(ours.close)
            return [ours, *others]

        monkeypatch.setattr("tot.bench.peers.run.open_sides", opened)

    return put


def test_the_numbers_are_written_and_the_goals_judged(
    among: Any, paced: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    among(paced("vLLM", lambda samples: 1000.0), paced("generate, batched", lambda samples: 1e-9))
    out = tmp_path / "numbers.json"
    options = Options(branches=(1, 15), rounds=2, new_tokens=3, parts=("decode",), patience=1e9, out=out)
    run(options, Console(width=150, highlight=False))
    numbers = json.loads(out.read_text())
    assert {side: sorted(row) for side, row in numbers["decode"]["works"].items()} == {
        "tot": ["1", "15"],
        "vLLM": ["1", "15"],
        "generate, batched": ["1", "15"],
    }
    assert numbers["decode"]["works"]["vLLM"]["15"]["1"] == {"seconds": 1000.0, "tokens": 45}
    verdicts = {goal["what"]: goal["verdict"] for goal in numbers["goals"]}
    assert verdicts["decode, 15: tot / vLLM, tokens/s"] == "reached"
    assert verdicts["decode, 15: tot / generate, batched, tokens/s"] == "MISSED"
    assert verdicts["decode, 32: tot / vLLM, tokens/s"] == "not measured"
    printed = capsys.readouterr().out
    assert "MISSED" in printed
    assert "round 2: vLLM, 15: 1000.0 s, 0.0 tokens/s" in printed


def test_what_is_known_when_interrupted_is_printed(among: Any, paced: Any, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[int] = []

    def interrupted(samples: int) -> float:
        asked.append(samples)
        if asked == [1, 4, 1, 4]:  # two to warm up, and the second cell of the first round
            raise KeyboardInterrupt
        return 2.0

    among(paced("vLLM", interrupted))
    run(Options(branches=(1, 4), rounds=1, new_tokens=6, parts=("decode",), patience=1e9), Console(width=150))
    printed = capsys.readouterr().out
    assert "interrupted" in printed
    assert [cell.strip() for cell in next(line for line in printed.splitlines() if "│ vLLM" in line).split("│")][
        2
    ] == "3.0"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--parts", "decode,speed"), "unknown part 'speed'"),
        (("--sides", "llama,sglang"), "unknown side 'sglang'"),
        (("--branches", "1,few"), "--branches '1,few' can't be read"),
        (("--thoughts", "0"), "--thoughts '0' can't be read"),
    ],
)
def test_what_there_is_none_of_is_refused(
    arguments: tuple[str, ...], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "peers", *arguments]) == 2
    assert said in capfd.readouterr().err


def test_a_peer_that_is_not_installed_is_left_out_with_a_word_on_how_to_get_it(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from contextlib import ExitStack

    monkeypatch.setattr("tot.bench.peers.here.load_decoder", lambda name, model, **options: tiny())
    monkeypatch.setattr("tot.bench.peers.sides.find_model", lambda name: tmp_path / "a.Q4_1.gguf")
    said: list[str] = []
    nowhere = tmp_path / "python"
    with ExitStack() as stack:
        sides = open_sides(Plan("any", llama=nowhere, kinds=("llama",)), stack, said.append)
    assert [side.name for side in sides] == ["tot"]
    assert said[1:] == [
        f"llama.cpp, {precision} is left out: there is no {nowhere}: `make peers` installs it, or say where it is with "
        "--llama PYTHON"
        for precision in ("BF16", "F16", "Q8_0", "Q4_1")
    ]
