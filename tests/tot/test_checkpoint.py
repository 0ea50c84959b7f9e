"""Checkpoint: the lines of a run, its partial tree, and files that are rejected."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tot import BFS, DFS, MCTS, Checkpoint, Solution, State, Task, Thought, ThoughtTree, Value, solve
from tot.api import run_search
from tot.config import SearchConfig
from tot.decoders import TaskError
from tot.running import run_to_end

SEARCH = BFS(thoughts=2, breadth=2, depth=3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


@pytest.fixture
def record(letters: Any, scripted: Any, two_levels: Any, path: Path) -> Callable[..., Solution]:
    """Run a search into a new trace without finishing the trace: record(search=..., watch=...)."""

    def run(task: Any = letters, table: Any = two_levels, search: Any = SEARCH, **options: Any) -> Solution:
        trace = Checkpoint.create(path)
        try:
            about = {"watch": options.pop("watch", None), "checkpoint": trace}
            options = {"search": search, "evaluator": Value(), "decoder": scripted(table)} | options
            return run_to_end(run_search(task, "q", SearchConfig.of(None, options), **about))
        finally:
            trace.close()

    return run


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def resumed(task: Any, decoder: Any, path: Path, search: Any = SEARCH, question: str = "q", **options: Any) -> Solution:
    trace = Checkpoint.resume(path)
    try:
        options = {"evaluator": Value(), "checkpoint": trace} | options
        return solve(task, question, decoder=decoder, search=search, **options)
    finally:
        trace.close()


# -- writing ----------------------------------------------------------------------------------------------------


def test_every_step_is_a_line(record: Any, path: Path) -> None:
    solution = record()
    header, start, *steps = lines(path)
    assert (header["format"], header["version"]) == ("tot.checkpoint", 2)
    assert (start["step"], start["task"], start["seed"]) == ("start", "Letters", 0)
    assert start["root"]["question"] == "q"
    assert start["search"]["name"] == "BFS"
    assert [(line["step"], line.get("nodes")) for line in steps] == [
        ("expand", [0]),
        ("evaluate", [1, 2]),
        ("expand", [2, 1]),
        ("evaluate", [3, 4, 5, 6]),
        ("answer", None),
    ]
    assert [line.get("calls") for line in steps] == [2, 2, 4, 4, 1]
    assert [line["spent"]["new_tokens"] for line in steps] == [10, 10, 20, 20, 5]
    assert steps[-1]["results"] == [solution.answer] == ["the end"]
    assert path.read_text().endswith("\n")


# -- the tree of a trace ----------------------------------------------------------------------------------------


@pytest.fixture
def compass(letters: Any) -> type[Task]:
    """A world where "n" and "e" commute: equal states are reached on different paths."""

    class Compass(letters):  # type: ignore[misc]
        def start(self, question: str) -> State:
            return State(question=question, world=[0, 0])

        def step(self, state: State, thought: Thought) -> State:
            assert isinstance(state.world, list)
            north, east = state.world
            return state.then(thought, [north + (thought.text == "n"), east + (thought.text == "e")])

    return Compass


EITHER_WAY = {"grow": ["n", "e"], "grow n": ["n", "e"], "grow e": ["n", "e"]}


@pytest.mark.parametrize(
    ("search", "merges"),
    [
        (SEARCH, False),
        (DFS(thoughts=2, depth=3, threshold=4), False),
        (MCTS(thoughts=2, depth=3, iterations=5), False),
        (SEARCH, True),
    ],
    ids=["bfs", "dfs-threshold", "mcts", "merged"],
)
def test_the_tree_of_a_killed_run_has_all_its_completed_steps(
    record: Any, path: Path, compass: Any, search: Any, merges: bool
) -> None:
    """Compare every field but the chosen path after every step: pruning, visits and links too."""
    pairs: list[tuple[Any, Any]] = []

    def compare(problem: Any) -> None:
        if len(problem.tree) > 1:
            pairs.append((ThoughtTree.load(path).to_json(), json.loads(json.dumps(problem.tree.to_json()))))

    merging = {"task": compass, "table": EITHER_WAY} if merges else {}
    record(**merging, search=search, watch=compare)
    assert len(pairs) >= 4
    for number, (read, grown) in enumerate(pairs):
        assert read == grown, f"after step {number}"


# -- rejected files ---------------------------------------------------------------------------------------------


def test_an_unfinished_run_is_not_overwritten(record: Any, path: Path) -> None:
    record()
    before = path.read_bytes()
    with pytest.raises(TaskError, match=r"run\.jsonl holds an unfinished run: continue it with --resume .*run\.jsonl"):
        Checkpoint.create(path)
    assert path.read_bytes() == before


def test_a_link_is_neither_followed_nor_replaced(path: Path, tmp_path: Path) -> None:
    path.symlink_to(tmp_path / "elsewhere")
    for open_it in (Checkpoint.create, Checkpoint.resume):
        with pytest.raises(TaskError, match=r"run\.jsonl can't be opened: it is a link; give another file$"):
            open_it(path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_pipe_is_refused_without_waiting_for_it(path: Path) -> None:
    os.mkfifo(path)
    for open_it in (Checkpoint.create, Checkpoint.resume, ThoughtTree.load):
        with pytest.raises(TaskError, match=r"run\.jsonl can't be .*not a regular file"):
            open_it(path)


def test_a_line_on_a_full_disk_is_written_whole_or_not_at_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Checkpoint.create(path, settings={"task": "gsm8k"})
    before = path.read_bytes()
    monkeypatch.setattr(trace, "_file", _Full(trace._file, room=9))
    with pytest.raises(
        TaskError, match=r"run\.jsonl can't be written: No space left on device; make room, then resume"
    ):
        trace.finish({})
    assert path.read_bytes() == before


class _Full:
    """A file on a disk with room for a few more bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self._room = file, room

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: memoryview) -> int:
        if not self._room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._file.write(data[: self._room])
        self._room -= written
        return int(written)


