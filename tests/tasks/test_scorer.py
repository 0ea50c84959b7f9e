"""Scorers: valid and invalid output, and programs that crash, hang or cheat."""

from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

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
        ("import json; print(json.dumps({'score': 2}, indent=2))", 2.0),
        ("from fractions import Fraction; print(Fraction(-3, 4))", -0.75),
        ("import numpy; print(numpy.float32(0.5))", 0.5),
        ("print('x' * 100_000); print(4); print('y' * 100_000)", 4.0),
        ("import sys; sys.stdout.write('5\\n'); sys.exit(0)", 5.0),
        ("print(6); raise SystemExit", 6.0),
        ("print(6); exit()", 6.0),
        ("import candidate; print(len(dir(candidate)) + hasattr(candidate, 'f') + hasattr(candidate, 'g'))", 2.0),
        ("\ufeffprint(7)", 7.0),
        ("import os; print(os.path.basename(__file__) == 'score.py' and __name__ == '__main__'); print(8)", 8.0),
    ],
)
def test_a_script_prints_a_number_or_an_object(printed: str, score: float) -> None:
    assert Scorer(printed, packages=("numpy",)).score(DOUBLE).score == score


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
        ('print(\'{"score": 1, "score": 2}\')', "printed no score"),
        ("print(1); import sys; sys.exit(1)", "SystemExit: 1"),
        ("print(1); import sys; sys.exit('bad')", "SystemExit: bad"),
        ("print('nan')", "must be finite"),
        ("print('inf')", "must be finite"),
        ("print('-Infinity')", "must be finite"),
        ("print('1/0')", "printed no score"),
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


TOTAL = "from candidate import f\nprint(sum(map(lambda x: abs(f(x) - x * x), range(1, 20))))"
FAILS = "from candidate import f\ntry:\n    print(f(1).y)\nexcept Exception as error:\n    print(f'{error}')"
BROKEN = {  # a scorer, and a program that may get no score
    "ends the scorer's loop": (TOTAL, "def f(x): raise StopIteration"),
    "ends the scorer's loop by next()": (TOTAL, "def f(x): return next(y for y in () if y)"),
    "ends the scorer's generator": (TOTAL, "def f(x): raise GeneratorExit"),
    "ends the scorer's loop by a method": (
        "from candidate import A\nprint(sum(map(A().f, [1, 2])))",
        "class A:\n    def f(self, x): raise StopIteration",
    ),
    "ends its process where all exceptions are caught": (
        "from candidate import f\ntry:\n    f(1)\nexcept:\n    print(0)",
        "import os\ndef f(x): os._exit(0)",
    ),
    "returns NaN": ("from candidate import f\nprint(min(0.0, f(1)))", "def f(x): return float('nan')"),
    "returns NaN inside of a value": (
        "from candidate import f\nprint(min(f(1)['a'][0], 0.0))",
        "def f(x): return {'a': (float('nan'),)}",
    ),
    "returns an array with NaN": (
        "from candidate import f\nprint(f(1).max())",
        "import numpy\ndef f(x): return numpy.array([numpy.nan, 1])",
    ),
    "raises a score": (FAILS, "def f(x): raise ValueError(-999)"),
    "raises lines with a score": (FAILS, "def f(x): raise ValueError('\\n-999\\n')"),
    "describes an object by a score": (
        "from candidate import f\nprint(f(1))",
        "class A:\n    def __repr__(self): return '-999'\ndef f(x): return A()",
    ),
    "repeats a key": (
        'from candidate import f\nprint(\'{"score": 1, "by": "%s"}\' % f(1))',
        'def f(x): return \'", "score": -999, "z": "\'',
    ),
}


@pytest.mark.parametrize(("scorer", "program"), BROKEN.values(), ids=BROKEN)
def test_a_program_has_no_score_if_it(scorer: str, program: str) -> None:
    scored = Scorer(scorer, packages=("numpy",)).score(program)
    assert scored.score is None
    assert scored.text.startswith(("The program", "The scorer printed no score"))


HONEST = {  # a scorer, and a program that may not change its score
    "gives names of the scorer": (
        "import math\nfrom candidate import *\nprint(sum(map(abs, [f(1)])) + math.pi - math.pi)",
        "pi = math = sum = abs = None\ndef f(x): return 3",
    ),
    "changes its argument": (
        "from candidate import f\nxs = [1, 2]\nf(xs)\nprint(sum(xs))",
        "def f(xs): xs[:] = [-999]",
    ),
    "prints more than the limit": (
        "from candidate import f\nprint(3)\nprint('by', f(1))",
        "def f(x): return '\\n-999\\n' + 'x' * 9999",
    ),
    "has lines in a text": (
        "from candidate import f\nprint('by', f(1), 'x')\nprint(3)",
        "def f(x): return '\\n-999\\n'",
    ),
    "changes a constant later": (
        "import candidate\ncandidate.f(1)\nprint(candidate.N)",
        "N = 0\ndef f(x):\n    global N\n    N = 3",
    ),
}


