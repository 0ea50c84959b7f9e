"""The benchmark `answers`: sides take turns at the same questions, and a stopped run keeps its finished answers."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.answers import SEARCHING, TITLE, VOTING, PeerDecoder, default_ways
from tot.decoders import Request, Sampling
from tot.evaluation.config import EvaluationRun
from tot.llm.models import Models

pytestmark = pytest.mark.benches

TASK = """
from tot import Task

class Numbers(Task):
    templates = {"thought": "{{ question }}", "chain": "{{ question }}", "answer": "{{ question }}"}
    sampling = {"chain": {"max_tokens": 3}}
    search = "self-consistency"

    def parse_answer(self, text):
        return next((letter for letter in text if letter.isdigit()), None)

    def parse_truncated(self, text):
        return None

class Own(Numbers):
    data_set = "rows.jsonl"

class Lines(Numbers):
    sampling = {"chain": {"max_tokens": 3, "stop": ("\\n",)}}
    search = "bfs"

"""
PEER = """#!{python}
import json, sys, time
from pathlib import Path
load = {{"precision": "own", **json.loads(sys.stdin.readline())}}
print(json.dumps({{"about": "peer of " + Path(load["model"]).name + " " + load["precision"]}}), flush=True)
TEXTS = [["1", "9", "9"], ["5", "2", "2"], ["3", "4", "3"]]  # by question; the greedy answers come first
for line in sys.stdin:
    asked = json.loads(line)
    question = "".join(chr(token + 30) for token in asked["prompt"])
    asked["index"] = next(i for i, word in enumerate(("Ada", "Bo", "Cy")) if word in question)
    if Path("dies").exists() and asked["index"] == 1:
        sys.exit("out of memory")
    with open("asked.jsonl", "a") as log:
        log.write(json.dumps(asked) + "\\n")
    texts = TEXTS[asked["index"]][: asked["n"]]
    ids = [[3 + ord(text) - 33, *[2] * (asked["max_tokens"] > 1)] for text in texts]
    if not asked["ends"] and load["precision"] != "Q8_0":  # a trial of a slower setting
        time.sleep(0.4)
    print(json.dumps({{"seconds": 0.5, "samples": ids}}), flush=True)
"""
"""Characters are single tokens of the tiny tokenizer, whose token 2 ends a text."""
WAYS = (
    *("--way", "llama.cpp: peer=llama"),
    *("--way", "llama.cpp, votes: peer=llama; samples=3"),
    *("--way", "tot: search=cot"),
)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("benchmarks.peers.BUSY", 1000.0)
    decoder = tiny()

    def opened(models: Models, stack: Any) -> dict[str, Any]:
        """Return the objects that were given, such as a peer, and the tiny decoder in place of names."""
        given = {purpose: model.decoder for purpose, model in models.by_purpose.items()}
        return {purpose: decoder if isinstance(one, str) else one for purpose, one in given.items()}

    for place in ("tot.llm.decoders", "benchmarks.answers", "benchmarks.engines"):
        monkeypatch.setattr(f"{place}.open_decoders", opened)
    Path("numbers.py").write_text(TASK)
    Path("m.gguf").write_bytes(b"GGUF")
    rows = [{"question": f"{word}?", "answer": str(number)} for number, word in enumerate(("Ada", "Bo", "Cy"), 1)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("python").write_text(PEER.format(python=sys.executable))
    Path("python").chmod(0o755)


@pytest.fixture
def bench(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the benchmark with the scripted peer. Returns the status and the output without line breaks."""

    def run(*arguments: str, task: str = "Numbers", llama: str = "python") -> tuple[int, str, str]:
        data = () if task == "Own" else ("--data", "rows.jsonl")
        command = ("answers", "--task", f"numbers.py:{task}", *data, "--model", "m.gguf", "--out", "n.json")
        status = main([*command, "--llama", llama, "--vllm", "nowhere/python", *arguments])
        out, err = capfd.readouterr()
        return status, " ".join(out.split()), " ".join(err.split())

    return run


