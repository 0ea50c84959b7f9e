"""The Blocksworld task: questions, prompts, parsing of replies, and its world."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tot import solve
from tot.cli.output import usage_line
from tot.decoders.errors import TaskError
from tot.tasks.blocks import apply, parse_action, solves
from tot.tasks.blocks_planner import generate, shortest_plan
from tot.tasks.blocksworld import Blocksworld, read_text, render
from tot.tasks.pddl import Problem, read_problem
from tot.tree.thought import State, Thought

PDDL = """(define (problem three) (:domain blocksworld-4ops) (:objects a b c)
(:init (handempty) (ontable a) (on b a) (ontable c) (clear b) (clear c))
(:goal (and (on a c) (ontable b))))"""
TEXT = """Blocks: a, b, c.
Start: b is on a, a is on the table, c is on the table, the hand is empty, b is clear, c is clear.
Goal: a is on c, b is on the table."""
PLAN = ["unstack b from a", "put down b", "pick up a", "stack a on c"]
ANSWER = ["(unstack b a)", "(put-down b)", "(pick-up a)", "(stack a c)"]


@pytest.fixture(scope="module")
def task() -> Blocksworld:
    return Blocksworld()


@pytest.fixture(scope="module")
def rows(data: Path) -> list[dict[str, Any]]:
    lines = (data / "blocksworld_dev.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def after(task: Blocksworld, steps: int, question: str = PDDL) -> State:
    state = task.start(question)
    for action in PLAN[:steps]:
        following = task.step(state, Thought(parts={"action": action}))
        assert following is not None
        state = following
    return state


# -- questions --------------------------------------------------------------------------------------------------


def test_a_question_may_be_pddl_or_words(task: Blocksworld) -> None:
    assert render(read_problem(PDDL)) == TEXT
    for question in (PDDL, TEXT, f"\n {TEXT}\n", f"; a comment\n{PDDL}", TEXT.upper().replace("\n", "\r\n\n")):
        state = task.start(question)
        assert state.question == question.strip()
        assert state.world == ["clear b", "clear c", "handempty", "on b a", "ontable a", "ontable c"]
        assert task.variables(state)["question"] == TEXT


def test_real_and_generated_problems_keep_their_meaning_in_words(rows: list[dict[str, Any]]) -> None:
    problems = [read_problem(row["pddl"]) for row in rows] + [generate(seed, 6, 12) for seed in range(5)]
    assert len(problems) == 352 + 5
    for problem in problems:
        assert read_text(render(problem)) == problem
        assert "(" not in render(problem)


def test_all_kinds_of_facts_are_written_in_words() -> None:
    problem = Problem(("a", "b-1"), frozenset({("holding", "a"), ("ontable", "b-1"), ("clear", "b-1")}), frozenset())
    goal = frozenset({("handempty",), ("clear", "a"), ("ontable", "b-1")})
    assert "the hand holds a, b-1 is clear" in render(problem)
    whole = Problem(problem.objects, problem.init, goal)
    assert read_text(render(whole)) == whole


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("b is on a,", "b is over a,", "Start: 'b is over a' is not a fact: write 'a is on b'"),
        ("a is on c", "a is on z", "'a is on z': there is no block 'z': name it"),
        ("a, b, c", "a, b, c, a", "block 'a': named twice"),
        ("a, b, c", "a, b, c d", "block 'c d': not a name"),
        ("a, b, c", "a, b, table", "block 'table': a reserved word"),
        ("Goal: a is on c, b is on the table.", "", "the question has no Goal"),
        ("Goal", "Blocks", "neither PDDL nor three lines"),
        ("Goal:", "Why not", "'Why not a is on c, b is on the table.': the question is neither PDDL nor three lines"),
        ("b is clear, ", "", "the initial state is invalid: nothing is on b, but (clear b) is missing"),
        (
            "c is on the table,",
            "c is on b,",
            "state is invalid: c is on b and b is clear exclude each other",
        ),
        ("a is on c, b", "a is on c, b is on c, b", "this problem cannot be solved: "),
        ("a is on c", "a is on c, c is on a", "cannot be solved: c, a are stacked in a cycle"),
    ],
)
def test_a_question_error_names_the_fault(task: Blocksworld, old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(TaskError) as caught:
        task.start(TEXT.replace(old, new))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ("", "empty"),
        ("(" * 1000, "line 1"),
        (PDDL.replace("(on a c)", "(on a z)"), "'a is on z': there is no block 'z'"),
        (
            PDDL.replace("(on a c)", "(holding a) (holding c)"),
            "be solved: the hand holds c and the hand holds a",
        ),
        (PDDL.replace("(handempty)", ""), "the initial state is invalid: the hand holds nothing"),
    ],
)
def test_a_question_without_a_solution_is_rejected(task: Blocksworld, question: str, message: str) -> None:
    with pytest.raises(TaskError, match=re.escape(message)):
        task.start(question)


def test_a_row_is_its_own_reference(task: Blocksworld, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        question, reference = task.question_of(row), task.reference_of(row)
        assert question == row["pddl"]
        assert task.score(row["plan"], reference) == 1
        assert task.score(row["plan"][:-1], reference) == 0


# -- prompts ----------------------------------------------------------------------------------------------------


def test_no_prompt_reveals_the_plan_length(task: Blocksworld, rows: list[dict[str, Any]]) -> None:
    for row in rows[::50]:
        state = task.start(row["pddl"])
        prompt_text = "".join(message.content for message in task.prompt("action", state)).partition(render_of(row))[2]
        assert re.findall(r"\d+", prompt_text) == ["1"]


def render_of(row: dict[str, Any]) -> str:
    return render(read_problem(row["pddl"]))


def test_the_demonstrations_are_correct(task: Blocksworld) -> None:
    judged = []
    for demonstration in task.prompts.data("demonstrations"):
        problem, actions = read_text(demonstration["question"]), demonstration["actions"]
        task.start(demonstration["question"])
        assert render(problem) == demonstration["question"]
        left = len(shortest_plan(problem) or [])
        if "evaluation" not in demonstration:
            assert solves(problem, actions)
            assert len(actions) == left
            continue
        facts = problem.init
        for step in actions:
            action = parse_action(step)
            assert action
            assert action.text == step
            before, facts = left, apply(facts, action) or frozenset()
            left = len(shortest_plan(Problem(problem.objects, facts, problem.goal)) or [])
            assert facts
            if step is not actions[-1]:
                assert left == before - 1  # only the last is judged
        judged.append(demonstration["evaluation"])
        assert task.labels[judged[-1]] == (left == before - 1)
    assert sorted(judged) == ["bad", "good"]
    assert len(task.prompts.data("demonstrations")) == 4


# -- the world --------------------------------------------------------------------------------------------------


def test_actions_change_the_world(task: Blocksworld) -> None:
    start = task.start(PDDL)
    assert task.actions(start) == ["unstack b from a", "pick up c"]
    loose = task.step(start, Thought(parts={"action": "Unstack the b block from a."}))
    assert loose == after(task, 1)
    assert loose is not None
    assert loose.thoughts[0].text == "unstack b from a"
    assert loose.world == ["clear a", "clear c", "holding b", "ontable a", "ontable c"]
    assert task.actions(loose) == ["put down b", "stack b on a", "stack b on c"]
    for illegal in ("pick up a", "stack b on z", "fly", ""):
        assert task.step(loose, Thought(parts={"action": illegal})) is None
    back = task.step(loose, Thought(parts={"action": "stack b on a"}))
    assert back is not None
    assert back.world == start.world != loose.world


def test_the_plan_is_the_answer_once_the_goal_is_reached(task: Blocksworld) -> None:
    states = [after(task, steps) for steps in range(5)]
    assert [task.is_terminal(state) for state in states] == [False] * 4 + [True]
    assert [task.is_goal(state) for state in states] == [False] * 4 + [True]
    assert [task.answer_at(state) for state in states] == [None] * 4 + [ANSWER]
    assert [task.reward(state) for state in states] == [0, 0, 0.5, 0.5, 100]
    assert [task.heuristic(state) for state in states] == [4, 3, 2, 1, 0]
    assert after(task, 4, TEXT).world == states[4].world


def test_a_goal_that_already_holds_needs_no_plan(task: Blocksworld) -> None:
    question = PDDL.replace("(on a c) (ontable b)", "(on b a)")
    state = task.start(question)
    assert task.is_terminal(state)
    assert task.answer_at(state) == []
    assert task.verify(question, [])
    assert not task.verify(question, "no idea")


def test_only_a_correct_plan_scores(task: Blocksworld) -> None:
    detour = ["(pick-up c)", "(put-down c)", *ANSWER]
    assert [task.score(answer, PDDL) for answer in (ANSWER, PLAN, detour)] == [1, 1, 1]
    assert [task.score(answer, PDDL) for answer in (ANSWER[:3], ANSWER[1:], [], ["fly"], None, 7)] == [0] * 6
    assert task.canonical(detour) != task.canonical(ANSWER)


def test_the_default_search_finds_a_shortest_plan_without_a_model() -> None:
    task = Blocksworld()
    problem = task.instance(24)
    solution = solve(task, problem["question"], decoder=Silent())
    assert (solution.solved, len(solution.answer), solution.calls) == (True, problem["steps"], 0)
    assert usage_line(solution) == f"{len(solution.tree) - 1} thoughts, no model calls"


class Silent:
    """Fail on any request."""

    def generate(self, requests: Any) -> Any:
        raise AssertionError("asked")


def problem(init: str) -> str:
    facts = f"{init} (on b a) (clear b)"
    return f"(define (problem p) (:domain blocksworld) (:objects a b) (:init {facts}) (:goal (on a b)))"


@pytest.mark.parametrize("hand", ["handempty", "hand-empty", "arm-empty", "armempty", "emptyhand", "hand_empty"])
@pytest.mark.parametrize("table", ["ontable", "on-table", "on_table"])
def test_predicate_names_of_other_domains_are_accepted(hand: str, table: str) -> None:
    solution = solve("blocksworld", "\ufeff" + problem(f"({hand}) ({table} a)"), model=None)
    assert solution.solved
    assert solution.answer == ["(unstack b a)", "(put-down b)", "(pick-up a)", "(stack a b)"]


@pytest.mark.parametrize(
    "plan",
    [
        "unstack b from a because b is on a\nput down b to free the hand\npick up a\nstack a on b so the goal holds",
        "unstack b from a - frees a\nput down b (free)\npick up a\nstack a on b",
        "First unstack b from a\nNext put down b\nNow pick up a\nFinally stack a on b",
        "First, unstack b from a\nAfter that put down b\nThen, I pick up a\nLastly stack a on b",
        "**Step 1:** unstack b from a\n**Step 2:** put down b\n**Step 3:** pick up a\n**Step 4:** stack a on b",
        "Step 1 - unstack b from a\nStep 2 - put down b\nStep 3 - pick up a\nStep 4 - stack a on b",
        "unstack(b, a)\nput-down(b)\npick-up(a)\nstack(a, b)",
    ],
)
def test_a_plan_may_contain_order_words_and_reasons(plan: str) -> None:
    task = Blocksworld()
    assert task.verify(problem("(handempty) (ontable a)"), task.parse_answer(plan))


@pytest.mark.parametrize(
    "plan",
    [
        "unstack b from a → a is clear\nput down b => the hand is free\npick up a: it is clear\nstack a on b",
        "unstack b from a, freeing a\nplace b on the table\npick up a\nplace a on top of b",
        "We need to unstack b from a\nThen we should put down b\nSo I will pick up a\nLet's stack a upon b",
        "Start by unstacking b from a\nNow putting down b\nPicking up a\nFinally stacking a on b",
        "[1] unstack b from a\n[2] put down b\n[3] pick up a\n[4] stack a on b",
        "Unstack b from a and put down b.\nPick up a, and then stack a on b.",
    ],
)
def test_a_plan_may_be_written_in_everyday_language(plan: str) -> None:
    task = Blocksworld()
    assert task.verify(problem("(handempty) (ontable a)"), task.parse_answer(plan))


@pytest.mark.parametrize("line", ["do not unstack b from a", "if we unstack b from a", "you could unstack b from a"])
def test_a_negated_or_conditional_action_is_not_part_of_the_plan(line: str) -> None:
    assert Blocksworld().parse_answer(line) is None


def test_proposals_are_the_distinct_lines_that_are_actions(task: Blocksworld) -> None:
    reply = " Unstack b from a\n2. pick up c\nperhaps\n3) (pick-up c)\n* put a down"
    assert task.parse_proposals(reply) == ["unstack b from a", "pick up c", "put down a"]


def test_a_text_without_actions_has_no_answer(task: Blocksworld) -> None:
    assert task.parse_answer("no idea (at all)") is None
    assert not task.verify(PDDL, "no idea (at all)")
