"""The questions of `python -m benchmarks pdos`: one correct answer each, and errors for invalid files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.papers.pdos_questions import (
    PDOSQuestion,
    contains,
    documents,
    listed,
    multi_document,
    names_only,
    planning,
    retrieval,
    right_passages,
    right_share,
)
from benchmarks.papers.pdos_teaching import taught
from tot.decoders import LocalDecoder, OptionError
from tot.decoders.methods.options import PDOSOptions
from tot.decoders.methods.pdos.steps_format import StepsFormat

NAMES = ("Ann Lee", "Bo Dar")
CONTEXT = "Passage 1:\nOslo\nOslo is cold.\n\nPassage 2:\nRome is warm.\nPassage 3:\nUlm is mild."


@pytest.fixture(scope="module")
def form(tiny: Callable[[], LocalDecoder]) -> Iterator[StepsFormat]:
    with tiny() as decoder:
        yield StepsFormat(PDOSOptions(), decoder.engine.codec)


def everything(question: PDOSQuestion) -> bool:
    return True


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    """Write rows: a question with three passages, with some columns changed, or left out if None."""

    def write(*changes: dict[str, Any]) -> Path:
        whole = {"input": "Which is cold?", "context": CONTEXT, "answers": ["Oslo"], "length": 12}
        rows = [{name: value for name, value in (whole | some).items() if value is not None} for some in changes]
        path = tmp_path / "wiki.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.mark.parametrize("make", [retrieval, documents])
@pytest.mark.parametrize("steps", [4, 9, 30])
def test_the_given_answer_is_right(make: Callable[[int, int], PDOSQuestion], steps: int, form: StepsFormat) -> None:
    for seed in range(10):
        question = make(steps, seed)
        assert question.answered is not None
        assert question.is_right is not None
        assert question.right_steps is not None
        for drafts in (False, True):
            answer = question.answered.in_steps(form, drafts)
            assert question.is_right(answer)
            assert question.right_steps(answer) == 1.0
            assert re.findall(r"^#### (.+?):", answer, re.MULTILINE) == [*question.titles]


def test_a_question_teaches_an_answer_a_skeleton_and_two_steps(form: StepsFormat) -> None:
    texts = list(taught(5, 1, form.codec))
    assert len(texts) == 20
    for at in range(0, 20, 4):
        (whole, answer), (begun, rest), *ends = texts[at : at + 4]
        (user,) = whole.prompt
        assert "####" not in user.content
        titles = re.findall(r"^#### (.+?):", answer, re.MULTILINE)
        assert 4 <= len(titles) <= 8
        skeleton = begun.prompt[1].content + rest
        assert skeleton == "".join(f"#### {title}:...\n" for title in titles) + "####%%%\n"
        assert begun.prompt[1].content.endswith("...\n####")
        first = [request.prompt[1].content for request, _ in ends]
        assert len({*first}) == 2
        assert f"#### {titles[0]}:" not in first
        assert all(answer.endswith(f"\n{request.prompt[1].content}{text}") for request, text in ends)
        assert all(request.prompt[0] == user for request, _ in texts[at : at + 4])
    assert list(taught(5, 1, form.codec)) == texts != list(taught(5, 2, form.codec))


@pytest.mark.parametrize("people", [4, 10, 100])
def test_exactly_one_person_is_in_the_range(people: int) -> None:
    for seed in range(20):
        question = retrieval(people, seed)
        grades = dict(re.findall(r"^(\S+ \S+), .*GPA (\d\.\d\d)", question.text, re.MULTILINE))
        low, high = map(float, re.findall(r"between (\d\.\d\d) and (\d\.\d\d)", question.text)[0])
        assert tuple(grades) == question.titles
        assert len(set(question.titles)) == people
        assert [name for name, grade in grades.items() if low < float(grade) < high] == [question.reference]
        assert question.is_right is not None
        assert question.is_right(f"Name: {question.reference}")
    assert retrieval(people, 3).text == retrieval(people, 3).text != retrieval(people, 4).text


@pytest.mark.parametrize("aspects", [2, 6, 10])
def test_a_plan_lists_its_aspects_and_steps(aspects: int) -> None:
    question = planning(aspects, 1)
    assert tuple(listed(question.text)) == question.titles
    assert len(set(question.titles)) == aspects
    assert question == planning(aspects, 1)
    assert len({planning(aspects, seed).text for seed in range(20)}) == 20
    assert question.tokens == aspects * 64 + 64


def test_worked_examples_are_correct() -> None:
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
def test_names_only_compares_the_last_name(text: str, right: bool) -> None:
    assert names_only(text, "Bo Dar", NAMES) == right


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("#### Ann Lee: The GPA is 3.80, so no.\n#### Bo Dar: 2.5, yes\n####%%%\nName: Bo Dar", 1.0),
        ("1. Ann Lee: 3.8, No\n2. **Bo Dar**:\nGPA 2.50, which is between the two. Yes.", 1.0),
        ("#### Ann Lee: 3.80, no\n#### Bo Dar: 2.50, no\nName: Bo Dar", 0.5),  # the last name alone is right
        ("#### Ann Lee: 3.80, yes\n#### Bo Dar: 2.60, yes\nName: Bo Dar", 0.0),
        ("#### Ann Lee: 2.50, no\n#### Bo Dar: 3.80, yes\nName: Bo Dar", 0.0),
        ("#### Ann Lee: 3.80\n#### Bo Dar:\nName: Bo Dar", 0.0),
        ("Name: Bo Dar", 0.0),
    ],
)
def test_each_step_must_state_the_grade_and_whether_it_is_in_the_range(text: str, share: float) -> None:
    assert right_share(text, {"Ann Lee": (3.8, False), "Bo Dar": (2.5, True)}) == share


def test_right_steps_of_a_question_follow_its_people() -> None:
    question = retrieval(6, 2)
    grades = re.findall(r"^(\S+ \S+), .*GPA (\d\.\d\d)", question.text, re.MULTILINE)
    steps = [f"#### {name}: {grade}, {'yes' if name == question.reference else 'no'}" for name, grade in grades]
    assert question.right_steps is not None
    assert question.right_steps("\n".join(steps)) == 1.0
    assert question.right_steps("\n".join(steps[:3])) == 0.5


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("Passage 1: Rome.\nAnswer: It was New  York, I think.", True),
        ("answer: the north of NEW-YORK", True),
        ("Answer: York\nAnswer: new york", True),
        ("Answer: Newer York", False),
        ("Answer: new Yorkshire", False),
        ("Answer: New York\nAnswer: Rome", False),
        ("It is New York", False),
    ],
)
def test_an_answer_must_contain_the_reference_as_whole_words(text: str, right: bool) -> None:
    assert contains(text, ("Oslo fjord", "New York")) == right


def test_a_row_becomes_a_question_with_passages_as_steps(file: Callable[..., Path]) -> None:
    (first, second), kept = multi_document(
        file({}, {"answers": "Ulm", "context": "no headings"}, {"input": "a third"}), 2, everything
    )
    assert first.titles == ("Passage 1", "Passage 2", "Passage 3")
    assert "Passage 1:\nOslo\nOslo is cold.\n\nPassage 2:\nRome is warm.\n\nPassage 3:\nUlm is mild." in first.text
    assert "Question: Which is cold?" in first.text
    assert (first.about, first.reference) == ("Which is cold?", "Oslo")
    assert first.is_right is not None
    assert first.is_right("Answer: oslo")
    assert (second.titles, second.reference) == (("Passage 1",), "Ulm")
    assert kept == [(3, 3), (1, 1)]


def test_passages_are_dropped_from_the_end_until_the_rest_fits(file: Callable[..., Path]) -> None:
    (question,), kept = multi_document(file({}), 5, lambda question: "Ulm" not in question.text)
    assert question.titles == ("Passage 1", "Passage 2")
    assert kept == [(2, 3)]
    with pytest.raises(OptionError, match=r"row 0: its first passage alone is longer than the model's context"):
        multi_document(file({}), 5, lambda question: False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": None}, r"row 0 of .*, option context: Field required"),
        ({"answers": None}, "option answers: Field required"),
        ({"answers": []}, "option answers: "),
        ({"answers": [3]}, "option answers: "),
        ({"answers": ["..."]}, "option answers: "),
        ({"input": 5}, "option input: Input should be a valid string"),
        ({"context": " "}, "option context: "),
    ],
)
def test_invalid_rows_are_rejected(file: Callable[..., Path], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        multi_document(file(changes), 1, everything)


def test_files_without_rows_are_rejected(file: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="has no rows"):
        multi_document(file(), 1, everything)
    with pytest.raises(OptionError, match="there is no such file"):
        multi_document(tmp_path / "none.jsonl", 1, everything)


def test_generated_documents_are_two_hop_questions_with_one_answer() -> None:
    for seed in range(1, 20):
        question = documents(6, seed)
        assert question.text == documents(6, seed).text
        assert question.titles == tuple(f"Passage {number}" for number in range(1, 7))
        (film,) = re.findall(r"Where was the director of (The \w+ \w+) born\?", question.text)
        (director,) = re.findall(rf"{film} is a film of \d{{4}}\. It was directed by ([\w ]+)\.", question.text)
        (town,) = re.findall(rf"{director} was a director, born in (\w+), who died in", question.text)
        assert question.reference == town
        assert question.is_right is not None
        assert question.is_right(f"Answer: {town}")
        assert not question.is_right("Answer: Atlantis")
    assert documents(6, 1).text != documents(6, 2).text


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("#### Passage 1: It names Ann Lee.\n#### Passage 2: It does not help.\n#### Passage 3: Born in Oslo.", 1),
        ("#### Passage 1: director: Ann Lee\n#### Passage 2: no help\n#### Passage 3: no help", 2 / 3),
        ("#### Passage 1: It does not name Ann Lee.\n#### Passage 2: It helps.", 0),
        ("", 0),
    ],
)
def test_steps_about_passages_are_right_by_their_fact_or_as_unhelpful(text: str, share: float) -> None:
    needed = {"Passage 1": "Ann Lee", "Passage 2": None, "Passage 3": "Oslo"}
    assert right_passages(text, needed) == pytest.approx(share)
