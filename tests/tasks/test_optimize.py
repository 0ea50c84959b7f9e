"""Optimize: candidates are edited, scored and shown; the best program is the answer and is on disk."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tot import Checkpoint, State, Thought, load_task
from tot.api import run_search
from tot.cli.app import main
from tot.config import SearchConfig
from tot.decoders import Completion, OptionError, TaskError, Usage
from tot.running import run_to_end
from tot.tasks.optimize import Optimize

WANTED = "Return a number close to 10."
START = "def number():\n    return 1\n"
SCORE = "from candidate import number\nprint(-abs(10 - number()))\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A task as a folder."""
    path = tmp_path / "ten"
    path.mkdir()
    (path / "task.md").write_text(WANTED)
    (path / "start.py").write_text(START)
    (path / "score.py").write_text(SCORE)
    return path


class Numbers:
    """A decoder that writes programs which return the given numbers, one after another, and records its prompts."""

    def __init__(self, *numbers: object) -> None:
        self.prompts: list[str] = []
        self._numbers = iter(numbers)

    def generate(self, requests: Any) -> list[Completion]:
        self.prompts += [request.prompt[-1].content for request in requests]
        return self.write(sum(request.sampling.n for request in requests))

    def write(self, count: int = 1) -> list[Completion]:
        texts = [f"```python\ndef number():\n    return {next(self._numbers)}\n```" for _ in range(count)]
        return [Completion(text, (), 0.0, "eos", Usage(new_tokens=5)) for text in texts]


def run(task: Any, decoder: Any, thoughts: int, **options: Any) -> Any:
    about = {name: options.pop(name, None) for name in ("watch", "checkpoint")}
    options = {"search": f"ab-mcts:iterations={thoughts},together=1", "decoder": decoder, **options}
    return run_to_end(run_search(task, WANTED, SearchConfig.of(None, options), **about))


def test_the_best_program_is_the_answer_and_on_disk(folder: Path, tmp_path: Path) -> None:
    best = tmp_path / "best.py"
    solution = run(Optimize(folder=folder, best=best), Numbers(4, 9, 30, "1 / 0", 2), 5)
    assert solution.answer == best.read_text() == "def number():\n    return 9\n"
    assert solution.value == -1.0
    assert [node.value for node in solution.tree][1:] == [-6.0, -1.0, -20.0, None, -8.0]


def test_a_program_with_one_of_the_two_markers_is_refused(folder: Path) -> None:
    solution = run(Optimize(folder=folder), Numbers("10\n# tot: begin", 4), 2)
    assert solution.answer == "def number():\n    return 4\n"


def test_a_search_never_loses_its_start(folder: Path) -> None:
    assert run(Optimize(folder=folder), Numbers(50, "1 / 0", 40), 3).answer == START


def test_the_prompt_shows_the_program_its_score_and_its_error(folder: Path) -> None:
    decoder = Numbers("1 / 0", *range(20, 40))
    task = Optimize(folder=folder)
    run(task, decoder, 1)
    assert START.strip() in decoder.prompts[0]
    assert "Its score is -9; higher is better." in decoder.prompts[0]
    root = task.start(WANTED)
    failed = step(task, root, "def number():\n    return 1 / 0\n", {"score": None, "text": "The program failed: oh"})
    (message,) = task.prompt("edit", failed)
    assert "It failed:\n\nThe program failed: oh" in message.content
    better = step(task, root, "def number():\n    return 3\n", {"score": -7.0, "parts": {"score": -7.0, "time": 0.5}})
    (message,) = task.prompt("edit", step(task, better, "def number():\n    return 4\n", {"score": -6.0}))
    assert "Its score is -6; higher is better." in message.content
    assert "Scores of the versions before it, in order: -9, -7." in message.content


