"""The command line on tasks without a model: data files, task files, traces, exports, and answers that are lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

from benchmarks.__main__ import main as benchmark
from tot import ThoughtTree
from tot.tree.saved import TRACE

PROBLEM = """(define (problem p) (:domain blocksworld-4ops) (:objects a b)
(:init (handempty) (ontable a) (on b a) (clear b)) (:goal (and (on a b))))"""
SYMBOLIC = ("--model", "none", "--search", "best-first", "--generator", "enumerate:prior=uniform")
TASK_FILE = '''
from tot import Task, State


class Count(Task):
    """From 0 to the number in the question, by steps of 1 and 2."""

    generator = "enumerate:prior=uniform"
    search = "best-first"

    def start(self, question):
        return State(question=question, world=0)

    def actions(self, state):
        return ["one", "two"]

    def step(self, state, thought):
        return state.then(thought, state.world + {"one": 1, "two": 2}[thought.text])

    def is_terminal(self, state):
        return state.world >= int(state.question)

    def is_goal(self, state):
        return state.world == int(state.question)

    def heuristic(self, state):
        return max(int(state.question) - state.world, 0) / 2

    def answer_at(self, state):
        return [thought.text for thought in state.thoughts] if self.is_goal(state) else None

    def verify(self, question, answer):
        return sum({"one": 1, "two": 2}[step] for step in answer) == int(question)
'''


def test_a_plan_is_found_for_a_data_row_and_verified(tot: Any, tmp_path: Path) -> None:
    done = PROBLEM.replace("(on a b))))", "(on b a))))")
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"pddl": pddl}) + "\n" for pddl in (done, PROBLEM)))
    status, out, err = tot("solve", "blocksworld", "--data", "x.jsonl", "--row", "1", *SYMBOLIC)
    assert (status, err) == (0, "")
    assert out.startswith("Answer (verified): (unstack b a)  (put-down b)  (pick-up a)  (stack a b)\nRight.\n")
    assert "Answer (verified): no action is needed" in tot("solve", "blocksworld", "--data", "x.jsonl", *SYMBOLIC)[1]


def test_a_plan_is_a_list_in_json(tot: Any) -> None:
    status, out, _ = tot("solve", "blocksworld", PROBLEM, *SYMBOLIC, "--json")
    run = json.loads(out)
    assert (status, run["solved"]) == (0, True)
    assert run["answer"] == ["(unstack b a)", "(put-down b)", "(pick-up a)", "(stack a b)"]


def test_a_task_can_be_a_file(tot: Any, tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(TASK_FILE)
    status, out, err = tot("solve", "my_task.py:Count", "5", "--model", "none")
    assert (status, err) == (0, "")
    assert "Answer (verified): one  two  two" in out or "Answer (verified): two  two  one" in out
    shallow = ("--search", "bfs:thoughts=2,depth=3", "--evaluator", "random")
    _, out, _ = tot("solve", "my_task.py:Count", "5", "--model", "none", *shallow)
    assert "Stopped early: no goal among 4 thoughts." in out


def test_a_row_without_the_columns_of_the_task_is_rejected_with_its_columns(tot: Any, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("puzzle,rank\n1 2 3 4,1\n")
    status, _, err = tot("solve", "game24", "--data", "x.csv")
    assert (status, err) == (2, "tot: x.csv, row 0 has no 'question' (it has puzzle, rank); give another row or file\n")


def test_out_writes_a_run_or_a_trace_that_ends_in_the_run(tot: Any, tmp_path: Path) -> None:
    arguments = ("solve", "blocksworld", PROBLEM, *SYMBOLIC)
    tot(*arguments, "--out", "run.json")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    tot(*arguments, "--out", "run.jsonl")
    first, *_, last = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert (first["format"], first["settings"]["task"], last["step"]) == ("tot.checkpoint", "blocksworld", "end")
    whole, traced = ThoughtTree.load("run.json").to_json(), ThoughtTree.load("run.jsonl").to_json()
    for tree in (whole, traced):
        for node in tree["nodes"]:
            node.pop("seconds", None)
    assert whole == traced
    assert last["run"]["answer"] == json.loads((tmp_path / "run.json").read_text())["answer"]


def test_an_unfinished_run_is_not_overwritten_and_can_be_resumed(tot: Any, tmp_path: Path) -> None:
    arguments = ("solve", "blocksworld", PROBLEM, *SYMBOLIC, "--out", "run.json")
    tot(*arguments[:-1], "whole.jsonl")
    *steps, _ = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    killed = "".join(steps[:4]).replace("whole.jsonl", "run.json")
    (tmp_path / "run.jsonl").write_text(killed + steps[4][:20])  # killed while writing its fifth line
    status, _, err = tot(*arguments)
    assert (status, err) == (
        2,
        "tot: run.jsonl holds an unfinished run: continue it with --resume run.jsonl, or delete it\n",
    )
    status, out, err = tot("solve", "--resume", "run.jsonl", "--json")
    assert (status, err, json.loads(out)["solved"]) == (0, "", True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", "whole.jsonl"]
    resumed, whole = (
        [node | {"seconds": 0} for node in ThoughtTree.load(name).to_json()["nodes"]]
        for name in ("run.json", "whole.jsonl")
    )
    assert resumed == whole


def test_a_finished_run_is_not_resumed(tot: Any) -> None:
    tot("solve", "blocksworld", PROBLEM, *SYMBOLIC, "--out", "run.jsonl")
    status, _, err = tot("solve", "--resume", "run.jsonl")
    assert (status, err) == (2, "tot: run.jsonl holds a finished run: there is nothing to resume\n")


def test_a_run_that_fails_in_the_task_is_saved(tot: Any, tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(TASK_FILE.replace("state.world + {", "1 / 0 + {"))
    status, _, err = tot("solve", "my_task.py:Count", "2", "--model", "none", "--out", "run.jsonl")
    assert status == 2
    assert err.startswith("tot: Count.step raised ZeroDivisionError: division by zero")
    *_, last = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [draft["thought"]["parts"]["thought"] for draft in last["results"][0][:2]] == ["one", "two"]
    (tmp_path / "my_task.py").write_text(TASK_FILE)
    status, out, err = tot("solve", "my_task.py:Count", "--resume", "run.jsonl", "--json")
    assert (status, err, json.loads(out)["answer"]) == (0, "", ["two"])


def test_a_finished_run_is_not_overwritten_without_a_request(tot: Any, tmp_path: Path) -> None:
    arguments = ("solve", "blocksworld", PROBLEM, *SYMBOLIC, "--out")
    tot(*arguments, "run.jsonl")
    before = (tmp_path / "run.jsonl").read_bytes()
    for out in ("run.jsonl", "run.json"):  # the steps of both are in run.jsonl
        status, _, err = tot(*arguments, out)
        assert (status, err) == (2, "tot: run.jsonl holds a finished run: give another file, or add --overwrite\n")
    assert (tmp_path / "run.jsonl").read_bytes() == before
    assert tot(*arguments, "run.jsonl", "--overwrite")[0] == 0


# -- code that a trace or a folder names is not run --------------------------------------------------------------


@pytest.fixture
def evil(tmp_path: Path) -> str:
    """A task file that leaves a mark when it is run."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'RAN')!r}, 'w')\n{TASK_FILE}")
    return f"{tmp_path}/evil.py:Count"


