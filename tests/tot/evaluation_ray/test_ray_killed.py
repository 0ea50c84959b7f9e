"""Killed workers and nodes lose no sample and duplicate none; a problem that kills its worker every time is given up.

These tests take 55 seconds, the slow ones 120.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tot.decoders import ModelError

pytestmark = pytest.mark.ray

PROBLEM = """(define (problem p) (:domain blocksworld-4ops) (:objects a b)
(:init (handempty) (ontable a) (on b a) (clear b)) (:goal (and (on a b))))"""
SYMBOLIC = ("--model", "none", "--search", "best-first", "--generator", "enumerate:prior=uniform")


def count(folder: Path) -> int:
    samples = folder / "samples.jsonl"
    return samples.read_bytes().count(b"\n") if samples.exists() else 0


def test_problems_of_a_killed_worker_are_repeated(
    tot: Any, python: Any, task: Any, address: str, lines: Any, when: Any, workers: Any, tmp_path: Path
) -> None:
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"pddl": PROBLEM}) + "\n" for _ in range(24)))
    command = ("eval", task("SlowBlocks"), "--data", "x.jsonl", *SYMBOLIC, "--concurrency", "6", "--repeats", "2")
    status, local_table, _ = tot(*command, "--out", "local", "--limit", "2")
    process = python("-m", "tot.cli.app", *command, "--executor", "ray", "--ray-address", address, "--out", "ray")
    when(lambda: count(tmp_path / "ray") > 4)
    killed = workers()[0]
    killed.kill()
    printed, errors = process.communicate(timeout=120)
    assert (process.returncode, status) == (0, 0)
    done = [json.loads(line + "}") for line in lines(tmp_path / "ray")]
    assert [sample["id"] for sample in done] == [f"{index}-{repeat}" for index in range(24) for repeat in range(2)]
    assert {json.dumps(sample["answer"]) for sample in done} == {json.dumps(done[0]["answer"])}
    assert lines(tmp_path / "ray")[:4] == lines(tmp_path / "local")
    assert len(re.findall("a Ray worker died", (tmp_path / "ray" / "log.txt").read_text())) == 1
    assert f"a Ray worker died (process {killed.pid} on 127.0.0.2), its searches are retried" in errors
    assert [line.split()[0] for line in printed.splitlines()] == [line.split()[0] for line in local_table.splitlines()]


@pytest.mark.slow
def test_other_nodes_take_over_the_work_of_a_killed_node(
    run: Any, cluster: Any, address: str, lines: Any, when: Any, tmp_path: Path, monkeypatch: Any, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    run("Riddles", out="local", repeats=10)
    node = cluster.again()
    cluster.wait_for_nodes()
    pids = tmp_path / "searched-in"
    pids.mkdir()

    def kill() -> int:
        when(lambda: len(list(pids.iterdir())) == 3 and count(tmp_path / "ray") > 0)
        cluster.remove_node(node, allow_graceful=False)
        return count(tmp_path / "ray")

    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill)
        run("Slow", out="ray", repeats=10, executor="ray", ray_address=address, concurrency=6)
        assert 0 < killing.result() < 80
    assert lines(tmp_path / "ray") == lines(tmp_path / "local")
    log = (tmp_path / "ray" / "log.txt").read_text()
    assert log.count("a Ray worker died") == 1
    printed, errors = capfd.readouterr()
    assert printed == ""
    assert "raylet" not in errors


@pytest.mark.slow
def test_a_problem_that_kills_its_worker_every_time_is_given_up(
    run: Any, rows: Path, address: str, lines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run("Riddles", out="local")
    rows.write_text(rows.read_text().replace('is 2?", "answer": "b"', 'is 2?", "answer": "death"'))
    results = run("Deadly", out="ray", executor="ray", ray_address=address)
    assert (results.samples, results.errors) == (8, 1)
    assert (tmp_path / "deaths").read_text() == "xxx"
    alike = [one == other for one, other in zip(lines(tmp_path / "ray"), lines(tmp_path / "local"), strict=True)]
    assert alike == [True, True, False, True, True, True, True, True]
    lost = json.loads((tmp_path / "ray" / "samples.jsonl").read_text().splitlines()[2])
    assert lost["error"].startswith("its Ray worker died 3 times, the last time while it ran only this search: ")
    assert (lost["score"], lost["usage"], lost["measured"]["seconds"]) == (0.0, {}, 0.0)


@pytest.mark.slow
def test_ctrl_c_stops_cleanly_a_model_error_is_raised_and_the_run_resumes(
    run: Any, echo: Any, address: str, lines: Any, workers: Any, when: Any, tmp_path: Path
) -> None:
    run("Riddles", out="local")

    def interrupt() -> None:
        when(lambda: count(tmp_path / "ray") > 1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run(out="ray", executor="ray", ray_address=address, concurrency=2, decoder=echo(0.2))
    done = lines(tmp_path / "ray")
    assert 1 < len(done) < 8
    assert f"interrupted with {len(done)} of 8 samples" in (tmp_path / "ray" / "log.txt").read_text()
    when(lambda: not workers())
    with pytest.raises(ModelError, match="the model is gone: bring it back"):
        run(out="ray", executor="ray", ray_address=address, decoder=echo(fails=True), resume=True)
    assert lines(tmp_path / "ray") == done
    run(out="ray", resume=True)
    assert lines(tmp_path / "ray") == lines(tmp_path / "local")
