"""The questions of `tot bench pdos`: one right answer each, and files that are not as they should be."""

from __future__ import annotations

import re

import pytest

from tot.bench.pdos_questions import names_only, planning, retrieval
from tot.decoders.methods.options import listed

NAMES = ("Ann Lee", "Bo Dar")


@pytest.mark.parametrize("people", [4, 10, 100])
def test_one_person_is_in_the_range(people: int) -> None:
    for seed in range(20):
        asked = retrieval(people, seed)
        grades = dict(re.findall(r"^(\S+ \S+), .*GPA (\d\.\d\d)", asked.text, re.MULTILINE))
        low, high = map(float, re.findall(r"between (\d\.\d\d) and (\d\.\d\d)", asked.text)[0])
        assert tuple(grades) == asked.titles
        assert len(set(asked.titles)) == people
        assert [name for name, grade in grades.items() if low < float(grade) < high] == [asked.reference]
        assert asked.is_right is not None
        assert asked.is_right(f"Name: {asked.reference}")
    assert retrieval(people, 3).text == retrieval(people, 3).text != retrieval(people, 4).text


@pytest.mark.parametrize("aspects", [2, 6, 10])
def test_a_plans_aspects_are_listed_and_its_steps(aspects: int) -> None:
    asked = planning(aspects, 1)
    assert tuple(listed(asked.text)) == asked.titles
    assert len(set(asked.titles)) == aspects
    assert asked == planning(aspects, 1)
    assert len({planning(aspects, seed).text for seed in range(20)}) == 20
    assert asked.tokens == aspects * 64 + 64


def test_worked_examples_are_right() -> None:
    people, plan = retrieval(4, 0).example, planning(2, 0).example
    grades = dict(re.findall(r"^(\S+ \S+), .*GPA (\d\.\d\d)", people.text, re.MULTILINE))
    low, high = map(float, re.findall(r"between (\d\.\d\d) and (\d\.\d\d)", people.text)[0])
    (right,) = (name for name, grade in grades.items() if low < float(grade) < high)
    assert people.conclusion == f"Name: {right}"
    assert [title for title, _, _ in people.steps] == list(grades)
    assert all(grades[title] in whole and grades[title] in draft for title, whole, draft in people.steps)
    assert [title for title, _, _ in plan.steps] == listed(plan.text)
    for _, whole, draft in (*people.steps, *plan.steps):
        assert len(draft.split()) <= 5 < len(whole.split())


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("#### Ann Lee: no\n#### Bo Dar: yes\n####%%%\nName: Bo Dar", True),
        ("name: Ann Lee\nName: Bo Dar.", True),
        ("**Name**: Bo Dar", True),
        ("Name: Ann Lee", False),
        ("Name: Ann Lee or Bo Dar", False),
        ("It is Bo Dar", False),
        ("Name:\nBo Dar", False),
    ],
)
def test_an_exact_match_is_the_last_name_given(text: str, right: bool) -> None:
    assert names_only(text, "Bo Dar", NAMES) == right