def write_trace(path: Path, **settings: Any) -> None:
    about = {"task": "blocksworld", "question": PROBLEM, "reference": None, "out": "run.json", "model": "none"}
    about |= {"search": "best-first", "generator": "enumerate:prior=uniform", **settings}
    path.write_text(json.dumps({**TRACE, "settings": about}) + "\n")


@pytest.mark.parametrize(
    "name", ["task", "tool", "tools", "search", "generator", "evaluator", "decoder", "nested", "folder", "file"]
)
def test_a_resumed_run_runs_no_code_that_its_trace_names(tot: Any, tmp_path: Path, evil: str, name: str) -> None:
    (tmp_path / "problem").mkdir()
    (tmp_path / "problem" / "score.py").write_text("print(1)")
    settings = {
        "tool": {"tool": [evil]},
        "tools": {"tools": [evil]},
        "nested": {"search": f"mcts:fast_evaluator={evil}"},
        "folder": {"task": str(tmp_path / "problem")},
        "file": {"task": f"optimize:score={tmp_path}/problem/score.py,best={tmp_path}/RAN"},
    }.get(name, {name: evil})
    write_trace(tmp_path / "run.jsonl", **settings)
    before = (tmp_path / "run.jsonl").read_bytes()
    status, out, err = tot("solve", "--resume", "run.jsonl")
    assert (status, out) == (2, "")
    assert "which is not installed, so it is not run: name it on the command line, too, if you trust it" in err
    assert not (tmp_path / "RAN").exists()
    assert (tmp_path / "run.jsonl").read_bytes() == before


