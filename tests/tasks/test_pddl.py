"""PDDL problems: parsing, and errors that name the fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tot.decoders.errors import TaskError
from tot.tasks.blocks import Problem, check
from tot.tasks.pddl import read_problem

TEXT = """(define (problem two)
(:domain blocksworld-4ops)
(:objects a b)
(:init (handempty) (ontable a)
  (on b a) (clear b))
(:goal (and (on a b))))"""
PROBLEM = Problem(
    objects=("a", "b"),
    init=frozenset({("handempty",), ("ontable", "a"), ("on", "b", "a"), ("clear", "b")}),
    goal=frozenset({("on", "a", "b")}),
)


def error(text: str) -> str:
    with pytest.raises(TaskError) as caught:
        check(read_problem(text))
    return str(caught.value)


def test_a_problem_has_objects_facts_and_a_goal() -> None:
    assert read_problem(TEXT) == PROBLEM


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(ontable a)", "(OnTable A)"),
        ("(:objects a b)", "(:OBJECTS\n a\tB )"),
        ("(:objects a b)", "(:objects a b - block)"),
        ("(:objects a b)", "(:objects a - block b - object)"),
        ("(on b a) (clear b)", "(on b a) ; (on a b) is the goal)\n(clear b)"),
        ("(:goal (and (on a b)))", "(:goal (on a b))"),
        ("(:domain blocksworld-4ops)", "(:domain blocksworld-4ops) (:requirements :strips)"),
        ("(on b a)", "(on b a) (on b a)"),
        ("\n", "\r\n"),
    ],
)
def test_other_notations_give_the_same_problem(old: str, new: str) -> None:
    assert old in TEXT
    assert read_problem(TEXT.replace(old, new)) == PROBLEM


def test_a_goal_may_contain_every_kind_of_fact() -> None:
    text = TEXT.replace("(on a b)", "(ontable b) (clear a) (handempty) (holding a)")
    assert read_problem(text).goal == {("ontable", "b"), ("clear", "a"), ("handempty",), ("holding", "a")}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("(on b a)", "(onn b a)", "line 5: '(onn b a)': unknown predicate 'onn': use one of on, ontable"),
        ("(on b a)", "(on b)", "line 5: '(on b)': 'on' takes 2 blocks, not 1"),
        ("(handempty)", "(handempty a)", "line 4: '(handempty a)': 'handempty' takes 0 blocks, not 1"),
        ("(on b a)", "(on b z)", "'b is on z': there is no block 'z'"),
        ("(on b a)", "(on b (a))", "'b is on (a)': there is no block '(a)'"),
        ("(on b a)", "(not (on a b))", "line 5: '(not (on a b))': 'not' is not supported"),
        ("(and (on a b))", "(or (on a b) (on b a))", "line 6: '(or (on a b) (on b a))': 'or' is not supported"),
        ("(on a b)", "(forall (?x) (clear ?x))", "line 6: '(forall (?x) (clear ?x))': 'forall' is not supported"),
        ("(on a b)", "(and (on a b))", "line 6: '(and (on a b))': 'and' is not supported"),
        ("(and (on a b))", "(and)", "line 6: '(:goal (and))': the goal has no facts"),
        ("(and (on a b))", "", "line 6: '(:goal)': the goal is not one fact"),
        ("(and (on a b))", "(on a b) (on b a)", "the goal is not one fact or one (and ...)"),
        ("(and (on a b))", "on", "line 6: 'on': not a fact"),
        ("(on b a)", "()", "line 5: '()': not a fact"),
        ("(on b a)", "clear", "line 5: 'clear': not a fact"),
        ("(:objects a b)", "(:objects a b a)", "block 'a': named twice"),
        ("(:objects a b)", "(:objects a b - truck)", "line 3: 'truck': not a type"),
        ("(:objects a b)", "(:objects a b -)", "line 3: '-': not a type"),
        ("(:objects a b)", "(:objects a b 2)", "block '2': not a name"),
        ("(:objects a b)", "(:objects a b table)", "block 'table': a reserved word"),
        ("(:objects a b)", "(:objects)", "there are no blocks"),
        ("(:objects a b)", "", "line 1: '(define': the problem has no :objects"),
        ("(:goal (and (on a b)))", "", "line 1: '(define': the problem has no :goal"),
        ("(:init", "(:metric", "line 4: '(:metric (handempty) (ontable a) (on b a) (clear b))': unknown part"),
        ("(:domain", "(:goal (clear a)) (:domain", "line 6: '(:goal (and (on a b)))': a second :goal, the first"),
        ("(clear b))", "(clear b)", "line 1: '(define' is not closed"),
        ("(on b a)", "(on b a))", "line 6: ')': has no matching '('"),
        ("(and (on a b))))", "(and (on a b)))))", "line 6: ')': has no matching '('"),
        ("(and (on a b))))", "(and (on a b)))) x", "line 6: 'x': is after the end"),
        ("(define", "(defin", "line 1: '(defin (problem two)"),
    ],
)
def test_an_error_names_the_fault_and_its_line(old: str, new: str, message: str) -> None:
    assert old in TEXT
    assert message in error(TEXT.replace(old, new, 1))


def test_a_missing_start_is_an_error() -> None:
    start, end = TEXT.index("(:init"), TEXT.index("(:goal")
    assert "the problem has no :init" in error(TEXT[:start] + TEXT[end:])


@pytest.mark.parametrize("text", ["", "  ; nothing\n", "()", "define", ")", "(", "(()", "\x00"])
def test_text_that_is_not_a_problem_is_rejected(text: str) -> None:
    assert error(text).startswith("line 1: ")


def test_deep_nesting_is_rejected_at_once() -> None:
    assert error("(" * 100_000).startswith("line 1: '(': nested more than 31 deep")
    assert error("(\n" * 100_000).startswith("line 32: '(': nested more than 31 deep")
    assert error("(define " + "(" * 100_000 + ")" * 100_001).startswith("line 1: '(': nested more than 31 deep")


def test_a_long_fault_is_shortened_in_the_error() -> None:
    assert len(error(TEXT.replace("(on b a)", "(on " + "b" * 10_000 + " a)"))) < 300
    assert len(error(TEXT.replace("(on b a)", "(on" + " b" * 10_000 + ")"))) < 200


@given(st.text(st.sampled_from("()ab;- \n:"), max_size=60) | st.text(max_size=40))
def test_any_text_gives_a_problem_or_a_task_error(text: str) -> None:
    with pytest.raises(TaskError, match="line"):
        read_problem(text)
    assert read_problem(TEXT.replace("(:domain", "; " + text.replace("\n", " ") + "\n(:domain")) == PROBLEM


def test_real_problems_are_parsed(data: Path) -> None:
    lines = (data / "blocksworld_dev.jsonl").read_text(encoding="utf-8").splitlines()
    problems = [read_problem(json.loads(line)["pddl"]) for line in lines]
    assert len(problems) == 352
    assert {len(problem.objects) for problem in problems} == {3, 4, 5}
    assert sum(len(problem.goal) for problem in problems) == 770
