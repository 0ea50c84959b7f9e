"""The task reasoning-gym: generated questions, readings of answers, and verifiers in the sandbox."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tot import Task, solve
from tot.cli.app import main
from tot.decoders.errors import OptionError, TaskError
from tot.evaluation.questions import BadRow, Question, Questions
from tot.evaluation.run import evaluate
from tot.registry import is_installed, load_task
from tot.running import run_to_end
from tot.tasks.reasoning_gym import ReasoningGym, datasets
from tot.tree.thought import State, Thought

pytest.importorskip("reasoning_gym")


def test_a_data_set_is_the_word_after_the_name_of_the_task_and_settings_follow() -> None:
    task = load_task("reasoning-gym:countdown,min_numbers=3,max_numbers=3")
    assert isinstance(task, ReasoningGym)
    assert len(re.findall(r"\d+", task.instance(7)["question"].partition("\n")[0])) == 4  # three numbers and a target
    assert task.instance(7) == ReasoningGym("countdown", min_numbers=3, max_numbers="3").instance(7)
    assert task.instance(7) != task.instance(8)


def test_all_takes_the_data_sets_in_turn() -> None:
    task, names = ReasoningGym(), datasets()
    assert len(names) > 100
    assert "composite" not in names
    assert [task.instance(seed)["dataset"] for seed in (0, 1, len(names))] == [names[0], names[1], names[0]]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("reasoning-gym:countdwn", "did you mean countdown"),
        ("reasoning-gym:all,size=3", "has no settings: leave size out"),
    ],
)
def test_unknown_data_sets_and_settings_of_all_are_errors(spec: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        load_task(spec)


def test_an_unknown_setting_is_an_error_that_names_it() -> None:
    with pytest.raises(TaskError, match="max_numbr"):
        ReasoningGym("countdown", max_numbr=3).instance(0)


def test_only_tasks_with_variants_take_a_word_after_their_name() -> None:
    assert is_installed("reasoning-gym:countdown")
    assert is_installed("reasoning-gym")
    assert not is_installed("optimize:folder")  # the folder has code
    assert not is_installed("gsm8k:main")
    with pytest.raises(OptionError, match="unknown task"):
        load_task("gsm8k:main")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("First, 2 + 2 = 4.\nAnswer: 4", "4"),
        ("Answer: 3\nNo, wait.\n**Answer:** 4.", "4"),
        ("The final answer is: **7**", "7"),
        ("Answer:\n```\n1 2\n3 4\n```", "1 2\n3 4"),
        (r"So it is \(\boxed{12}\).", "12"),
        ("We add them. The sum is 21.", "21"),
        ('Answer: "yes"', "yes"),
        ("Answer: ['a', 'b']", "['a', 'b']"),
        ("Answer: 1, 2, 3...", "1, 2, 3..."),
        ("Blue", "Blue"),
        ("Answer:", None),
        ("", None),
    ],
)
def test_the_answer_of_a_text(text: str, answer: str | None) -> None:
    assert ReasoningGym().parse_answer(text) == answer


def test_a_truncated_text_has_no_answer() -> None:
    assert ReasoningGym().parse_truncated("Answer: 12") is None


@pytest.mark.parametrize(
    ("program", "output", "answer"),
    [
        ("print(6 * 7)", "42", "42"),
        ("print(84 / 2)", "42.0", "42"),
        ("print('1 2')\nprint('3 4')", "1 2\n3 4", "1 2\n3 4"),
        ("print('Answer:', 0.5)", "Answer: 0.5", "0.5"),
        ("print()", "", None),
        ("print(1 / 0)", "ZeroDivisionError: division by zero", None),
    ],
)
def test_a_program_prints_the_answer(program: str, output: str, answer: str | None) -> None:
    task = ReasoningGym()
    thought = Thought(parts={"program": program})
    observation = run_to_end(task.act(State(question="?"), thought))
    assert observation is not None
    assert (observation.text, observation.data) == (output, answer)


def test_equal_answers_have_one_key() -> None:
    task = ReasoningGym()
    assert task.canonical("4.0") == task.canonical("4")
    assert task.canonical("['a',  'b']") == task.canonical('["a", "b"]')
    assert task.canonical("a") != task.canonical("A")


def test_verifiers_run_in_the_sandbox_and_give_fractions() -> None:
    task = ReasoningGym("countdown")
    row = task.instance(1000)
    reference = task.reference_of(row)
    attack = "__import__('os').system('touch /tmp/tot_escaped')"
    given: list[Any] = [row["answer"], "1+1", attack, None, "x" * 10_000]
    scores = task.scores([(answer, reference) for answer in given])
    assert scores[0] == 1.0
    assert all(0 <= score < 0.1 for score in scores[1:])
    assert not Path("/tmp/tot_escaped").exists()
    assert task.score(row["answer"], reference) == 1.0
    assert json.loads(json.dumps(reference)) == reference


def test_a_verifier_that_raises_gives_zero() -> None:
    task = ReasoningGym("countdown")
    row = task.instance(0)
    right = task.reference_of(row)
    scores = task.scores([("1", {**right, "dataset": "absent"}), (row["answer"], right)])
    assert scores == [0.0, 1.0]


def test_without_the_library_an_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from tot.tasks import reasoning_gym

    for cached in (reasoning_gym.datasets, reasoning_gym._sandbox):
        cached.cache_clear()
    monkeypatch.setattr(reasoning_gym, "find_spec", lambda name: None)
    reference = {"dataset": "countdown", "seed": 0, "answer": "1"}
    for use in (
        lambda: ReasoningGym("countdown"),
        ReasoningGym().example,
        lambda: ReasoningGym().score("1", reference),
    ):
        with pytest.raises(OptionError, match=r"pip install 'tot\[reasoning-gym\]'"):
            use()


def test_questions_do_not_depend_on_the_process() -> None:
    first = [ReasoningGym("ransom_note").instance(seed) for seed in range(3)]  # its generator iterates over sets
    from tot.tasks import reasoning_gym

    reasoning_gym._generated.cache_clear()
    assert [ReasoningGym("ransom_note").instance(seed) for seed in range(3)] == first


class Repeats(Task):
    """Generates three questions, and fails for the seed 4."""

    templates: ClassVar[Mapping[str, str]] = {"chain": "{{ question }}", "thought": "{{ question }}"}

    def instance(self, seed: int) -> dict[str, Any]:
        if seed == 4:
            raise ValueError("no question")
        return {"question": f"What is {seed % 3}?", "answer": str(seed % 3)}


def test_generated_questions_are_the_rows_of_an_evaluation() -> None:
    rows = list(Questions(Repeats(), "instances:1-4"))
    assert [row.text for row in rows if isinstance(row, Question)] == ["What is 1?", "What is 2?", "What is 0?"]
    (bad,) = [row for row in rows if isinstance(row, BadRow)]
    assert (bad.place, "no question" in bad.reason) == ("seed 4", True)
    (repeated,) = [row for row in Questions(Repeats(), "instances:0-3") if isinstance(row, BadRow)]
    assert repeated.reason == "repeats the question of the seed 0"


def test_offset_and_limit_choose_seeds() -> None:
    rows = list(Questions(Repeats(), "instances:0-3", limit=1, offset=2))
    assert [(row.index, row.text) for row in rows if isinstance(row, Question)] == [(2, "What is 2?")]


def test_an_evaluation_generates_and_verifies_its_questions(tmp_path: Path) -> None:
    results = evaluate("reasoning-gym:coin_flip", limit=2, search="cot", max_tokens=8, out=tmp_path / "run")
    assert results.questions == 2
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "data: instances:1000-1039" in config
    again = evaluate("reasoning-gym:coin_flip", limit=2, search="cot", max_tokens=8, out=tmp_path / "run", resume=True)
    assert again.score == results.score


def test_a_question_can_be_solved() -> None:
    question = ReasoningGym("coin_flip").example()
    solution = solve("reasoning-gym:coin_flip", question, search="self-consistency:samples=2", max_tokens=8)
    assert solution.calls >= 2


def test_a_name_after_the_task_is_no_question(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["solve", "reasoning-gym:coinflip"]) == 2
    assert "did you mean coin_flip" in capfd.readouterr().err
    assert main(["solve", "reasoning-gym:coin_flip", "--search", "cot", "--max-tokens", "4"]) == 0
    assert "1 thought" in capfd.readouterr().out
