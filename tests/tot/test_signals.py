"""Evaluations ended by a signal: finished samples are kept, and one line explains how to resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PARTS = """
import time
from pathlib import Path
from tot import Task
from tot.decoders import Completion, Usage

class Waits(Task):
    templates = {"thought": "{{ question }}", "answer": "answer {{ question }}"}
    depth = 2

class Decoder:
    chats = False
    def generate(self, requests):
        if "q3" in requests[0].prompt[-1].content:
            Path("waiting").touch()
            while not Path("signalled").exists():
                time.sleep(0.01)
        return [Completion("1", (), 0.0, "eos", Usage(new_tokens=1)) for one in requests for _ in range(one.sampling.n)]
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "signals",
    [[signal.SIGTERM], [signal.SIGHUP], pytest.param([signal.SIGINT, signal.SIGINT], marks=pytest.mark.smoke)],
)
def test_an_evaluation_ended_by_a_signal_explains_how_to_resume(signals: list[signal.Signals], tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(PARTS)
    rows = "".join(json.dumps({"question": f"q{i}", "answer": "1"}) + "\n" for i in range(6))
    (tmp_path / "q.jsonl").write_text(rows)
    command = [sys.executable, "-m", "tot.cli.app", "eval", "parts.py:Waits", "--decoder", "parts.py:Decoder"]
    command += ["--data", "q.jsonl", "--out", "out", "--search", "bfs:thoughts=1", "--evaluator", "random"]
    command += ["--concurrency", "1"]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [Path.cwd(), *sys.path]))}
    ignored = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and the process would inherit this
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=path
    )
    signal.signal(signal.SIGHUP, ignored)
    while not (tmp_path / "waiting").exists():
        assert process.poll() is None, process.communicate()
    for number in signals:
        process.send_signal(number)
    (tmp_path / "signalled").touch()
    out, err = process.communicate()
    assert process.returncode == 128 + signals[0], err
    assert "Traceback" not in out + err
    assert "tot: interrupted; the finished samples are in out: resume with --resume --out out" in err
    assert len((tmp_path / "out" / "samples.jsonl").read_text().splitlines()) == 3
    done = subprocess.run([*command, "--resume"], cwd=tmp_path, env=path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "out" / "samples.jsonl").read_text().splitlines()) == 6
