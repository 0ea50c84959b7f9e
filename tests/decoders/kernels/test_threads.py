"""The pool of threads: callers at once, forks, stopped processes, and changes of affinity."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tot.decoders import OptionError, load_decoder, machine
from tot.decoders.engine.runner import Runner
from tot.decoders.models.loaded import LoadedModel

CHILD = """
import os, sys, threading, time
from tot.config import SearchConfig
from tot.decoders import OptionError, load_decoder, machine
from tot.decoders.engine.runner import Chunk, Runner
from tot.decoders.models.loading import open_model

runner = Runner(open_model(sys.argv[1], dtype="fp32"), 3000)
texts = [[(3 * i + 7 * j) % 90 + 5 for j in range(60)] for i in range(12)]

def compute():
    branches = [runner.cache.open(text) for text in texts]
    result = runner.forward([Chunk(branch, 0, len(branch), [0]) for branch in branches])
    for branch in branches:
        runner.cache.rollback(branch, 0)
    runner.cache.clear()
    return result.logits.tobytes()

machine.use_threads(1)
expected = compute()

def repeat(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert compute() == expected
"""


@pytest.fixture
def child(lab: Any, tokenizer: Any, tmp_path: Path) -> Callable[[str], subprocess.Popen[str]]:
    """Start a process that computes with `expected`, `compute` and `repeat`, then runs some code."""
    lab.known().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}

    def start(code: str) -> subprocess.Popen[str]:
        try:
            return subprocess.Popen([sys.executable, "-c", CHILD + code, str(tmp_path)], **pipes)
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
            pytest.skip("an emulated processor can't start processes")

    return start


def succeeds(process: subprocess.Popen[str]) -> bool:
    output, _ = process.communicate("\n", timeout=60)
    return process.returncode == 0 and output.endswith("done\n")


def test_two_callers_at_once_get_the_same_results(lab: Any) -> None:
    model = lab.known()
    results: list[list[Any]] = [[], []]

    def run(number: int, runner: Runner, threads: int) -> None:
        machine.use_threads(threads)
        for turn in range(40):
            results[number].append(lab.computed(runner, [lab.text(30 + turn % 3, seed=i) for i in range(5)]))

    runners = [Runner(LoadedModel.of(lab.known()), 1000), Runner(LoadedModel.of(model), 1000)]
    callers = [threading.Thread(target=run, args=(i, runner, 3)) for i, runner in enumerate(runners)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for first, second in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert len(results[0]) == 40


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_computes_with_threads_of_its_own(child: Callable[[str], subprocess.Popen[str]]) -> None:
    code = """
machine.use_threads(3)
repeat(0.05)
other = threading.Thread(target=lambda: (machine.use_threads(3), repeat(0.3)))
other.start()  # the fork happens while it computes
if not (fork := os.fork()):
    assert compute() == expected
    assert len(os.listdir("/proc/self/task")) == 3 or sys.platform != "linux"
    os._exit(0)
_, status = os.waitpid(fork, 0)
assert status == 0
other.join()
repeat(0.05)
print("done")
"""
    assert succeeds(child(code))


def test_a_process_continues_after_it_was_stopped(child: Callable[[str], subprocess.Popen[str]]) -> None:
    process = child('machine.use_threads(2)\nprint("begins", flush=True)\nrepeat(0.5)\nprint("done")\n')
    assert process.stdout is not None
    assert process.stdout.readline() == "begins\n"
    for _ in range(8):
        time.sleep(0.02)
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.02)
        process.send_signal(signal.SIGCONT)
    assert succeeds(process)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_threads_follow_the_affinity_of_the_process(child: Callable[[str], subprocess.Popen[str]]) -> None:
    code = """
os.environ.pop("OMP_NUM_THREADS", None)
machine.use_threads(None)
every = os.sched_getaffinity(0)
changing = True
def change():
    while changing:
        for processors in ({min(every)}, every):
            os.sched_setaffinity(os.getpid(), processors)
            time.sleep(0.01)
for processors in ({min(every)}, every):
    os.sched_setaffinity(0, processors)
    assert machine.threads() <= len(processors)
    repeat(0.02)
other = threading.Thread(target=change)
other.start()
repeat(0.4)
changing = False
other.join()
print("done")
"""
    assert succeeds(child(code))


@pytest.mark.parametrize(
    ("variable", "threads"), [("2", 2), ("1,4", 1), ("100000", 4), ("0", 1), ("", 4), ("many", 4), ("-3", 4)]
)
def test_the_environment_limits_threads(monkeypatch: pytest.MonkeyPatch, variable: str, threads: int) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: range(4), raising=False)
    monkeypatch.setattr(machine, "_quota", lambda second: 100)
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert machine.threads() == threads


def test_an_engine_computes_with_its_own_number_of_threads(make_model: Callable[..., Any], tokenizer: Any) -> None:
    with (
        load_decoder("ar", make_model(), tokenizer=tokenizer, kv_budget=100, threads=5) as five,
        load_decoder("ar", make_model(), tokenizer=tokenizer, kv_budget=100, threads=2) as two,
    ):
        counts = [decoder.engine.call(machine.threads) for decoder in (five, two)]
    assert counts == [5, 2]


@pytest.mark.parametrize("threads", [0, -1, 1025, 2.5, "many"])
def test_an_invalid_number_of_threads_is_refused(make_model: Callable[..., Any], tokenizer: Any, threads: Any) -> None:
    with pytest.raises(OptionError, match=r"engine, option threads: .* \(its options: "):
        load_decoder("ar", make_model(), tokenizer=tokenizer, kv_budget=100, threads=threads)
