"""Programs that try to pass their tests without being right."""

from __future__ import annotations

import os

import pytest

from tot.decoders.errors import OptionError
from tot.sandbox import Sandbox, confines
from tot.tasks import MBPP, Code, HumanEval
from tot.tasks.checks import check

TASK = Code()


@pytest.fixture
def _confined() -> None:
    """Skip if programs cannot be sandboxed; fail in CI."""
    try:
        confines()
    except OptionError as error:
        if "CI" in os.environ:
            pytest.fail(str(error))
        pytest.skip(str(error))


confined = pytest.mark.usefixtures("_confined")


EQUAL = "class E(int):\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\n"
DECEITS = {
    "a result equal to everything": EQUAL + "def add(a, b): return E()",
    "mock.ANY": "from unittest.mock import ANY\ndef add(a, b): return ANY",
    "a list equal to everything": "class L(list):\n    def __eq__(self, o): return True\ndef add(a, b): return L()",
    "another exec": "import builtins\nbuiltins.exec = lambda *a: None\ndef add(a, b): return 0",
    "another json": "import json\njson.loads = json.load = lambda *a: []\ndef add(a, b): return 0",
    "a test of its own": "open('tests.json', 'w').write('[]')\ndef add(a, b): return 0",
    "an early end": "import os\ndef add(a, b): os._exit(0)",
    "exit when loaded": "raise SystemExit(0)",
    "results of its own": "import os\nfor fd in range(64):\n    try: os.write(fd, b'null\\n' * 9)\n"
    "    except OSError: pass\ndef add(a, b): return 0",
    "answers for everything": "import json, os\nos.write(4, (json.dumps({'dict': []}) + '\\n').encode() * 9)\n"
    "def add(a, b): return 0",
    "a name of the tests": "def check(candidate): pass\ndef add(a, b): return 0",
    "a built-in of the tests": "def abs(x): return 0\ndef set(x): return 0\ndef add(a, b): return 0",
    "tests that it reads": "import re\nT = open('tests.json').read()\n"
    "def add(a, b): return int(re.search(r'== (.)', T)[1])",
    "an exception that is no failure": "class A(BaseException): pass\ndef add(a, b): raise A",
    "a code of its class": "class C:\n    def __init__(self): self.__class__ = int\ndef add(a, b): return C",
}
HIDDEN = (
    "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert abs(candidate(5, 7) - 12) < 1e-6\n\ncheck(add)"
)


@confined
@pytest.mark.parametrize("program", DECEITS.values(), ids=DECEITS)
def test_a_wrong_program_cannot_cheat_by(program: str) -> None:
    assert MBPP().score(program, HIDDEN) == 0
    assert MBPP().score(program, "assert add(1, 2) == 3\nassert set([add(5, 7)]) == {12}") == 0


UNFOUNDED = {  # tests with a weakness, and a wrong program that uses it
    "ends a loop": ("assert all(map(lambda x: f(x) == 2 * x, [1, 2]))", "def f(x): raise StopIteration"),
    "changes its argument": ("xs = [3, 1]\nassert f(xs) == sorted(xs)", "def f(xs):\n    xs.clear()\n    return []"),
    "returns NaN": ("assert not abs(f(2) - 4) > 1e-6", "def f(x): return float('inf') * 0"),
    "defines a missing constant": ("assert abs(f(2) - 4) < EPS", "EPS = 99\ndef f(x): return 0"),
    "ends where all is caught": ("try:\n    f(1)\nexcept BaseException:\n    pass", "import os\ndef f(x): os._exit(0)"),
    "defines all built-in names": ("assert abs(sum([1, 2]) - 3) == 0", "def sum(x): return 9\ndef abs(x): return 0"),
    "defines nothing": ("assert sum([1, 2]) == 3", "x = 1"),
}


@confined
@pytest.mark.parametrize(("tests", "program"), UNFOUNDED.values(), ids=UNFOUNDED)
def test_a_wrong_program_fails_weak_tests_if_it(tests: str, program: str) -> None:
    assert check(program, [tests], Sandbox(seconds=30)).passed == 0


@confined
def test_the_tested_function_may_have_the_name_of_a_built_in_one() -> None:
    row = {
        "prompt": 'import math\nEPS = 1e-9\n\ndef sum(xs):\n    """The sum."""\n',
        "test": "def check(candidate):\n    assert abs(candidate([1.5]) - math.sqrt(2.25)) < EPS\n",
        "entry_point": "sum",
    }
    task = HumanEval()
    assert task.score("def sum(xs): return xs[0]", task.reference_of(row)) == 1
    assert task.score("EPS = 9\ndef sum(xs): return 0", task.reference_of(row)) == 0
    assert task.score("EPS = 9", task.reference_of(row)) == 0


@confined
def test_a_program_cannot_replace_a_function_of_the_prompt() -> None:
    row = {
        "prompt": 'import math\n\n\ndef poly(x):\n    return x - 2\n\n\ndef root():\n    """Where poly is 0."""\n',
        "test": "def check(candidate):\n    assert math.isclose(poly(candidate()), 0)\n",
        "entry_point": "root",
    }
    task = HumanEval()
    assert task.score(row["prompt"] + "    return 2\n", task.reference_of(row)) == 1
    assert task.score(row["prompt"] + "    return 5\ndef poly(x): return 0\n", task.reference_of(row)) == 0


@confined
@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def sum(a, b): return a + b", "assert sum(1, 2) == 3"),
        ("def f(xs): xs.append(1)", "xs = []\nf(xs)\nassert xs == [1]"),
        ("def f(): raise KeyError('a')", "try:\n    f()\nexcept KeyError:\n    pass\nelse:\n    raise AssertionError"),
        ("def f():\n    yield from 'ab'", "assert list(f()) == ['a', 'b']"),
        ("class P:\n    def __init__(self, x): self.x = x\ndef f(p): return p.x",
         "assert f(P(3)) == 3\nassert P(4).x == 4"),
        ("def f(): return {(1, 'a'): {2, 3}, None: (1.5, float('inf'), 2 + 1j, b'x')}",
         "assert f() == {(1, 'a'): {3, 2}, None: (1.5, float('inf'), 2 + 1j, b'x')}"),
        ("def f(n): return 7 ** n", "assert f(9000) == 7 ** 9000"),
        ("from collections import Counter\ndef f(s): return Counter(s)", "assert f('aab') == {'a': 2, 'b': 1}"),
        ("def f(x): return x * 2", "def check(f):\n    assert f(2) == 4\n\ncheck(f)"),
        ("def f(): return float('nan')", "import math\nassert math.isnan(f())"),
        ("def sum(xs): return xs[0]", "from candidate import sum\nassert sum([abs(-1), 2]) == 1"),
        ("def make(n): return lambda x: x + n", "assert make(2)(3) == 5"),
    ],
)  # fmt: skip
def test_correct_programs_pass_with_values_of_all_types(program: str, tests: str) -> None:
    assert check(program, [tests], Sandbox(seconds=30)).failures == ()