def step(task: Optimize, state: State, program: str, data: dict[str, Any]) -> State:
    from tot.tree.thought import Observation

    nothing: dict[str, Any] = {"program": program, "score": None, "margin": 0.0, "parts": {}, "text": ""}
    observation = Observation(text="", data={**nothing, **data})
    thought = Thought(parts={"edit": f"```python\n{program}```"}, observation=observation)
    after = task.step(state, thought)
    assert after is not None
    return after


def test_edits_that_change_nothing_are_refused(folder: Path) -> None:
    solution = run(Optimize(folder=folder), Numbers(1, 1, 5), 3)
    assert [node.value for node in solution.tree][1:] == [-5.0]
    assert solution.tree.root.rejected == 2


def test_refused_drafts_have_no_value(folder: Path) -> None:
    solution = run(Optimize(folder=folder), Numbers(1, 4, 1), 0, search="best-of-n:samples=3")
    assert sorted(node.value or 0 for node in solution.tree if node.parent is not None) == [-6.0, 0, 0]
    assert solution.answer == "def number():\n    return 4\n"


def test_lower_scores_can_be_better(folder: Path) -> None:
    (folder / "score.py").write_text(SCORE.replace("-abs", "abs"))
    decoder = Numbers(50, 8, 0)
    solution = run(Optimize(folder=folder, minimize=True), decoder, 3)
    assert solution.answer == "def number():\n    return 8\n"
    assert solution.value == -2.0
    assert "lower is better" in decoder.prompts[0]


def test_a_start_is_optional(folder: Path) -> None:
    (folder / "start.py").unlink()
    decoder = Numbers(7, 8)
    assert run(Optimize(folder=folder), decoder, 2).answer == "def number():\n    return 8\n"
    assert decoder.prompts[0].startswith(f"{WANTED}\n\nWrite the program")
    assert run(Optimize(folder=folder), Numbers("1 / 0", "1 / 0"), 2).answer is None


def test_a_noisy_score_counts_at_the_worse_end_of_its_interval(folder: Path) -> None:
    def noisy(program: str) -> float:
        return 100 + next(calls) % 2 * 50 if "return 3" in program else 110

    calls = count()
    task = Optimize(score=noisy, start=folder / "start.py", repeats=4)
    assert run(task, Numbers(3), 1).answer == START


def test_the_value_of_a_start_that_stays_the_best_is_its_score(folder: Path) -> None:
    solution = run(Optimize(folder=folder), Numbers(30, "1 / 0"), 2)
    assert (solution.answer, solution.value) == (START, -9.0)


@pytest.mark.parametrize(
    "score",
    [
        b"\xef\xbb\xbf" + SCORE.encode(),
        "# -*- coding: latin-1 -*-\nfrom candidate import number\nprint(number() - len('\xe4') - 9)\n".encode(
            "latin-1"
        ),
        b"from pathlib import Path\nimport candidate\nprint(1 - int((Path(__file__).parent / 'ten').read_text()))",
        b"from data import TEN\nfrom candidate import number\nprint(number() - len(TEN))",
        b"import numpy as np\nfrom candidate import number\nprint(np.load('ten.npy').sum() * number())",
    ],
)
def test_scorers_as_people_have_them(folder: Path, score: bytes) -> None:
    (folder / "score.py").write_bytes(score)
    (folder / "start.py").write_bytes(b"\xef\xbb\xbf" + START.encode())
    (folder / "ten").write_text("10")
    (folder / "data.py").write_bytes("# coding: latin-1\nTEN = 'ten\xe4\xf6\xfc----'".encode("latin-1"))
    np.save(folder / "ten.npy", np.array([-10, 1]))
    task = Optimize(folder=folder)
    task.start(WANTED)
    assert task.scorer.score(START).score == -9.0


