"""`tot eval` on real servers: its output folder, and resuming after the server is killed in mid-run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.real

PROBLEMS = 4
FRUIT = """
from tot import Task

class Fruit(Task):
    templates = {"chain": "{{ question }} Why?", "answer": "{{ question }} One word."}
    sampling = {"chain": {"max_tokens": 16}, "answer": {"max_tokens": 4}}
"""


@pytest.fixture
def tot_eval(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `tot eval` against a server, in an empty folder."""
    started: list[subprocess.Popen[str]] = []

    def start(server: Any, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tot.cli.app", "eval", *arguments]
        command += ["--model", server.model, "--decoder", "openai", "--decoder-option", f"base_url={server.url}"]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, cwd=tmp_path, text=True, stdout=pipe, stderr=pipe))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_gsm8k_is_evaluated_from_the_command_line(
    server: Any, tot_eval: Callable[..., subprocess.Popen[str]], data: Path, tmp_path: Path
) -> None:
    args = (
        "gsm8k",
        "--data",
        str(data / "gsm8k_test_0_400.jsonl"),
        "--limit",
        "1",
        "--search",
        "cot",
        "--prompts",
        "papers",
    )
    process = tot_eval(server, *args, "--max-tokens", "12", "--out", "out")
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err.count("Error")) == (0, 0), err
    assert "New tokens" in out
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (results["samples"], results["errors"]) == (1, 0)
    assert results["by_purpose"]["generate"]["calls"] == 1
    assert results["by_purpose"]["generate"]["prompt_tokens"] > 500
    assert 0 < results["tokens"] <= 2 * 12
    assert [path.suffix for path in (tmp_path / "out" / "trees").iterdir()] != []
    assert server.url in (tmp_path / "out" / "config.yaml").read_text()


def test_a_run_whose_server_is_killed_stops_and_resumes_when_it_is_back(
    server: Any, tot_eval: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    (tmp_path / "fruit.py").write_text(FRUIT)
    rows = [{"question": f"Name {count} fruits.", "answer": "x"} for count in range(2, 2 + PROBLEMS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = ["fruit.py:Fruit", "--data", "rows.jsonl", "--search", "cot", "--concurrency", "1"]
    args += ["--decoder-option", "retries=1"]

    broken = tot_eval(server, *args, "--out", "broken")
    file = tmp_path / "broken" / "samples.jsonl"
    while not file.exists() or not file.read_text():
        assert broken.poll() is None, broken.communicate()[1]
        time.sleep(0.01)
    server.kill()
    _, err = broken.communicate(timeout=60)
    assert broken.returncode == 2
    assert server.url in err
    assert "--resume" in err
    done = file.read_text()
    assert 1 <= done.count("\n") < PROBLEMS

    server.start()
    resumed = tot_eval(server, *args, "--out", "broken", "--resume")
    _, err = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, err
    assert file.read_text().startswith(done)
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    assert [sample["index"] for sample in samples] == list(range(PROBLEMS))
    assert [sample["error"] for sample in samples] == [None] * PROBLEMS
    assert len({sample["answer"] for sample in samples}) > 1