def cells(side: str = "") -> list[dict[str, Any]]:
    return [cell for cell in json.loads(Path("n.json").read_text())[TITLE] if side in ("", cell["side"])]


def requests() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("asked.jsonl").read_text().splitlines()]


def test_answers_of_all_sides_are_scored_and_compared(bench: Any) -> None:
    status, out, _ = bench(*WAYS, "--markdown", task="Own")
    assert status == 0
    plain, votes, ours = (cells(side) for side in ("llama.cpp", "llama.cpp, votes", "tot"))
    assert [(cell["index"], cell["answer"], cell["score"]) for cell in plain] == [(0, "1", 1), (1, "5", 0), (2, "3", 1)]
    assert [cell["answer"] for cell in votes] == ["9", "2", "3"]
    assert [cell["tokens"] for cell in votes] == [6, 6, 6]
    assert [cell["index"] for cell in ours] == [0, 1, 2]
    assert all(0 < cell["tokens"] <= 3 and cell["seconds"] > 0 for cell in ours)
    assert "| llama.cpp, votes | 3 | 66.7% (20.8% to 93.9%) | +0.0% (" in out
    assert re.search(r"\| llama.cpp, votes .*? \| 6 \|", out)
    # one answer is greedy, and votes are sampled as the task samples
    greedy, voting = (next(one for one in reversed(requests()) if one["n"] == n) for n in (1, 3))
    assert greedy["prompt"] == voting["prompt"]
    assert (greedy["temperature"], voting["temperature"], greedy["max_tokens"]) == (0.0, 0.7, 3)
    assert 2 in greedy["ends"]


def test_a_dead_peer_keeps_its_answers_and_resumes(bench: Any) -> None:
    Path("dies").touch()
    status, out, err = bench(*WAYS)
    assert status == 2
    assert "llama.cpp and llama.cpp, votes failed; the finished answers are kept: run the same command again" in err
    assert "llama.cpp failed: it ended with status 1 | out of memory" in out
    assert [len(cells(side)) for side in ("llama.cpp", "llama.cpp, votes", "tot")] == [1, 1, 3]
    before = cells("tot")
    Path("dies").unlink()
    Path("asked.jsonl").unlink()
    assert bench(*WAYS)[0] == 0
    assert sorted({asked["index"] for asked in requests()[2:]}) == [1, 2]  # two warm-ups come first
    assert [cell["index"] for cell in cells("llama.cpp")] == [0, 1, 2]
    assert cells("tot") == before


def test_a_higher_limit_extends_a_finished_run_and_other_options_are_refused(bench: Any) -> None:
    assert bench(*WAYS, "--limit", "1")[0] == 0
    before = Path("n.json").read_bytes()
    status, _, err = bench(*WAYS, "--offset", "1")
    assert (status, Path("n.json").read_bytes()) == (2, before)
    assert "n.json has no results of these options on this machine: delete it" in err
    first = cells("tot")
    status, out, _ = bench(*WAYS, "--limit", "3")
    assert (status, "resuming n.json" in out) == (0, True)
    assert (cells("tot")[:1], len(cells("tot"))) == (first, 3)
    status, out, _ = bench(*WAYS, "--limit", "2", "--markdown")
    assert "| llama.cpp, votes | 2 | 50.0% (" in out
    assert len(cells("tot")) == 3


def test_a_missing_peer_is_left_out(bench: Any) -> None:
    status, out, _ = bench(*WAYS, "--way", "vLLM: peer=vllm", "--limit", "1", llama="none/python")
    assert status == 0
    assert "llama.cpp, votes is left out: none/python does not exist: run `make peers`" in out
    assert "vLLM is left out: " in out
    assert {cell["side"] for cell in cells()} == {"tot"}
    Path("n.json").unlink()
    status, _, err = bench(*WAYS[:2], llama="none/python")
    assert (status, "no way can run: install a peer with `make peers`" in err) == (2, True)


