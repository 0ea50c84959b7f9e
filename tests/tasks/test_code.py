"""Code tasks: parsing of replies, examples in questions, test results, and scoring."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tot import Observation, State, Task, Thought, solve
from tot.decoders.errors import OptionError, TaskError
from tot.evaluation.data import rows
from tot.running import run_to_end
from tot.sandbox import Sandbox, confines
from tot.tasks import MBPP, Code, HumanEval
from tot.tasks.checks import check
from tot.tasks.code import examples, whole

TASK = Code()
QUESTION = 'def double(x):\n    """Twice x.\n\n    >>> double(2)\n    4\n    >>> double("ab")\n    \'abab\'\n    """'
RIGHT, WRONG = "def double(x):\n    return x + x", "def double(x):\n    return x ** 2"


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


@pytest.fixture(scope="module")
def human_eval() -> list[dict[str, Any]]:
    return list(rows(HumanEval.data_set))


def acted(question: str, program: str) -> Observation:
    return run_to_end(TASK.act(State(question=question), Thought(parts={"program": program})))


# -- parsing of replies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fence", ["```", "~~~", "````"])
def test_a_fence_within_a_string_does_not_end_the_block(fence: str) -> None:
    program = f'def double(x):\n    """Twice.\n\n    {fence}\n    >>> double(1)\n    {fence}\n    """\n    return 2 * x'
    assert TASK.parse_thought("program", f"{fence}python\n{program}\n{fence}\nDone.") == program


@pytest.mark.parametrize("reply", ["```\n" * 500, "```python\n" * 300, "`" * 5000, "assert (" * 500, "(" * 5000])
def test_replies_of_only_fences_are_parsed_in_linear_time(reply: str) -> None:
    TASK.parse_thought("program", reply)
    assert examples(reply) == ()


def test_functions_in_several_blocks_form_one_program() -> None:
    reply = "```python\ndef a(): return 1\n```\nand\n```python\ndef b(): return a()\n```\n```python\nprint(b())\n```"
    assert TASK.parse_thought("program", reply) == "def a(): return 1\n\ndef b(): return a()"


ADD = "def add(x, y):\n    return x + y"


@pytest.mark.parametrize("reply", ["", "  \n ", "```python\n```"])
def test_an_empty_reply_is_not_a_program(reply: str) -> None:
    assert TASK.parse_thought("program", reply) is None


# -- examples ---------------------------------------------------------------------------------------------------

BEGUN = 'def f(x, y=0):\n    """What f does.\n    %s\n    """\n'


def test_asserts_in_a_question_are_examples_with_their_imports() -> None:
    question = "Write an area.\n\nimport math\nassert math.isclose(area(1), 3.14)\nassert area(\nassert that it works"
    assert examples(question) == ("import math\nassert math.isclose(area(1), 3.14)",)


def test_a_value_may_contain_a_hash_sign() -> None:
    question = BEGUN % ">>> f('#x')  # mark it\n    '#x#'  # so\n    >>> f('a')\n    '#a'"
    assert examples(question) == ("assert f('#x') == '#x#'", "assert f('a') == '#a'")


def test_a_question_without_examples_has_none() -> None:
    assert examples("Write a poem about f(1) and f(2).") == ()


def test_only_the_last_function_stub_is_called() -> None:
    assert examples("def g(x):\n    return x\n\n" + BEGUN % "g(1) -> 1 and\n    f(1) -> 2") == ("assert f(1) == 2",)


# -- test results -----------------------------------------------------------------------------------------------


@confined
def test_a_program_that_passes_all_examples_is_verified() -> None:
    observation = acted(QUESTION, RIGHT)
    assert (observation.text, observation.verified, observation.data) == (
        "All 2 examples pass.",
        True,
        {"passed": 2, "failed": 0},
    )