def test_code_that_the_user_names_again_runs(tot: Any, tmp_path: Path, evil: str) -> None:
    write_trace(tmp_path / "run.jsonl", task="elsewhere/evil.py:Count", question="5")
    status, out, err = tot("solve", evil, "--resume", "run.jsonl", "--json")
    assert (status, err, json.loads(out)["solved"]) == (0, "", True)
    assert (tmp_path / "RAN").exists()


def test_a_resumed_run_is_written_beside_its_trace_only(tot: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    write_trace(tmp_path / "run.jsonl", out=str(tmp_path / "mine.txt"))
    status, out, err = tot("solve", "--resume", "run.jsonl")
    assert (status, err, "Saved to run.json;" in out) == (0, "", True)
    assert (tmp_path / "mine.txt").read_text() == "precious"
    (tmp_path / "mine.json").write_text('{"precious": 1}')
    write_trace(tmp_path / "mine.jsonl", out="mine.json")
    status, _, err = tot("solve", "--resume", "mine.jsonl")
    assert (status, "mine.json is not a tree of thoughts" in err) == (2, True)
    assert (tmp_path / "mine.json").read_text() == '{"precious": 1}'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.json", "mine.jsonl", "mine.txt", "run.json"]


@pytest.mark.parametrize("settings", [[], {"task": "gsm8k", "question": 3}, {"task": ["gsm8k"], "question": "q"}])
def test_damaged_settings_are_refused(tot: Any, tmp_path: Path, settings: Any) -> None:
    (tmp_path / "run.jsonl").write_text(json.dumps({**TRACE, "settings": settings}) + "\n")
    status, _, err = tot("solve", "--resume", "run.jsonl")
    assert (status, "run.jsonl was not written by `tot solve`" in err) == (2, True)


def test_reading_a_folder_runs_no_code_that_it_names(
    tot: Any, tmp_path: Path, evil: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "5", "answer": "5"}\n')
    assert tot("eval", evil, "--data", "q.jsonl", "--model", "none", "--out", "runs")[0] == 0
    (tmp_path / "RAN").unlink()
    assert tot("report", "runs")[0] == 0
    assert tot("eval", "--compare", "runs", "runs")[0] == 2  # its samples are not scored
    status, out, err = tot("eval", "--config", "runs/config.yaml", "--out", "again")
    assert (status, out) == (2, "")
    message = f"runs/config.yaml names the task {evil!r}, which is not installed, so it is not run"
    assert message in err
    assert benchmark(["calibrate", "--folder", "runs", "--out", "c.json"]) == 2
    assert message in capfd.readouterr().err
    assert not (tmp_path / "RAN").exists()
    assert tot("eval", evil, "--config", "runs/config.yaml", "--out", "again")[0] == 0
    assert (tmp_path / "RAN").exists()


def test_a_run_is_exported_as_a_graph(tot: Any, tmp_path: Path) -> None:
    tot("solve", "blocksworld", PROBLEM, *SYMBOLIC, "--out", "run.json")
    assert tot("report", "run.json", "--out", "tree.graphml")[0] == 0
    text = (tmp_path / "tree.graphml").read_text()
    assert "unstack b from a" in text
    assert len(nx.parse_graphml(text)) == len(ThoughtTree.load("run.json"))


def test_a_run_killed_before_its_first_step_can_be_started_again(tot: Any, tmp_path: Path) -> None:
    arguments = ("solve", "blocksworld", PROBLEM, "--out", "run.json")
    assert tot(*arguments, "--model", "absent.gguf")[0] == 2
    assert list(tmp_path.iterdir()) == []
    tot(*arguments[:-1], "whole.jsonl", *SYMBOLIC)
    header, start, *_ = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run.jsonl").write_text(header + start)  # killed before its first step was done
    assert tot(*arguments, *SYMBOLIC)[0] == 0
