"""A killed, interrupted or failed evaluation resumes and ends as if it had not stopped."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tot import BFS, TotError, Value, evaluate
from tot.evaluation.folder import Folder

SEARCH: dict[str, Any] = {"search": BFS(thoughts=2, breadth=1, depth=3), "evaluator": Value(), "max_tokens": 6}


@pytest.fixture
def run(letters: Any, rows: Path, tmp_path: Path) -> Callable[..., Any]:
    """Run evaluate() on the eight rows: run(decoder, out="out", limit=3)."""

    def evaluated(decoder: Any, out: str = "out", **options: Any) -> Any:
        return evaluate(letters, rows, out=tmp_path / out, decoder=decoder, **SEARCH | options)

    return evaluated


def lines(folder: Path) -> list[str]:
    """Return the lines of samples.jsonl without machine-dependent fields."""
    return [line.partition(', "measured"')[0] for line in (folder / "samples.jsonl").read_text().splitlines()]


def trees(folder: Path) -> list[Any]:
    """Return the trees of a folder without machine-dependent fields.

    These are times, and the last digits of log-probabilities, whose sum depends on the packing.
    """

    def compared(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: compared(each) for name, each in value.items() if name not in ("usage", "seconds")}
        if isinstance(value, float):
            return pytest.approx(value, rel=1e-4)
        return [compared(each) for each in value] if isinstance(value, list) else value

    return [compared(json.loads(path.read_text())) for path in sorted((folder / "trees").glob("[!.]*"))]


def forked(work: Callable[[], object]) -> int:
    """Return the process id of a fork that does the work and exits."""
    child = os.fork()
    if child == 0:
        status = 1
        signal.alarm(120)  # a watchdog ends a fork that hangs, and with it the test
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


# -- kill -9 ----------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("kills", [4, pytest.param(25, marks=pytest.mark.slow)])
def test_runs_killed_at_random_lose_and_duplicate_nothing(run: Any, tiny: Any, tmp_path: Path, kills: int) -> None:
    def work(out: str) -> None:
        with tiny() as decoder:
            run(decoder, out=out, reproducible=True, concurrency=3, repeats=2, resume=True)

    began = time.monotonic()
    os.waitpid(forked(lambda: work("whole")), 0)
    takes = time.monotonic() - began
    expected = lines(tmp_path / "whole")
    assert len(set(expected)) == 16
    chance = random.Random(kills)
    killed, finished, midway = 0, 0, 0
    while (killing := killed < kills or not midway) or not finished:
        out = f"killed-{finished}"
        child = forked(lambda out=out: work(out))  # type: ignore[misc]
        time.sleep(chance.uniform(0, takes if killing else 0))
        if killing:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert status in (0, signal.SIGKILL)
        killed += status != 0
        if (tmp_path / out / "samples.jsonl").exists():
            midway += 0 < len(lines(tmp_path / out)) < 16
        if status == 0:
            assert lines(tmp_path / out) == expected
            assert trees(tmp_path / out) == trees(tmp_path / "whole")
            assert len(list((tmp_path / out / "trees").glob("[!.]*"))) == 16
            assert json.loads((tmp_path / out / "results.json").read_text())["samples"] == 16
            finished += 1


@pytest.fixture
def whole(run: Any, scripted: Any, tmp_path: Path) -> Path:
    """The folder of a finished run."""
    run(scripted({}))
    return tmp_path / "out"


@pytest.mark.parametrize("keep", [0, 1, 5])
def test_only_a_torn_line_is_repeated(run: Any, scripted: Any, whole: Path, keep: int) -> None:
    expected = lines(whole)
    raw = (whole / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (whole / "samples.jsonl").write_bytes(b"".join(raw[:keep]) + raw[keep][: len(raw[keep]) // 2])
    decoder = scripted({})
    run(decoder, resume=True)
    assert lines(whole) == expected
    assert len([prompt for batch in decoder.prompts for prompt in batch if prompt == "grow"]) == 8 - keep


def test_samples_are_sorted_in_the_end_and_a_finished_run_sends_no_request(
    run: Any, scripted: Any, whole: Path
) -> None:
    before = (whole / "samples.jsonl").read_text().splitlines(keepends=True)
    (whole / "samples.jsonl").write_text("".join(before[5:] + before[:2]))
    run(scripted({}), resume=True, concurrency=2)  # which may change
    assert lines(whole) == [line.partition(', "measured"')[0] for line in before]
    assert (whole / "samples.jsonl").read_text().splitlines(keepends=True)[5:] == before[5:]
    finished, decoder = (whole / "samples.jsonl").read_bytes(), scripted({})
    assert run(decoder, resume=True).samples == 8
    assert (decoder.batches, (whole / "samples.jsonl").read_bytes()) == ([], finished)


def test_an_error_leaves_neither_a_lock_nor_a_tree_without_its_sample(tmp_path: Path) -> None:
    def fails() -> None:
        with Folder(tmp_path / "out", {}, {}, resume=False):
            (tmp_path / "out" / "trees" / "0-0.json").write_text("{}")
            raise RuntimeError("the real error")

    with pytest.raises(RuntimeError, match="the real error"):
        fails()
    assert not (tmp_path / "out" / "trees").exists()
    Folder(tmp_path / "out", {}, {}, resume=False).close()


# -- interrupts and full disks ----------------------------------------------------------------------------------


def test_ctrl_c_stops_cleanly_and_the_run_resumes(run: Any, scripted: Any, tmp_path: Path) -> None:
    class Scripted(scripted):  # type: ignore[misc]
        def generate(self, requests: Any) -> Any:
            if len(self.batches) == 12:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            return super().generate(requests)

    with pytest.raises(KeyboardInterrupt):
        run(Scripted({}), concurrency=1)
    done = lines(tmp_path / "out")
    assert 0 < len(done) < 8
    assert f"interrupted with {len(done)} of 8 samples" in (tmp_path / "out" / "log.txt").read_text()
    decoder = scripted({})
    assert run(decoder, resume=True).samples == 8
    assert lines(tmp_path / "out")[: len(done)] == done
    assert len([prompt for batch in decoder.prompts for prompt in batch if prompt == "grow"]) == 8 - len(done)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Limit the size of files, as a full disk does: writing beyond `size` bytes fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_reported_and_the_run_resumes(run: Any, scripted: Any, tmp_path: Path) -> None:
    run(scripted({}), out="whole")
    size = (tmp_path / "whole" / "samples.jsonl").stat().st_size
    room = size * 9 // 16  # ends in the middle of the fifth of eight lines
    assert max(file.stat().st_size for file in (tmp_path / "whole" / "trees").iterdir()) < room
    with files_of_at_most(room), pytest.raises(TotError, match=r"samples\.jsonl can't be written: .*--resume"):
        run(scripted({}))
    on_disk = (tmp_path / "out" / "samples.jsonl").read_bytes()
    assert (on_disk.count(b"\n"), on_disk.endswith(b"\n")) == (4, True)
    run(scripted({}), resume=True)
    assert lines(tmp_path / "out") == lines(tmp_path / "whole")


def test_samples_that_failed_are_tried_again(run: Any, scripted: Any, tmp_path: Path) -> None:
    class Server(scripted):  # type: ignore[misc]
        down = range(0)

        def generate(self, requests: Any) -> Any:
            completions = super().generate(requests)
            if len(self.batches) in self.down:
                raise ConnectionError("the server is down")
            return completions

    run(Server({}), out="whole")
    server = Server({})
    server.down = range(7, 12)
    failed = run(server, concurrency=1).errors
    assert 0 < failed < 8
    results = run(Server({}), resume=True)
    assert (results.errors, results.searched) == (0, failed)
    assert lines(tmp_path / "out") == lines(tmp_path / "whole")


# -- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"seed": 1, "limit": 4},
            r"with another configuration: seed was 0, now 1; limit was unset, now 4\. Resume",
        ),
        ({"max_tokens": 7}, r"max_tokens was 6, now 7"),
        ({"evaluator": Value(samples=2)}, "evaluator was value, now value:samples=2"),
        ({"search": "dfs"}, r"search was bfs:.*breadth=1, now dfs"),
        ({"reproducible": True}, r"reproducible was False, now True"),
    ],
)
def test_a_changed_configuration_is_rejected_with_its_differences(
    run: Any, scripted: Any, whole: Path, options: dict[str, Any], message: str
) -> None:
    before = (whole / "samples.jsonl").read_bytes()
    with pytest.raises(TotError, match=message):
        run(scripted({}), resume=True, **options)
    assert (whole / "samples.jsonl").read_bytes() == before


def test_other_data_and_another_model_are_rejected(
    run: Any, tiny: Any, scripted: Any, whole: Path, rows: Path, tmp_path: Path
) -> None:
    rows.write_text(rows.read_text() + "\n")
    with pytest.raises(TotError, match=r"configuration: data_sha256 was [0-9a-f]{16}, now [0-9a-f]{16}\."):
        run(scripted({}), resume=True)
    with tiny() as decoder:
        run(decoder, out="tiny", limit=1)
    with tiny() as decoder:
        next(iter(decoder.model.parameters())).data[0, 0] += 1
        with pytest.raises(TotError, match=r"model_sha256 was [0-9a-f]{16}, now [0-9a-f]{16}\."):
            run(decoder, out="tiny", limit=1, resume=True)


def test_the_folder_of_another_task_is_rejected(scripted: Any, whole: Path, rows: Path) -> None:
    with pytest.raises(TotError, match=r"task was tests\.tot\.conftest:Letters, now game24"):
        evaluate("game24", _puzzles(rows.with_name("24.jsonl")), out=whole, resume=True, decoder=scripted({}))


def _puzzles(path: Path) -> Path:
    path.write_text(json.dumps({"question": "4 9 10 13", "answer": "x"}) + "\n")
    return path


def test_the_limit_may_increase_but_not_decrease(run: Any, scripted: Any, whole: Path, tmp_path: Path) -> None:
    decoder, limits = scripted({}), (3, 5, None)
    for limit in limits:
        results = run(decoder, out="longer", limit=limit, resume=limit != 3)
        assert results.samples == (limit or 8)
        assert yaml.safe_load((tmp_path / "longer" / "config.yaml").read_text()).get("limit") == limit
    assert lines(tmp_path / "longer") == lines(whole)
    assert len([prompt for batch in decoder.prompts for prompt in batch if prompt == "grow"]) == 8
    configs = [yaml.safe_load((path / "config.yaml").read_text()) for path in (tmp_path / "longer", whole)]
    assert configs[0] == configs[1]
    with pytest.raises(TotError, match="limit was unset, now 7"):
        run(decoder, out="longer", limit=7, resume=True)


def test_other_package_versions_are_reported(run: Any, scripted: Any, whole: Path, capfd: Any) -> None:
    config = (whole / "config.yaml").read_text()
    torch = yaml.safe_load(config)["record"]["versions"]["torch"]
    (whole / "config.yaml").write_text(config.replace(f"torch: {torch}", "torch: '1.0'"))
    run(scripted({}), resume=True)
    assert f"resumes with another version: torch was 1.0, now {torch}" in capfd.readouterr().err


def test_a_folder_is_not_overwritten(run: Any, scripted: Any, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(TotError, match="holds an evaluation: continue it with --resume, or give another folder"):
        run(scripted({}))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    for resume in (False, True):
        with pytest.raises(TotError, match="mine is not the folder of an evaluation"):
            run(scripted({}), out="mine", resume=resume)
    assert [path.name for path in (tmp_path / "mine").iterdir() if path.name != ".lock"] == ["thesis.tex"]


def test_two_runs_cannot_write_one_folder(run: Any, scripted: Any, tmp_path: Path) -> None:
    class Scripted(scripted):  # type: ignore[misc]
        def generate(self, requests: Any) -> Any:
            if not self.batches:
                with pytest.raises(TotError, match="out is in use by another run"):
                    run(scripted({}), resume=True)
                self.refused = True
            return super().generate(requests)

    first = Scripted({})
    assert run(first).samples == 8
    assert first.refused


def test_a_damaged_line_is_named(run: Any, scripted: Any, whole: Path) -> None:
    raw = (whole / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (whole / "samples.jsonl").write_bytes(b"".join([*raw[:2], b"{]\n", *raw[3:]]))
    with pytest.raises(
        TotError, match=r"samples\.jsonl, line 3 is damaged: delete that line, then continue with --resume"
    ):
        run(scripted({}), resume=True)