@confined
@pytest.mark.parametrize(
    ("program", "messages", "failed"),
    [
        ("def double(x): return x * 3", ["double(2) is 6, not 4", "double('ab') is 'ababab', not 'abab'"], 2),
        (WRONG, ["fails: TypeError: unsupported operand type", "in the line: return x ** 2"], 1),
        ("def double(x) return", ["SyntaxError: expected ':'"], 2),
        ("def twice(x): return 2 * x", ["double(2) is None, not 4"], 2),
        ("import numpy", ["ModuleNotFoundError: No module named 'numpy'"], 2),
        ("raise SystemExit(0)", ["SystemExit: 0"], 2),
        ("import os\nos._exit(0)", ["The program can't be tested: it ended before its tests did."], 2),
        ("def double(x):\n    import os; os._exit(0)", ["it ended before its tests did."], 2),
        ("print('x' * 10**7)", ["it wrote more than 64 KiB."], 2),
        ("def double(x): return double(x)", ["RecursionError"], 2),
        ("def double(x): return 'y' * 5000", ["double(2) is 'yyy", "..., not 4"], 2),
    ],
)
def test_a_failing_program_reports_its_errors(program: str, messages: list[str], failed: int) -> None:
    observation = acted(QUESTION, program)
    assert all(piece in observation.text for piece in messages), observation.text
    assert not observation.verified
    assert isinstance(observation.data, dict)
    assert observation.data["failed"] == failed
    assert len(observation.text) < 2500


@confined
def test_an_endless_program_reports_the_time_limit() -> None:
    checked = check("while True: pass", ["assert True"], Sandbox(seconds=0.5))
    assert checked.failures == ("The program can't be tested: it did not end within 0.5 s.",)
    assert checked.passed == 0


@confined
def test_without_examples_a_program_that_runs_is_terminal_and_unverified() -> None:
    observation = acted("Write a program.", "x = 1")
    assert (observation.text, observation.verified) == ("It runs; there are no examples to try it on.", False)
    state = State(question="q").then(Thought(parts={"program": "x = 1"}, observation=observation))
    assert TASK.is_terminal(state)


@confined
def test_code_in_the_question_is_put_before_the_program() -> None:
    question = "from math import tau\n\ndef helper(x):\n    return x + 1\n\n\n" + BEGUN % ">>> f(1)\n    2"
    assert acted(question, "def f(x, y=0):\n    return helper(x) if tau else 0").verified
    for words in ("Write f.", "fibonacci", "Task: fibonacci"):  # a word is valid Python
        assert whole(words, "def f(): pass") == "def f(): pass\n"


@confined
@pytest.mark.parametrize(
    "program",
    [
        "from dataclasses import dataclass\n\n\n@dataclass\nclass A:\n    x: int\n    after: 'A | None' = None\n\n\n"
        "def double(x):\n    return A(x).x * 2",
        "import pickle\n\n\nclass A:\n    pass\n\n\ndef double(x):\n    pickle.dumps(A())\n    return x * 2",
        "def double(x):\n    yield_ = (x for _ in range(2))\n    return sum(yield_, x - x) if x == 2 else x * 2",
        "from fractions import Fraction\n\n\ndef double(x):\n    return x * (Fraction(2) if x == 2 else 2)",
    ],
)
def test_programs_may_use_module_lookups_and_results_of_any_type(program: str) -> None:
    assert acted(QUESTION, program).verified


@confined
@pytest.mark.parametrize("body", ["    return x + x", "    y = x + x\n    return y", "return x + x"])
def test_a_bare_body_completes_the_function_stub_of_the_question(body: str) -> None:
    program = TASK.parse_thought("program", f"```python\n{body}\n```")
    assert program is not None
    assert acted(QUESTION, program).verified


@confined
def test_future_imports_are_put_before_the_question() -> None:
    assert acted(QUESTION, f"from __future__ import annotations\n\n{RIGHT}").verified


# -- data sets --------------------------------------------------------------------------------------------------


def test_questions_of_the_data_sets_have_examples(human_eval: list[dict[str, Any]], data: Path) -> None:
    assert len(human_eval) == 164
    assert sum(bool(examples(HumanEval().question_of(row))) for row in human_eval) >= 138
    mbpp = list(rows(data / "mbpp_dev.jsonl"))
    assert all(len(examples(MBPP().question_of(row))) == 1 for row in mbpp)
    assert all(row["test_list"][1] not in MBPP().question_of(row) for row in mbpp[:100])


