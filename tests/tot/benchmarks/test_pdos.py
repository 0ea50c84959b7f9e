"""The benchmark `pdos`: questions with one right answer, prompts of the sides, and the table of all sides."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from benchmarks.__main__ import main
from benchmarks.pdos import Options, Way, mark_of, run, ways
from benchmarks.pdos_questions import Example, PDOSQuestion, documents, planning, retrieval
from benchmarks.steps import step_texts
from tot.decoders import Completion, Request, load_decoder
from tot.decoders.request import ChoiceLogprob

pytestmark = pytest.mark.benches

SIDES = ("normal", "pdos, given", "pdos, own", "SoT", "CoD", "CoD + pdos, given", "CoD + pdos, own")


@pytest.fixture
def compared(small: Path) -> Iterator[dict[str, Way]]:
    with load_decoder("ar", small) as normal, load_decoder("pdos", engine=normal.engine, instructions="") as steps:
        yield ways(normal, steps)


class Replies:
    """A decoder that replies with given texts, one after another, and records its requests."""

    name, method = "ar", SimpleNamespace(counts=None)
    drafter = None

    def __init__(self, engine: Any, make: Callable[..., Completion], texts: Sequence[str]) -> None:
        self.engine = engine
        self.requests: list[Request] = []
        self._make = make
        self._texts = iter(texts)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.requests += requests
        return [self._make("" if request.sampling.max_tokens == 1 else next(self._texts)) for request in requests]


def test_pdos_and_normal_decoding_have_identical_prompts(compared: dict[str, Way]) -> None:
    question = planning(3, 1)
    prompts = {name: side.messages(question) for name, side in compared.items()}
    assert prompts["normal"] == prompts["pdos, given"] == prompts["pdos, own"]
    assert prompts["CoD"] == prompts["CoD + pdos, given"] == prompts["CoD + pdos, own"]
    assert len({prompts["normal"], prompts["CoD"], prompts["SoT"]}) == 3
    assert all(messages[-1].content.endswith(question.text) for name, messages in prompts.items() if name != "SoT")
    example = prompts["normal"][1].content.splitlines()
    assert [line.partition(":")[0] for line in example[:-1]] == ["#### food", "#### music", "#### guests", "####%%%"]
    drafts = prompts["CoD"][1].content.splitlines()
    assert [len(line) < len(whole) for line, whole in zip(drafts, example, strict=True)] == [True] * 3 + [False] * 2
    assert "Three examples of the form" in prompts["normal"][0].content
    assert "Three examples of the form" not in "".join(one.content for one in (*prompts["SoT"], prompts["CoD"][2]))
    assert prompts["SoT"][1].content.splitlines() == ["1. food", "2. music", "3. guests", "4. Summary"]


def test_a_prompt_of_a_trained_model_does_not_explain_the_format(compared: dict[str, Way]) -> None:
    question = retrieval(4, 1)
    for way in ways(compared["normal"].decoder, compared["pdos, own"].decoder, explains=False).values():
        messages = way.messages(question)
        assert len(messages) == (3 if way.outline else 1)
        assert "Three examples" not in messages[0].content
        assert messages[-1].content.endswith(question.text)
        assert way.drafts == ("five words" in messages[-1].content and not way.outline)


def test_points_of_an_outline_are_one_batch_and_are_joined_in_order(compared: dict[str, Way], scripted: Any) -> None:
    engine = compared["normal"].decoder.engine
    decoder: Any = Replies(engine, scripted.completion, ["1. Food: all of it\n2. Fun", "Bread.", "Songs. "])
    question = planning(2, 1)
    answer = Way(decoder, outline=True).ask(question)
    assert answer["text"] == "1. Food: Bread.\n2. Fun: Songs."
    assert answer["tokens"] == len(answer["text"])
    computed, outline, first, second = decoder.requests
    assert computed.prompt == outline.prompt
    assert (outline.sampling.max_tokens, first.sampling.max_tokens) == (question.tokens, 64)
    assert [request.prompt[-1].content for request in (first, second)] == ["1. Food:", "2. Fun:"]
    assert "1. Food\n2. Fun\n" in first.prompt[0].content
    assert first.prompt[0].content.startswith(question.text)


def test_a_mark_is_an_expected_value(scripted: Any) -> None:
    logprobs = tuple(ChoiceLogprob(math.log(share), 2) for share in (0.1, 0.1, 0.1, 0.1, 0.6))
    judged: list[Request] = []

    class Judge:
        def generate(self, requests: Sequence[Request]) -> list[Completion]:
            judged.extend(requests)
            return [scripted.completion("", choice_logprobs=logprobs)]

    question = PDOSQuestion("Why?", (), planning(2, 0).example, 1)
    assert mark_of(Judge(), question, "{{ there }}") == pytest.approx(4.0, abs=0.01)
    (request,) = judged
    assert request.choices == (" 1", " 2", " 3", " 4", " 5")
    assert request.close_choices
    assert "The question:\nWhy?\n\nThe answer to be marked:\n{{ there }}" in request.prompt[0].content


@pytest.mark.smoke
def test_the_tables_have_all_sides(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_A_STEP", "_AN_ASPECT", "_CONCLUSION"):
        monkeypatch.setattr(f"benchmarks.pdos_questions.{name}", 20)
    out, screen = tmp_path / "numbers.json", StringIO()
    run(
        Options(model=str(small), questions=("retrieval=4", "planning=2", "qa=4"), prompt="none", rounds=1, out=out),
        Console(file=screen, width=240),
    )
    numbers, printed = json.loads(out.read_text()), screen.getvalue()
    rows = [line.split("│")[1].strip() for line in printed.splitlines() if line.startswith("│")]
    assert rows == [*SIDES, *SIDES[1:]] * 3
    assert all(name in printed for name in ("steps right", "its own mark", "mark, minus normal (95% interval)"))
    for title, marked in (("retrieval=4", False), ("planning=2", True), ("qa=4", False)):
        cells = {cell["side"]: cell for cell in numbers[title]}
        assert tuple(cells) == SIDES
        kinds = {(cell["right"] is None, cell["right steps"] is None, cell["mark"] is None) for cell in cells.values()}
        assert kinds == {(marked, marked, not marked)}
        ours, theirs = cells["CoD + pdos, given"], cells["CoD"]
        assert f"{theirs['seconds'] / ours['seconds']:.2f}x" in printed
        assert ours["seconds"] == ours["prefill"] + ours["decoding"]
        assert f"{cells['normal']['decoding'] / ours['decoding']:.2f}x" in printed
        assert not marked or f"{ours['mark'] - cells['normal']['mark']:+.2f} (one value)" in printed


@pytest.mark.parametrize("questions", ["plan=4", "retrieval=ten", "retrieval=3", "planning=11", "qa=101", "qa"])
def test_invalid_questions_are_rejected(capfd: pytest.CaptureFixture[str], questions: str) -> None:
    assert main(["pdos", "--questions", f"retrieval=4,{questions}"]) == 2
    assert f"--questions '{questions}' can't be read: write retrieval=4 to 100" in capfd.readouterr().err


# -- questions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [retrieval, documents])
@pytest.mark.parametrize("steps", [4, 9, 30, 100])
def test_the_given_answer_is_right(make: Callable[[int, int], Any], steps: int) -> None:
    for seed in range(10):
        question = make(steps, seed)
        for drafts in (False, True):
            answer = question.answered.in_steps(drafts)
            assert question.right(answer) == 1.0
            assert question.right_steps(answer) == 1.0
            assert re.findall(r"^#### (.+?):", answer, re.MULTILINE) == [*question.titles]
            half = "\n".join(answer.splitlines()[: steps // 2])
            assert question.right(half) == 0.0
            assert question.right_steps(half) == pytest.approx(steps // 2 / steps)
    assert make(steps, 3).text == make(steps, 3).text != make(steps, 4).text


def taught(seed: int) -> list[Any]:
    return [text for number in range(5) for text in step_texts(number, seed)]


def test_a_question_teaches_an_answer_a_skeleton_and_two_steps() -> None:
    texts = taught(1)
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
    assert taught(1) == texts != taught(2)


@pytest.mark.parametrize("people", [4, 10, 100])
def test_exactly_one_person_is_in_the_range(people: int) -> None:
    for seed in range(20):
        question: Any = retrieval(people, seed)
        grades = dict(re.findall(r"^(\S+ \S+), .*GPA (\d\.\d\d)", question.text, re.MULTILINE))
        low, high = map(float, re.findall(r"between (\d\.\d\d) and (\d\.\d\d)", question.text)[0])
        assert tuple(grades) == question.titles
        (name,) = (name for name, grade in grades.items() if low < float(grade) < high)
        assert question.answered.conclusion == f"Name: {name}"


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("#### Ann Lee: no\n#### Bo Dar: yes\n####%%%\nName: Bo Dar", True),
        ("name: Ann Lee\nName: Bo Dar.", True),
        ("**Name**: Bo Dar", True),
        ("Name: it was bo dar, I think", True),
        ("Name: Bo Dar\nName: Ann Lee", False),
        ("Name: Ann Lee or Bo Dar", False),
        ("Name: Bo Darren", False),
        ("It is Bo Dar", False),
        ("Name:\nBo Dar", False),
    ],
)
def test_the_last_line_must_name_the_right_candidate_alone(text: str, right: bool) -> None:
    question = PDOSQuestion("Who?", (), Example("", (), "", "Name"), 8, candidates=("Bo Dar", "Ann Lee"))
    assert question.right(text) == right


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("#### {0}: The GPA is {inside}, so yes.\n#### {1}: {outside}, no\n####%%%\nName: {0}", 2),
        ("1. {0}: {inside}0, Yes\n2. **{1}**:\nGPA {outside}, which is below. No.", 2),
        ("#### {0}: {inside}, no\n#### {1}: {outside}, no\nName: {0}", 1),
        ("#### {0}: {outside}, yes\n#### {1}: {inside}, no", 0),
        ("#### {0}: {inside}\n#### {1}:\nName: {0}", 0),
        ("Name: {0}", 0),
    ],
)
def test_each_step_must_state_the_grade_and_whether_it_is_in_the_range(text: str, right: int) -> None:
    for seed in range(99):
        made = retrieval(4, seed)
        assert made.answered is not None
        if made.answered.conclusion == f"Name: {made.titles[0]}":  # the first person is in the range
            break
    inside, outside = (re.findall(r"\d\.\d+", whole)[0] for _, whole, _ in made.answered.steps[:2])
    assert made.right_steps(text.format(*made.titles, inside=inside, outside=outside)) == right / 4


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("#### {film}: It names {director}.\n#### {born}: Born in {town}.\n#### {other}: It does not help.", 3),
        ("#### {film}: director: {director}\n#### {born}: no help\n#### {other}: no help", 2),
        ("#### {film}: It does not name {director}.\n#### {other}: It helps.", 0),
        ("", 0),
    ],
)
def test_steps_about_passages_are_right_by_their_fact_or_as_unhelpful(text: str, right: int) -> None:
    made = documents(4, 1)
    assert made.answered is not None
    by_draft = {draft.split()[0]: title for title, _, draft in made.answered.steps}
    (director,) = (draft.removeprefix("director: ") for _, _, draft in made.answered.steps if "director" in draft)
    places = {"film": by_draft["director:"], "born": by_draft[director.split()[0]], "other": by_draft["no"]}
    names = {"director": director, "town": made.candidates[0]}
    assert made.right_steps(text.format(**places, **names)) == right / 4