def test_the_fastest_setting_is_used_also_after_resuming(bench: Any) -> None:
    way = ("--way", "llama.cpp: peer=llama; file=Q8_0")
    status, out, _ = bench(*way, "--limit", "1")
    assert status == 0
    assert all(f"{trial}: " in out for trial in ("default setting", "Q8_0", "5 lookup drafts"))
    chosen = json.loads(Path("n.json").read_text())["settings"]["llama.cpp"]
    Path("asked.jsonl").unlink()
    status, out, _ = bench(*way, "--limit", "2")
    assert status == 0
    assert json.loads(Path("n.json").read_text())["settings"]["llama.cpp"] == chosen
    assert all(change in out for change in chosen)
    assert len(requests()) == 2  # a warm-up and the new question: no trial
    assert [cell["index"] for cell in cells("llama.cpp")] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--way", "a: peer=llama; votes=3"), "--way a, option votes: unknown (its options: peer, samples, file)"),
        (("--way", "a: peer=sglang"), "--way a, option peer: Input should be 'llama' or 'vllm'"),
        (("--way", "a: peer=llama; samples=0"), "--way a, option samples: Input should be greater than or equal to 1"),
        (("--way", "a: peer=vllm; file=Q8_0"), "--way a: file=Q8_0 is for peer=llama"),
        (("--way", "a: search=cto"), "unknown search 'cto'"),
        (("--way", "peer=llama"), "--way 'peer=llama' can't be read"),
        (("--way", "a: search=cot", "--way", "a: search=bfs"), "--way 'a' is given twice"),
    ],
)
def test_invalid_options_are_rejected_before_a_model_is_opened(
    arguments: tuple[str, ...], message: str, bench: Any
) -> None:
    status, _, err = bench(*arguments)
    assert status == 2
    assert message in err
    assert not Path("n.json").exists()


def test_a_text_that_ends_at_a_string_is_refused(bench: Any) -> None:
    status, out, _ = bench(*WAYS, "--limit", "1", task="Lines")
    assert status == 0
    assert "llama.cpp, votes is left out: a text ends at the string" in out
    assert {cell["side"] for cell in cells()} == {"tot"}


def work(task: str = "Numbers", **options: Any) -> EvaluationRun:
    return EvaluationRun.of({"task": f"numbers.py:{task}", "data": "rows.jsonl", "model": "m.gguf", **options})


def test_a_peer_samples_the_token_ids_of_our_model(tiny: Any) -> None:
    class Process:
        def complete(self, prompt: list[int], n: int, **options: Any) -> dict[str, Any]:
            asked.update(options, prompt=prompt, n=n)
            return {"samples": [[*digits, 2], digits]}

    asked: dict[str, Any] = {}
    with tiny() as decoder:
        codec = decoder.engine.codec
        digits = codec.encode("77")
        peer: Any = PeerDecoder(Process(), codec, [2])  # type: ignore[arg-type]
        sampling = Sampling(max_tokens=3, n=2, top_k=4, seed=2**40)
        ended, cut = peer.generate([Request(prompt="Ada?", sampling=sampling)])
        assert (asked["prompt"], asked["n"]) == (codec.encode_prompt("Ada?"), 2)
    assert (asked["max_tokens"], asked["top_k"], asked["ends"], asked["seed"]) == (3, 4, [2], 2**40 % 2**31)
    assert (ended.text, ended.finish_reason, cut.text, cut.finish_reason) == ("77", "eos", "77", "length")
    assert (ended.usage.new_tokens, cut.usage.new_tokens) == (3, 2)


def test_default_ways_vote_where_the_task_votes() -> None:
    assert (default_ways(work()), default_ways(work("Lines"))) == (VOTING, SEARCHING)