@confined
def test_reference_solutions_pass_and_empty_ones_fail(human_eval: list[dict[str, Any]], data: Path) -> None:
    for row in human_eval[:8]:
        reference = HumanEval().reference_of(row)
        assert HumanEval().score(row["prompt"] + row["canonical_solution"], reference) == 1
        assert HumanEval().score(row["prompt"] + "    return None\n", reference) == 0
    for row in list(rows(data / "mbpp_dev.jsonl"))[:8]:
        assert MBPP().score(row["code"], MBPP().reference_of(row)) == 1
        assert MBPP().score("", MBPP().reference_of(row)) == 0
    assert MBPP().score(None, "assert True") == 0


@confined
def test_hidden_tests_do_not_verify(scripted_code: Any) -> None:
    """A program that passes the examples but fails the hidden tests ends the search and scores 0."""
    solution = solve("code", QUESTION, decoder=scripted_code(f"```python\n{RIGHT}\n```"))
    assert (solution.solved, TASK.score(solution.answer, "assert double(1) == 3")) == (True, 0.0)


@pytest.fixture
def scripted_code() -> Any:
    from tot.decoders import Completion, Usage

    class Scripted:
        def __init__(self, *replies: str) -> None:
            self.replies = list(replies)
            self.prompts: list[str] = []

        def generate(self, requests: Any) -> list[Completion]:
            self.prompts += [request.prompt[-1].content for request in requests]
            messages = [self.replies.pop(0) for request in requests for _ in range(request.sampling.n)]
            return [Completion(text, (), 0.0, "eos", Usage(new_tokens=5)) for text in messages]

    return Scripted


@confined
def test_refine_repairs_a_program_from_its_test_results(scripted_code: Any) -> None:
    decoder = scripted_code(WRONG, *["def double(x):\n    return 4"] * 5, WRONG, RIGHT, WRONG, WRONG, WRONG)
    solution = solve("code", QUESTION, decoder=decoder, search="refine:thoughts=5,depth=3")
    assert solution.solved
    assert "double('ab') is 4, not 'abab'" in decoder.prompts[-1] or "TypeError" in decoder.prompts[-1]
    assert "return" in decoder.prompts[-1]
    assert str(solution.answer).endswith(RIGHT + "\n")


def test_a_question_is_rejected_if_programs_cannot_be_sandboxed(
    monkeypatch: pytest.MonkeyPatch, scripted_code: Any
) -> None:
    confines.cache_clear()
    monkeypatch.setattr(Sandbox, "works", lambda self, by: False)
    try:
        with pytest.raises(OptionError, match="programs written by a model can't be confined here"):
            solve("code", QUESTION, decoder=scripted_code())
    finally:
        confines.cache_clear()


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        (MBPP, {"prompt": "p", "test_imports": [], "test_list": []}, "its test_list is empty"),
        (MBPP, {"prompt": "p", "test_imports": [], "test_list": "assert 1"}, "its test_list is 'assert 1', not a list"),
        (MBPP, {"prompt": "p", "test_imports": "import re", "test_list": ["assert 1"]}, "its test_imports is 'import"),
        (MBPP, {"prompt": "p", "test_imports": [], "test_list": [5]}, r"its test_list is \[5\], not a list of texts"),
        (HumanEval, {"prompt": ["p"], "test": "t", "entry_point": "f"}, r"its prompt is \['p'\], not text"),
        (HumanEval, {"prompt": "p", "test": ["t"], "entry_point": "f"}, r"its test is \['t'\], not text"),
    ],
)
def test_a_row_with_values_that_are_not_texts_is_rejected(task: type[Task], row: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        (task().question_of(row), task().reference_of(row))


def test_imports_are_optional_in_a_row() -> None:
    assert MBPP().question_of({"prompt": "p", "test_list": ["assert f(1)"]}) == "p\n\nassert f(1)"
