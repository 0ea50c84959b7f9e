"""Programs: what is read of a reply, the examples of a question, what running them shows, and what counts as right."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tot import Observation, State, Task, Thought, load_task, solve
from tot.data import rows
from tot.decoders.errors import OptionError
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
    """Where programs can be confined; in CI they have to be."""
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


# -- what is read of a reply ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply",
    [
        RIGHT,
        f"```python\n{RIGHT}\n```",
        f"Sure!\n\n```python\n{RIGHT}\n```\nIt adds x to itself:\n```\ndouble(2)\n```",
        f"```py\n{RIGHT}",
        f"  ```Python3\n  {RIGHT.replace(chr(10), chr(10) + '  ')}\n  ```",
        f"~~~\n{RIGHT}\n~~~",
        f"```bash\npip install def\n```\n```python\n{RIGHT}\n```",
        f"\n\n{RIGHT}\n\n",
    ],
)
def test_a_program_is_the_python_in_a_reply(reply: str) -> None:
    assert TASK.parse_thought("program", reply) == RIGHT


def test_functions_in_several_blocks_are_one_program() -> None:
    reply = "```python\ndef a(): return 1\n```\nand\n```python\ndef b(): return a()\n```\n```python\nprint(b())\n```"
    assert TASK.parse_thought("program", reply) == "def a(): return 1\n\ndef b(): return a()"


@pytest.mark.parametrize("reply", ["", "  \n ", "```python\n```"])
def test_nothing_is_no_program(reply: str) -> None:
    assert TASK.parse_thought("program", reply) is None


# -- examples ---------------------------------------------------------------------------------------------------

BEGUN = 'def f(x, y=0):\n    """What f does.\n    %s\n    """\n'


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (">>> f(1)\n    2", ["assert f(1) == 2"]),
        (">>> f(1)\n    2\n    >>> f('a')\n    [1, 'b']", ["assert f(1) == 2", "assert f('a') == [1, 'b']"]),
        (">>> f(1) == 2", ["assert f(1) == 2"]),
        ("f(1) ➞ 2", ["assert f(1) == 2"]),
        ("f([1, (2)]) => [2]  # as it is", ["assert f([1, (2)]) == [2]"]),
        ("f('a)') ==> 'b'.", ["assert f('a)') == 'b'"]),
        ("f(1)==>True", ["assert f(1) == True"]),
        ("f(1) => false", ["assert f(1) == False"]),
        ("f(1) should return 'x'", ["assert f(1) == 'x'"]),
        ("f(1)   # returns 2", ["assert f(1) == 2"]),
        ("so f(1) = 2, and f(2) is 3", ["assert f(2) == 3"]),
        ("f(1) == 2 and f(2) == 3", ["assert f(2) == 3"]),
        ("f(1, y=2) -> {'a': None}", ["assert f(1, y=2) == {'a': None}"]),
        ("f(n) = f(n - 1) + 1", []),
        ("f(a) -> 2", []),
        ("g(1) -> 2", []),
        ("f(1) is nice", []),
        ("f(__import__('os').getpid()) -> 2", []),
        (">>> f(1)\n    <object>", []),
        ("f(1 -> 2", []),
    ],
)
def test_examples_are_calls_with_literals_and_what_they_give(text: str, found: list[str]) -> None:
    assert examples(BEGUN % text) == tuple(found)


def test_asserts_in_a_question_are_examples_with_what_they_import() -> None:
    question = "Write an area.\n\nimport math\nassert math.isclose(area(1), 3.14)\nassert area(\nassert that it works"
    assert examples(question) == ("import math\nassert math.isclose(area(1), 3.14)",)


def test_an_assert_may_stand_at_the_end_of_a_sentence() -> None:
    assert examples("Write area(r). assert area(0) == 0") == ("assert area(0) == 0",)


def test_a_question_without_examples_has_none() -> None:
    assert examples("Write a poem about f(1) and f(2).") == ()


def test_only_the_last_function_that_is_begun_is_called() -> None:
    assert examples("def g(x):\n    return x\n\n" + BEGUN % "g(1) -> 1 and\n    f(1) -> 2") == ("assert f(1) == 2",)


# -- what running shows -----------------------------------------------------------------------------------------


@confined
def test_a_program_that_passes_all_examples_is_verified() -> None:
    seen = acted(QUESTION, RIGHT)
    assert (seen.text, seen.verified, seen.data) == ("All 2 examples pass.", True, {"passed": 2, "failed": 0})


@confined
@pytest.mark.parametrize(
    ("program", "said", "failed"),
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
def test_others_say_what_went_wrong(program: str, said: list[str], failed: int) -> None:
    seen = acted(QUESTION, program)
    assert all(piece in seen.text for piece in said), seen.text
    assert not seen.verified
    assert isinstance(seen.data, dict)
    assert seen.data["failed"] == failed
    assert len(seen.text) < 2500


@confined
def test_a_program_that_never_ends_is_told_so() -> None:
    checked = check("while True: pass", ["assert True"], Sandbox(seconds=0.5))
    assert checked.failures == ("The program can't be tested: it did not end within 0.5 s.",)
    assert checked.passed == 0


@confined
def test_what_a_program_prints_is_no_result() -> None:
    noise = "def double(x):\n    print('null'); print(); print('\\n' * 3 + 'null')\n    return 0"
    seen = acted(QUESTION, noise)
    assert seen.data == {"passed": 0, "failed": 2}


@confined
def test_without_examples_a_program_that_runs_is_an_end_and_nothing_is_verified() -> None:
    seen = acted("Write a program.", "x = 1")
    assert (seen.text, seen.verified) == ("It runs; there are no examples to try it on.", False)
    state = State(question="q").then(Thought(parts={"program": "x = 1"}, observation=seen))
    assert TASK.is_terminal(state)


@confined
def test_what_the_question_begins_stands_before_the_program() -> None:
    question = "from math import tau\n\ndef helper(x):\n    return x + 1\n\n\n" + BEGUN % ">>> f(1)\n    2"
    assert acted(question, "def f(x, y=0):\n    return helper(x) if tau else 0").verified
    assert whole("Write f.", "def f(): pass") == "def f(): pass\n"


# -- data sets --------------------------------------------------------------------------------------------------


def test_the_data_sets_questions_have_examples(human_eval: list[dict[str, Any]], data: Path) -> None:
    assert len(human_eval) == 164
    assert sum(bool(examples(HumanEval().question_of(row))) for row in human_eval) >= 138
    mbpp = list(rows(data / "mbpp_dev.jsonl"))
    assert all(len(examples(MBPP().question_of(row))) == 1 for row in mbpp)
    assert all(row["test_list"][1] not in MBPP().question_of(row) for row in mbpp[:100])


@confined
def test_data_sets_own_solutions_pass_and_empty_ones_fail(human_eval: list[dict[str, Any]], data: Path) -> None:
    for row in human_eval[:8]:
        reference = HumanEval().reference_of(row)
        assert HumanEval().score(row["prompt"] + row["canonical_solution"], reference) == 1
        assert HumanEval().score(row["prompt"] + "    return None\n", reference) == 0
    for row in list(rows(data / "mbpp_dev.jsonl"))[:8]:
        assert MBPP().score(row["code"], MBPP().reference_of(row)) == 1
        assert MBPP().score("", MBPP().reference_of(row)) == 0
    assert MBPP().score(None, "assert True") == 0


@confined
def test_a_hidden_test_verifies_nothing(scripted_code: Any) -> None:
    """What passes the example, and not the hidden tests, is an answer that search takes for right, and scores 0."""
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
            said = [self.replies.pop(0) for request in requests for _ in range(request.sampling.n)]
            return [Completion(text, (), 0.0, "eos", Usage(new_tokens=5)) for text in said]

    return Scripted


@confined
def test_a_search_mends_a_program_by_what_it_did(scripted_code: Any) -> None:
    decoder = scripted_code(WRONG, *["def double(x):\n    return 4"] * 5, WRONG, RIGHT, WRONG, WRONG, WRONG)
    solution = solve("code", QUESTION, decoder=decoder, search="refine:thoughts=5,depth=3")
    assert solution.solved
    assert "double('ab') is 4, not 'abab'" in decoder.prompts[-1] or "TypeError" in decoder.prompts[-1]
    assert "return" in decoder.prompts[-1]
    assert str(solution.answer).endswith(RIGHT + "\n")


def test_a_question_is_refused_where_programs_cannot_be_confined(
    monkeypatch: pytest.MonkeyPatch, scripted_code: Any
) -> None:
    confines.cache_clear()
    monkeypatch.setitem(sys.modules, "sandlock", None)
    try:
        with pytest.raises(OptionError, match="programs that a model writes are run confined, and here they can't be"):
            solve("code", QUESTION, decoder=scripted_code())
    finally:
        confines.cache_clear()


@pytest.mark.parametrize("name", ["code", "humaneval", "mbpp"])
def test_each_is_a_task_by_name_with_an_example(name: str) -> None:
    task = load_task(name)
    assert isinstance(task, Task)
    assert examples(task.example())


@pytest.mark.real
@confined
def test_a_real_model_writes_programs_that_are_run(smollm2: str) -> None:
    solution = solve("code", TASK.example(), model=smollm2, max_tokens=48, search="refine:thoughts=2")
    seen = [node.thought.observation for node in solution.tree if node.thought is not None]
    assert seen
    assert all(one is not None and isinstance(one.data, dict) for one in seen)
    assert all(one is not None and one.verified for one in seen) or not solution.solved or len(seen) > 1