def test_a_file_that_cannot_be_begun_is_not_left_empty(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tot.search.checkpoint.append", full)
    with pytest.raises(TaskError, match=r"run\.jsonl can't be written: No space left on device"):
        Checkpoint.create(path)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("content", [b"{}\n", b"notes of mine\n", b'{"format": "tot.tree"}\n', b"\xff\xfe\n", b"x"])
def test_a_file_that_is_not_a_trace_is_neither_overwritten_nor_resumed(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(TaskError, match=r"run\.jsonl exists and is not a trace: give another file"):
        Checkpoint.create(path)
    with pytest.raises(TaskError, match=r"run\.jsonl is not a trace of a run: give the \.jsonl file"):
        Checkpoint.resume(path)
    assert path.read_bytes() == content


def test_a_missing_or_unwritable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"absent\.jsonl can't be opened: No such file or directory"):
        Checkpoint.resume(tmp_path / "absent.jsonl")
    with pytest.raises(TaskError, match=r"can't be opened: .*; give another file"):
        Checkpoint.create(tmp_path / "absent" / "run.jsonl")
    with pytest.raises(TaskError, match=r"can't be opened: Is a directory"):
        Checkpoint.create(tmp_path)


@pytest.mark.parametrize("damage", ["{", "[1]", '{"nodes": [0]}', "null", ""])
def test_a_damaged_line_is_named(record: Any, path: Path, damage: str) -> None:
    record()
    whole = path.read_text().splitlines()
    path.write_text("\n".join([*whole[:3], damage, *whole[4:]]) + "\n")
    with pytest.raises(TaskError, match=r"run\.jsonl, line 4 is damaged: delete it and the following lines"):
        Checkpoint.resume(path)


@pytest.mark.parametrize("version", [0, 1, 3, None])
def test_another_version_is_rejected_and_named(path: Path, version: Any) -> None:
    path.write_text(json.dumps({"format": "tot.checkpoint", "version": version}) + "\n")
    for open_it in (Checkpoint.create, Checkpoint.resume):
        with pytest.raises(
            TaskError, match=rf"run\.jsonl has version {version} of tot\.checkpoint: this program reads 2"
        ):
            open_it(path)


def test_a_trace_is_locked_by_one_process(python: Any, path: Path) -> None:
    code = (
        "import sys; from tot import Checkpoint; t = Checkpoint.create(sys.argv[1]); print('held', flush=True); input()"
    )
    holder: subprocess.Popen[str] = python("-c", code, str(path))
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    for open_it in (Checkpoint.create, Checkpoint.resume):
        with pytest.raises(TaskError, match=r"run\.jsonl is in use by another run: wait for it, or give another file"):
            open_it(path)
    holder.kill()
    holder.wait()
    Checkpoint.resume(path).close()  # a killed process releases its lock


# -- runs with other options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 1}, "its seed is 0, not 1"),
        ({"question": "other"}, "its root is .*'question': 'q'.*, not .*'question': 'other'"),
        ({"search": BFS(thoughts=2, breadth=1, depth=3)}, "its search is .*'breadth': 2.*, not .*'breadth': 1"),
        ({"search": MCTS()}, "its search is .*'name': 'BFS'.*, not .*'name': 'MCTS'"),
        ({"generator": "sample:thoughts=7"}, "its generator is .*'thoughts': 3.*, not .*'thoughts': 7"),
        ({"evaluator": Value(samples=2)}, "its evaluator is .*'samples': 1.*, not .*'samples': 2"),
        ({"max_tokens": 9}, "its max_tokens is None, not 9"),
    ],
)
def test_resuming_with_other_options_is_rejected_with_the_differences(
    record: Any, letters: Any, scripted: Any, two_levels: Any, path: Path, changed: Any, message: str
) -> None:
    record()
    before, decoder = path.read_bytes(), scripted(two_levels)
    with pytest.raises(TaskError, match=rf"run\.jsonl holds another run: {message}.*; resume it with the options"):
        resumed(letters, decoder, path, **changed)
    assert decoder.batches == []
    assert path.read_bytes() == before


def test_a_changed_task_is_rejected_at_the_first_difference(
    record: Any, letters: Any, scripted: Any, two_levels: Any, path: Path
) -> None:
    record()
    fussy = type("Letters", (letters,), {"is_terminal": lambda self, state: state.text == "b"})
    with pytest.raises(TaskError, match=r"its next step is expand of \[2, 1\], not expand of \[1\]; the"):
        resumed(fussy, scripted(two_levels), path)
