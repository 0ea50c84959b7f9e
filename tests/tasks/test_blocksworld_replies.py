"""Replies of models about Blocksworld: actions, proposals, values and plans."""

from __future__ import annotations

import pytest

from tot.tasks.blocksworld import Blocksworld

PDDL = """(define (problem three) (:domain blocksworld-4ops) (:objects a b c)
(:init (handempty) (ontable a) (on b a) (ontable c) (clear b) (clear c))
(:goal (and (on a c) (ontable b))))"""


PLAN = ["unstack b from a", "put down b", "pick up a", "stack a on c"]


ANSWER = ["(unstack b a)", "(put-down b)", "(pick-up a)", "(stack a c)"]


@pytest.fixture(scope="module")
def task() -> Blocksworld:
    return Blocksworld()


@pytest.mark.parametrize(
    ("text", "thought"),
    [
        (" unstack b from a", "unstack b from a"),
        ("2. (unstack b a)", "unstack b from a"),
        ("Action 12: Pick up the A block.", "pick up a"),
        ("- then put down b", "put down b"),
        ("I would pick up a", None),
        ("12", None),
        ("", None),
    ],
)
def test_a_thought_is_one_action_in_canonical_form(task: Blocksworld, text: str, thought: str | None) -> None:
    assert task.parse_thought("action", text) == thought


def test_proposals_are_the_distinct_lines_that_are_actions(task: Blocksworld) -> None:
    reply = " Unstack b from a\n2. pick up c\nperhaps\n3) (pick-up c)\n* put a down"
    assert task.parse_proposals(reply) == ["unstack b from a", "pick up c", "put down a"]


@pytest.mark.parametrize(
    ("reply", "value"),
    [(" good", 1), ("Bad.", 0), ("it is bad, not good", 0), ("goodness", None), ("", None), ("7", None)],
)
def test_a_value_is_good_or_bad(task: Blocksworld, reply: str, value: float | None) -> None:
    assert task.parse_value(reply) == value


@pytest.mark.parametrize(
    "text",
    [
        " unstack b from a\nAction 2: put down b\nAction 3: pick up a\nAction 4: stack a on c\nThe goal is reached.",
        "(unstack b a)\n(put-down b)\n(pick-up a)\n(stack a c)",
        "((unstack b a) (put-down b) (pick-up a) (stack a c))",
        "1. Unstack the b block from a. 2. Put down b. 3. Pick up a. 4. Stack a on top of c.",
        "First:\nunstack b from a, put down b; then pick up a, and then stack a on c",
        "unstack b from a\n\nput b on the table\n(PICK-UP A)\nwell\nstack a on c",
        "| 1 | unstack b a |\n| 2 | put-down b |\n| 3 | pick-up a |\n| 4 | stack a c |",
        "| Step | Action | Then |\n|---|---|---|\n| 1 | unstack b from a | a is clear |\n| 2 | put down b | |\n"
        "| 3 | pick up a | |\n| 4 | stack a on c | done |",
        "unstack b a -> put-down b => pick-up a → stack a c",
        "1) unstack b a 2) put-down b 3) pick-up a 4) stack a c",
        '{"plan": ["unstack b a", "put-down b", "pick-up a", "stack a c"]}',
        "unstack b a > put-down b | pick-up a & stack a c",
        "1) unstack(b, a) 2) put_down(b) 3) PickUp(a) 4) stack(a, c)",
        "unstack b a\nput_down b\npick_up a\nstack a c",
        "<step>unstack b from a</step><step>put down b</step><step>pick up a</step><step>stack a on c</step>",
        '["unstack b a", "put-down b", "pick-up a", "stack a c"]',
        '[["unstack", "b", "a"], ["put-down", "b"], ["pick-up", "a"], ["stack", "a", "c"]]',
        '{"action": "unstack", "args": ["b", "a"]}\n{"action": "put-down", "args": ["b"]}\n'
        '{"action": "pick-up", "args": ["a"]}\n{"action": "stack", "args": ["a", "c"]}',
        "- [ ] unstack b from a\n- [x] put down b\n- [ ] pick up a\n- [ ] stack a on c",
        "The plan is: unstack b from a, put it down, pick up a and stack it on c",
        "0.000: (unstack b a) [1.000]\n1.000: (put-down b) [1.000]\n2.000: (pick-up a) [1.000]\n3.000: (stack a c)",
    ],
)
def test_a_plan_is_parsed_with_any_separator(task: Blocksworld, text: str) -> None:
    assert task.parse_answer(text) == ANSWER
    assert task.verify(PDDL, text)
    assert task.canonical(text) == task.canonical(ANSWER) == task.canonical(PLAN) == tuple(ANSWER)


def test_a_text_without_actions_has_no_answer(task: Blocksworld) -> None:
    assert task.parse_answer("no idea (at all)") is None
    assert not task.verify(PDDL, "no idea (at all)")
