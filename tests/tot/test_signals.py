"""Evaluations ended by a signal: finished samples are kept, and one line explains how to resume."""

from __future__ import annotations

import json
import os
import shlex
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
    _, given = err.split("tot: interrupted; the finished samples are in out: resume with tot ")
    assert shlex.split(given) == [*command[3:], "--resume"]
    assert len((tmp_path / "out" / "samples.jsonl").read_text().splitlines()) == 3
    again = [*command[:3], *shlex.split(given)]
    done = subprocess.run(again, cwd=tmp_path, env=path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "out" / "samples.jsonl").read_text().splitlines()) == 6


INTERRUPTED_IN = """
import os, signal, sys
from tot.__main__ import _interrupt
signal.signal(signal.SIGINT, _interrupt)
try:
    {}
except KeyboardInterrupt:
    print("KeyboardInterrupt")
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("import interrupted", (130, "", "tot: interrupted\n")),  # without an ImportError of an extension module
        ("os.kill(os.getpid(), signal.SIGINT)", (0, "KeyboardInterrupt\n", "")),
    ],
    ids=["import", "elsewhere"],
)
def test_an_interrupt_ends_an_import_at_once_and_is_an_exception_elsewhere(
    tmp_path: Path, code: str, result: tuple[int, str, str]
) -> None:
    (tmp_path / "interrupted.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "except BaseException:\n    raise ImportError('failed to import')\n"
    )
    command = [sys.executable, "-c", INTERRUPTED_IN.format(code)]
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == result


@pytest.mark.processes
def test_a_process_that_is_interrupted_while_a_model_loads_ends_at_once(tmp_path: Path) -> None:
    """The loading thread computes in C, and the line speaks of no sample."""
    (tmp_path / "q.jsonl").write_text('{"question": "q", "answer": "1"}\n')
    (tmp_path / "run.py").write_text(
        "import os, signal, sys, time\n"
        "import tot.llm.decoders\n"
        "def load(models, stack):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(1000)\n"
        "tot.llm.decoders.open_decoders = load\n"
        "sys.argv[1:] = 'eval gsm8k --data q.jsonl --search cot --prompts chat --out out'.split()\n"
        "from tot.cli.app import main\n"
        "main()\n"
        "print('os._exit was not called')\n"
    )
    ended = subprocess.run(
        [sys.executable, "run.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "tot: interrupted; no sample was finished\n")
    assert [path.name for path in (tmp_path / "out").iterdir()] == []


@pytest.mark.processes
def test_an_interrupt_before_the_command_can_handle_it_ends_it_quietly(tmp_path: Path) -> None:
    """Importing the package imports lazy_loader first."""
    (tmp_path / "lazy_loader.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    path = os.pathsep.join(map(str, [tmp_path, Path.cwd(), *sys.path]))
    command = [sys.executable, "-m", "tot", "--version"]
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