def test_numpy_is_available_by_default_and_other_packages_by_an_option(folder: Path) -> None:
    (folder / "start.py").write_text("import numpy as np\ndef number():\n    return np.int64(1)\n")
    task = Optimize(folder=folder)
    (prompt,) = task.prompt("edit", task.start(WANTED))
    assert "only its standard library and numpy can be imported" in prompt.content
    (folder / "score.py").write_text("import scipy.special\n" + SCORE)
    with pytest.raises(TaskError, match=r"library and numpy can be imported: the option packages=numpy\+scipy adds it"):
        Optimize(folder=folder).start(WANTED)
    Optimize(folder=folder, packages="numpy+scipy").start(WANTED)
    with pytest.raises(TaskError, match="No module named 'numpy'"):
        Optimize(folder=folder, packages="").start(WANTED)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda folder: (folder / "start.py").write_text("def number():\n    return 1 / 0\n"), "ZeroDivisionError"),
        (lambda folder: (folder / "start.py").write_text("def f(:"), "SyntaxError"),
        (lambda folder: (folder / "start.py").write_text("# tot: begin\nx = 1\n"), "one region at most"),
        (lambda folder: (folder / "score.py").write_text("print('great')"), "printed no score"),
    ],
)
def test_a_start_that_has_no_score_is_an_error(folder: Path, change: Callable[[Path], Any], reason: str) -> None:
    change(folder)
    with pytest.raises(TaskError, match=reason):
        run(Optimize(folder=folder), Numbers(), 1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "needs a scorer"),
        ({"score": "missing.py"}, "can't be read"),
        ({"seconds": 0}, "greater than 0"),
        ({"repeats": 0}, "greater than or equal to 1"),
        ({"scorer": "score.py"}, "did you mean score"),
        ({"weights": "speed:fast"}, "weights"),
        ({"packages": "numpy+nowhere"}, "nowhere is not installed"),
        ({"packages": "os.path"}, "os.path is not installed"),
    ],
)
def test_wrong_options_are_errors(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        Optimize(**options)


def test_a_task_can_be_named_with_options_or_as_a_folder(folder: Path) -> None:
    named = load_task(f"optimize:folder={folder},minimize=true,weights=speed:2+size:-0.5+right,seconds=3")
    assert isinstance(named, Optimize)
    assert named.options.minimize
    assert named.scorer.weights == {"speed": 2.0, "size": -0.5, "right": 1.0}
    assert named.scorer.seconds == 3
    assert load_task(str(folder)).example() == WANTED
    with pytest.raises(OptionError, match="task gsm8k has no options: leave score out"):
        load_task("gsm8k:score=score.py")
    with pytest.raises(OptionError, match="give a description, or a folder with task"):
        load_task(f"optimize:score={folder / 'score.py'}").example()


def test_the_scorer_is_part_of_a_run(folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "run.jsonl"
    checkpoint = Checkpoint.create(trace)
    run(Optimize(folder=folder), Numbers(4, 5), 2, checkpoint=checkpoint)
    checkpoint.close()
    lines = trace.read_text().splitlines()
    trace.write_text("\n".join(lines[:4]) + "\n")  # killed after the first program
    checkpoint = Checkpoint.resume(trace)
    again = run(Optimize(folder=folder), Numbers(6), 2, checkpoint=checkpoint)
    checkpoint.close()
    assert again.answer == "def number():\n    return 6\n"
    assert [node.value for node in again.tree][1:] == [-6.0, -4.0]
    (folder / "score.py").write_text(SCORE.replace("10", "11"))
    with pytest.raises(TaskError, match="holds another run"):
        run(Optimize(folder=folder), Numbers(6), 2, checkpoint=Checkpoint.resume(trace))


class Seeded:
    """A decoder whose programs depend on the seeds of their requests alone."""

    def generate(self, requests: Any) -> list[Completion]:
        seeds = [request.sampling.seed + i for request in requests for i in range(request.sampling.n)]
        return [one for seed in seeds for one in Numbers(seed % 97 - 48 if seed % 7 else "1 / 0").write()]


def test_a_resumed_run_has_the_same_lineage(folder: Path, tmp_path: Path) -> None:
    def lineage(solution: Any) -> list[tuple[int | None, float | None]]:
        return [(node.parent, node.value) for node in solution.tree]

    search = "ab-mcts:iterations=24,together=5"
    trace = tmp_path / "run.jsonl"
    checkpoint = Checkpoint.create(trace)
    whole = run(Optimize(folder=folder), Seeded(), 0, search=search, checkpoint=checkpoint, reproducible=True)
    checkpoint.close()
    lines = trace.read_text().splitlines()
    assert len(lineage(whole)) > 12
    assert max(node.depth for node in whole.tree) > 1
    for kept in (3, len(lines) // 2, len(lines) - 1):
        trace.write_text("\n".join(lines[:kept]) + "\n")
        checkpoint = Checkpoint.resume(trace)
        again = run(Optimize(folder=folder), Seeded(), 0, search=search, checkpoint=checkpoint, reproducible=True)
        checkpoint.close()
        assert lineage(again) == lineage(whole)
        assert again.answer == whole.answer


def test_a_budget_replaces_the_number_of_thoughts(folder: Path, tmp_path: Path) -> None:
    def thoughts(solution: Any) -> int:
        return len(solution.tree) - 1 + sum(node.rejected + node.merged for node in solution.tree)

    trace, options = tmp_path / "run.jsonl", {"search": "ab-mcts:together=1", "reproducible": True}
    assert thoughts(run(Optimize(folder=folder), Seeded(), 0, **options)) == 32
    checkpoint = Checkpoint.create(trace)
    limited = run(Optimize(folder=folder), Seeded(), 0, budget_nodes=40, checkpoint=checkpoint, **options)
    checkpoint.close()
    assert thoughts(limited) >= 40
    assert limited.stopped is not None
    checkpoint = Checkpoint.resume(trace)  # with a larger budget
    more = run(Optimize(folder=folder), Seeded(), 0, budget_nodes=45, checkpoint=checkpoint, **options)
    checkpoint.close()
    assert thoughts(more) >= 45
    assert [node.value for node in more.tree][: len(limited.tree)] == [node.value for node in limited.tree]


def test_a_disk_that_fills_ends_no_search(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    solution = run(Optimize(folder=folder, best=tmp_path / "missing" / "best.py"), Numbers(9), 1)
    assert solution.answer == "def number():\n    return 9\n"
    assert "the best program can't be written" in caplog.text


def test_a_second_model_is_asked_too(folder: Path) -> None:
    decoders = {"generate": Numbers(*range(20, 60)), "escalate": Numbers(*range(9, -60, -1))}
    solution = run(Optimize(folder=folder), decoders, 24)
    by_model = [len(decoder.prompts) for decoder in decoders.values()]
    assert min(by_model) > 0
    assert sum(by_model) == 24
    assert solution.answer == "def number():\n    return 9\n"


def test_the_command_line(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "none", "--search", "ab-mcts:iterations=2", "--json"]
    assert main(["solve", str(folder), *flags]) == 2
    assert "needs a model" in capfd.readouterr().err
    for given in (["--score", str(folder / "score.py")], ["--score", str(folder / "a,b.py")]):
        assert main(["solve", "optimize", *given, *flags]) == 2
    err = capfd.readouterr().err
    assert "the wanted program is not described" in err
    assert "contains a comma" in err


def test_looking_at_a_running_search_does_not_change_it(folder: Path) -> None:
    def watch(session: Any) -> None:
        before = session.search.best.id
        seen.append((before, session.answers.candidates[0].id, session.search.best.id))

    seen: list[tuple[int, int, int]] = []
    run(Optimize(folder=folder), Numbers(9, 50, 60, 4, *range(20, 60)), 0, search="act:depth=4", watch=watch)
    assert len(seen) > 3
    assert all(before == shown == after for before, shown, after in seen)
