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
        ("def make(n): return lambda x: x + n", "assert make(2)(3) == 5"),
    ],
)  # fmt: skip
def test_correct_programs_pass_with_values_of_all_types(program: str, tests: str) -> None:
    assert check(program, [tests], Sandbox(seconds=30)).failures == ()