@pytest.mark.parametrize(("scorer", "program"), HONEST.values(), ids=HONEST)
def test_a_score_stays_the_same_if_a_program(scorer: str, program: str) -> None:
    assert Scorer(scorer).score(program).score == 3


def test_a_scorer_can_catch_what_a_program_raises() -> None:
    script = "from candidate import f\ntry:\n    f(1)\nexcept KeyError:\n    print(-1)"
    assert Scorer(script).score("def f(x): return {}[x]").score == -1


def test_arrays_reach_the_program_and_come_back() -> None:
    script = "import numpy as np\nfrom candidate import f\nprint(f(np.arange(6.0).reshape(2, 3)).sum())"
    program = "import numpy as np\ndef f(x): return x.T @ np.ones(2, dtype=np.float32) * np.int64(x.shape[1])"
    assert Scorer(script, packages=("numpy",)).score(program).score == 45
    scored = Scorer(script).score(program)
    assert scored.score is None
    assert scored.text == (
        "ModuleNotFoundError: No module named 'numpy', in the line: import numpy as np. Only Python's standard library "
        "can be imported: the option packages=numpy adds it"
    )


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
    assert [one.score("bb").score, one.score("a").score, one.score("bb").score] == [2.0, 1.0, 2.0]
    assert next(calls) == 3  # twice for the first program, once for the second
    assert Scorer(scorer, repeats=4).score("a").margin == 0.0
    assert next(calls) == 8


@pytest.mark.parametrize("minimize", [False, True])
def test_a_lucky_best_score_is_repeated(minimize: bool) -> None:
    sign, draws = -1 if minimize else 1, iter([5, 5, 9, 1, 2, 1, 2, 3])
    one = Scorer(lambda program: sign * next(draws), minimize=minimize)
    assert one.score("steady").score == 5 * sign
    lucky = one.score("random")
    assert (lucky.score, lucky.margin > 1) == (3 * sign, True)
    assert one.score("bad").score == 3 * sign  # runs once


def test_a_function_that_fails_fails_the_program() -> None:
    assert Scorer(lambda program: {"score": 1.5}).score(DOUBLE).score == 1.5
    results: tuple[Any, ...] = (None, "7", b"7", True, np.True_, 10**400, 1j, np.ones(2), [7], {"score": 10**400})
    for wrong in (lambda program: {}[program], *(lambda program, result=result: result for result in results)):
        scored = Scorer(wrong).score(DOUBLE)
        assert scored.score is None
        assert scored.text.startswith("The scorer")


@pytest.mark.parametrize(
    "number", [np.float32(0.5), np.array([0.5]), Fraction(1, 2), Decimal("0.5"), torch.tensor(0.5), np.float64(0.5)]
)
def test_numbers_of_other_types_are_scores(number: Any) -> None:
    assert Scorer(lambda program: number).score(DOUBLE).score == 0.5
    scored = Scorer(lambda program: {"score": number, "size": np.int64(3), "right": True}).score(DOUBLE)
    assert (scored.score, scored.parts) == (0.5, {"score": 0.5, "size": 3.0})


def test_infinite_parts_and_exits_fail_the_program() -> None:
    opposite = Scorer(lambda program: {"a": float("inf"), "b": float("inf")}, weights={"a": 1.0, "b": -1.0})
    assert opposite.score(DOUBLE).text == "The score is nan: it must be finite."
    assert "SystemExit: 3" in Scorer(lambda program: exec("raise SystemExit(3)")).score(DOUBLE).text


def test_files_beside_a_script(tmp_path: Path) -> None:
    script = tmp_path / "score.py"
    for name in ("score.py", "start.py", ".hidden"):
        (tmp_path / name).write_text("x")
    (tmp_path / "cases.json").write_text(json.dumps([1, 2]))
    (tmp_path / "picture.png").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder").mkdir()
    assert files_beside(script, ["start.py"]) == {"cases.json": b"[1, 2]", "picture.png": b"\xff\xfe\x00"}
    (tmp_path / "large").write_bytes(bytes(8 << 20))
    with pytest.raises(OptionError, match="have 8 MiB, at most 8 are possible"):
        files_beside(script, [])
    with pytest.raises(OptionError, match="rename it"):
        Scorer("", {"plain.py": ""})
