"""The benchmark `optimize`: the shipped problems, the table, and searches that resume."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.__main__ import main
from benchmarks.harness import Cells
from benchmarks.optimize import Options, Problem, described, run, table
from tot.api import solve
from tot.decoders import Completion, Usage
from tot.tasks.optimize import Optimize

pytestmark = pytest.mark.benches
PROBLEMS = Path(__file__).parents[3] / "benchmarks" / "problems"


@pytest.mark.parametrize(
    ("problem", "start", "reference"),
    [
        ("bin-packing", 4.82, 4.82),
        ("traveling-salesman", 7.86, 7.86),
        ("oscillator", -0.47, -0.92),
    ],
)
def test_the_reference_is_at_least_as_good_as_the_start(problem: str, start: float, reference: float) -> None:
    known = Problem(PROBLEMS / problem).known()
    assert known["start"]["score"] == pytest.approx(start, abs=0.005)
    assert known["reference"]["score"] == pytest.approx(reference, abs=0.005)
    if problem in ("bin-packing", "traveling-salesman", "oscillator"):  # the other instances differ
        assert known["start"]["held out"] not in (None, known["start"]["score"])


def test_the_true_formula_of_the_oscillator_has_no_error() -> None:
    terms = "[math.sin(t), v**3, x**3, x * v, x * math.cos(x), x + v, x, v]"  # the last one depends on the two before
    program = f"import math\ndef terms(t, x, v):\n    return {terms}\n"
    result = Optimize(folder=PROBLEMS / "oscillator").scorer.score(program)
    assert result.score == pytest.approx(-8, abs=0.001)
    found = [result.parts[f"weight {i}"] for i in range(8)]
    assert found == pytest.approx([0.8, -0.5, -0.2, -0.5, -1, 0, 0, 0], abs=1e-6)


@pytest.mark.parametrize(
    ("problem", "program", "reason"),
    [
        ("bin-packing", "def priority(item, room):\n    return None\n", "TypeError"),
        ("traveling-salesman", "def next_city(position, start, cities):\n    return len(cities)\n", "return an index"),
        ("oscillator", "def terms(t, x, v):\n    return []\n", "a list of 1 to 10 numbers"),
        ("oscillator", "def terms(t, x, v):\n    return [x] * (1 + (t > 1))\n", "different lengths"),
        ("oscillator", "def terms(t, x, v):\n    return [1e999]\n", "not finite"),
    ],
)
def test_invalid_programs_have_no_score(problem: str, program: str, reason: str) -> None:
    result = Optimize(folder=PROBLEMS / problem).scorer.score(program)
    assert result.score is None
    assert reason in result.text


class Numbers:
    """A decoder that writes programs which return the given numbers."""

    def __init__(self, *numbers: object) -> None:
        self._numbers = iter(numbers)

    def generate(self, requests: Any) -> list[Completion]:
        texts = [f"```python\ndef number():\n    return {next(self._numbers)}\n```" for _ in requests]
        return [Completion(text, (), 0.0, "eos", Usage(new_tokens=5)) for text in texts]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A problem: a number close to 10."""
    path = tmp_path / "ten"
    path.mkdir()
    (path / "task.md").write_text("Return a number close to 10.")
    (path / "start.py").write_text("def number():\n    return 1\n")
    (path / "reference.py").write_text("def number():\n    return 8\n")
    (path / "score.py").write_text(
        "from candidate import number\nfrom instances import WANTED\nprint(abs(WANTED - number()))\n"
    )
    (path / "instances.py").write_text("WANTED = 10\n")
    (path / "held_out.py").write_text("WANTED = 11\n")
    return path


def test_a_search_is_described_by_its_best_program(folder: Path) -> None:
    problem = Problem(folder)
    decoder = Numbers(3, "1 / 0", 9, 9, 4)
    search = "ab-mcts:iterations=5,together=1"
    found = described(problem, solve(problem.task, problem.task.example(), decoder=decoder, search=search))
    assert (found["score"], found["held out"]) == (1.0, 2.0)
    assert found["program"] == "def number():\n    return 9\n"
    assert (found["thoughts"], found["tokens"]) == (5, 25)
    assert found["failed"] >= 1


def table_of(model: Path, folder: Path, ways: list[str], seeds: int, out: Path) -> str:
    screen = StringIO()
    options = Options(model=str(model), problems=(str(folder),), way=ways, seeds=seeds, out=out)
    run(options, Console(file=screen, width=240))
    return screen.getvalue()


@pytest.mark.smoke
def test_the_table_has_the_start_the_reference_and_all_ways(folder: Path, small: Path, tmp_path: Path) -> None:
    out = tmp_path / "numbers.json"
    ways = ["drafts: search=best-of-n:samples=2; max_tokens=8", "tree: search=ab-mcts:iterations=3; max_tokens=8"]
    printed = [table_of(small, folder, ways, seeds, out) for seeds in (1, 2)]
    assert all(name in printed[0] for name in ("start", "reference", "minus drafts"))
    cells = json.loads(out.read_text())[str(folder)]
    assert [(cell["side"], cell["round"]) for cell in cells if cell["round"] == 0] == [("drafts", 0), ("tree", 0)]
    assert len(cells) == 4  # the second run adds one seed
    assert all(cell["score"] == 9.0 and cell["held out"] == 10.0 for cell in cells)  # the start


def test_a_program_that_fails_on_the_held_out_instances_counts_as_the_start(folder: Path) -> None:
    about = {"tokens": 10, "thoughts": 2, "failed": 0, "seconds": 1.0, "round": 0, "column": ""}
    cells = [
        {"side": side, "score": score, "held out": held_out, **about}
        for side, score, held_out in (("a", 1.0, 2.0), ("b", 0.0, None))
    ]
    found = table(Cells([""], 1, cells), Problem(folder), "ten")
    rows = dict(zip(found.columns[0].cells, zip(*(c.cells for c in found.columns[1:]), strict=True), strict=True))
    assert rows["start"][2] == "10"
    assert rows["a"][4] == "1 of 1"  # better than 3, the reference
    assert rows["b"][1:5] == ("0", "", "+8 (one value)", "0 of 1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--problems", "knapsack"), "unknown problem 'knapsack': choose bin-packing, oscillator, traveling-salesman"),
        (("--way", "search=bfs"), "can't be read: write 'NAME: option=value"),
        (("--way", "a: search=bfs:width=2"), "option width"),
        (("--seeds", "0"), "greater than or equal to 1"),
    ],
)
def test_invalid_options_are_errors(
    capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main(["optimize", "--model", "none", *arguments]) == 2
    assert message in capfd.readouterr().err
