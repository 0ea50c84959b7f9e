"""Scorers: valid and invalid output, and programs that crash, hang or cheat."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tot.decoders import OptionError
from tot.tasks.scorer import NOISY_REPEATS, Scorer, files_beside

DOUBLE = "def f(x):\n    return 2 * x\n"
SCRIPT = "from candidate import f\nprint(sum(f(i) == 2 * i for i in range(10)) / 10)\n"


@pytest.mark.parametrize(
    ("printed", "score"),
    [
        ("print(3)", 3.0),
        ("print(-2.5e3)", -2500.0),
        ("print('cases: 4'); print(0.25)", 0.25),
        ('print(\'{"score": 2, "time": 7}\')', 2.0),
    ],
)
def test_a_script_prints_a_number_or_an_object(printed: str, score: float) -> None:
    assert Scorer(printed).score(DOUBLE).score == score


def test_the_program_is_the_module_candidate() -> None:
    assert Scorer(SCRIPT).score(DOUBLE).score == 1.0
    assert Scorer(SCRIPT).score("def f(x):\n    return 6\n").score == 0.1


def test_other_output_is_shown() -> None:
    scored = Scorer("from candidate import f\nf(1)\nprint('three cases')\nprint(1)").score(
        "def f(x):\n    print('called with', x)\n"
    )
    assert scored.text == "three cases\ncalled with 1"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("", "printed no score"),
        ("print('good')", "printed no score"),
        ("print(1); print(2)", "printed 2 scores"),
        ("print('nan')", "must be finite"),
        ("print('inf')", "must be finite"),
        ("print('-Infinity')", "must be finite"),
        ("print('1 2')", "printed no score"),
        ("print('{\"time\": 7}')", "no number 'score'"),
        ('print(\'{"score": "high"}\')', "no number 'score'"),
        ("1 / 0", "The scorer failed on it: ZeroDivisionError"),
        ("import candidate; candidate.g", "The scorer failed on it: AttributeError"),
        ("while True: pass", "did not end within 1 s"),
    ],
)
def test_a_script_without_one_finite_score_fails(source: str, reason: str) -> None:
    scored = Scorer(source, seconds=1).score(DOUBLE)
    assert scored.score is None
    assert reason in scored.text


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("def f(x:", "SyntaxError"),
        ("def f(x):\n    return 1 / 0", "The program failed: ZeroDivisionError: division by zero, in the line: return"),
        ("import sys\nsys.exit(0)", "SystemExit"),
        ("def f(x):\n    while True: pass", "did not end within 1 s"),
        ("x = [0] * 10**10", "MemoryError"),
        ("import os\nos._exit(0)", "it ended before"),
    ],
)
def test_a_program_that_fails_has_no_score(program: str, reason: str) -> None:
    scored = Scorer(SCRIPT, seconds=1).score(program)
    assert scored.score is None
    assert reason in scored.text


@pytest.mark.parametrize(
    "program",
    [
        "print(9)\ndef f(x):\n    print(9)\n    return 0\n",
        "import os\nos.write(1, b'9\\n')\nos.write(2, b'9\\n')\ndef f(x):\n    return 0\n",
        "import sys\nsys.modules['candidate'] = sys\ndef f(x):\n    return 0\n",
        "class Equal(int):\n    def __eq__(self, other):\n        return True\ndef f(x):\n    return Equal(1)\n",
    ],
)
def test_a_program_cannot_print_or_fake_its_score(program: str) -> None:
    assert Scorer(SCRIPT).score(program).score in (0.0, 0.1)


@pytest.mark.parametrize("name", ["score.py", "cases.json", "../score.py"])
def test_a_program_cannot_read_the_script_or_its_files(name: str) -> None:
    scorer = Scorer(SCRIPT + "open('cases.json').read()\n", {"cases.json": "[1]"})
    assert scorer.score(DOUBLE).score == 1.0
    assert "FileNotFoundError" in scorer.score(f"text = open({name!r}).read()\n{DOUBLE}").text


def test_weights_combine_the_numbers_of_an_object() -> None:
    script = "import json\nprint(json.dumps({'right': 3, 'seconds': 2, 'note': 'x'}))"
    scored = Scorer(script, weights={"right": 1.0, "seconds": -0.5}).score(DOUBLE)
    assert scored.score == 2.0
    assert scored.parts == {"right": 3.0, "seconds": 2.0}
    assert "no number 'size'" in Scorer(script, weights={"size": 1.0}).score(DOUBLE).text


def test_a_scorer_that_changes_its_mind_is_repeated() -> None:
    calls = count()
    scored = Scorer(lambda program: float(next(calls) % 2)).score(DOUBLE)
    assert next(calls) == NOISY_REPEATS
    assert scored.score == pytest.approx(2 / 5)
    assert scored.margin == pytest.approx(2.776 * (0.3 / 5) ** 0.5, rel=1e-3)


def test_a_scorer_with_equal_scores_runs_once() -> None:
    calls = count()

    def scorer(program: str) -> float:
        next(calls)
        return float(len(program))

    one = Scorer(scorer)
    assert [one.score("a").score, one.score("bb").score, one.score("a").score] == [1.0, 2.0, 1.0]
    assert next(calls) == 3  # twice for the first program, once for the second
    assert Scorer(scorer, repeats=4).score("a").margin == 0.0
    assert next(calls) == 8


def test_a_function_that_fails_fails_the_program() -> None:
    assert Scorer(lambda program: {"score": 1.5}).score(DOUBLE).score == 1.5
    results: tuple[Any, ...] = (None, "7", True, 10**400, {"score": 10**400})
    for wrong in (lambda program: {}[program], *(lambda program, result=result: result for result in results)):
        scored = Scorer(wrong).score(DOUBLE)
        assert scored.score is None
        assert scored.text.startswith("The scorer")


def test_files_beside_a_script(tmp_path: Path) -> None:
    script = tmp_path / "score.py"
    for name in ("score.py", "start.py", ".hidden"):
        (tmp_path / name).write_text("x")
    (tmp_path / "cases.json").write_text(json.dumps([1, 2]))
    (tmp_path / "picture.png").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder").mkdir()
    assert files_beside(script, ["start.py"]) == {"cases.json": "[1, 2]"}
    with pytest.raises(OptionError, match="rename it"):
        Scorer("", {"plain.py": ""})
