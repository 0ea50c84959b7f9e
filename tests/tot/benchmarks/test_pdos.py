"""The benchmark `pdos`: prompts of the sides, scoring of answers, and the table of all sides."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.__main__ import main
from benchmarks.options import PDOSBench
from benchmarks.papers.pdos import Way, mark_of, run, said, ways
from benchmarks.papers.pdos_questions import PDOSQuestion, planning, retrieval
from tot.decoders import Completion, LocalDecoder, Request, load_decoder
from tot.decoders.request import ChoiceLogprob

pytestmark = pytest.mark.benches

SIDES = (
    *("normal", "pdos, given", "pdos, own", "SoT"),
    *("CoD", "CoD + pdos, given", "CoD + pdos, own"),
)


@pytest.fixture(scope="module")
def folder(tiny: Callable[[], LocalDecoder], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a long context."""
    path = tmp_path_factory.mktemp("model")
    decoder = tiny()
    decoder.close()
    decoder.model.config.max_position_embeddings = 16_384
    decoder.model.save_pretrained(path)
    decoder.tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def compared(folder: Path) -> Iterator[dict[str, Way]]:
    with load_decoder("ar", folder) as normal, load_decoder("pdos", engine=normal.engine, instructions="") as steps:
        yield {way.name: way for way in ways(normal, steps)}


class Replies:
    """A decoder that replies with given texts, one after another, and records its requests."""

    name = "ar"
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


@pytest.mark.parametrize(
    ("prompt", "turns", "described"),
    [("skeleton", 1, True), ("example", 3, False), ("both", 3, True), ("none", 1, False)],
)
def test_the_prompt_style_sets_turns_and_description(
    compared: dict[str, Way], prompt: str, turns: int, described: bool
) -> None:
    question = retrieval(4, 1)
    for way in ways(compared["normal"].decoder, compared["pdos, own"].decoder, prompt):
        messages = way.messages(question)
        assert (len(messages), "Three examples" in messages[0].content) == (
            (3, False) if way.outline else (turns, described)
        )
        assert messages[-1].content.endswith(question.text)
        assert way.drafts == ("five words" in messages[-1].content and not way.outline)


def test_titles_are_removed_from_the_text_of_an_answer(compared: dict[str, Way]) -> None:
    form = compared["normal"].form
    written = "So:\n#### Ann Lee: 3.1, no.\n####Bo: yes: 4\n####%%%\nName: Bo\n1. Food: bread\n12 left."
    assert said(written, form) == "So:\n3.1, no.\nyes: 4\n\nName: Bo\nbread\n12 left."


def test_points_of_an_outline_are_one_batch_and_are_joined_in_order(compared: dict[str, Way], scripted: Any) -> None:
    engine = compared["normal"].decoder.engine
    decoder: Any = Replies(engine, scripted.completion, ["1. Food: all of it\n2. Fun", "Bread.", "Songs. "])
    question = planning(2, 1)
    answer = Way("SoT", decoder, outline=True).ask(question)
    assert answer["text"] == "1. Food: Bread.\n2. Fun: Songs."
    assert answer["tokens"] == len(answer["text"])
    computed, outline, first, second = decoder.requests
    assert computed.prompt == outline.prompt
    assert (outline.sampling.max_tokens, first.sampling.max_tokens) == (question.tokens, 64)
    assert [request.prompt[-1].content for request in (first, second)] == ["1. Food:", "2. Fun:"]
    assert "1. Food\n2. Fun\n" in first.prompt[0].content
    assert first.prompt[0].content.startswith(question.text)


def test_an_outline_without_points_is_the_answer(compared: dict[str, Way], scripted: Any) -> None:
    decoder: Any = Replies(compared["normal"].decoder.engine, scripted.completion, ["No."])
    assert Way("SoT", decoder, outline=True).ask(planning(2, 1))["text"] == "No."


def test_the_token_budget_limits_the_points_of_an_outline(compared: dict[str, Way], scripted: Any) -> None:
    outline = "\n".join(f"{number}. more" for number in range(1, 50))
    decoder: Any = Replies(compared["normal"].decoder.engine, scripted.completion, [outline, *"abcd"])
    assert Way("SoT", decoder, outline=True).ask(planning(2, 1))["text"].count("more") == 3  # of 64 tokens each


def test_an_answer_reports_its_cost(compared: dict[str, Way]) -> None:
    question = retrieval(4, 1)
    normal, given, own = (compared[name].ask(question) for name in ("normal", "pdos, given", "pdos, own"))
    assert (normal["steps"], normal["kept_format"]) == (0, None)
    assert given["steps"] == 4
    assert (given["kept_format"], own["kept_format"]) == (None, 0.0)  # the skeleton was given, or the text has none
    assert own["text"] == normal["text"]  # a random model writes no marker
    for answer in (normal, given):  # may be below 1: invalid bytes are encoded as three
        assert 0.5 < answer["slots"] <= 1.02


def test_a_mark_is_an_expected_value(scripted: Any) -> None:
    def scored(*shares: float) -> Completion:
        logprobs = tuple(ChoiceLogprob(math.log(share), 2) for share in shares)
        reply: Completion = scripted.completion("", choice_logprobs=logprobs)
        return reply

    replies = iter([scored(0.1, 0.1, 0.1, 0.1, 0.6), scored(0.5, 0.001, 0.001, 0.001, 0.5)])
    judged: list[Request] = []

    class Judge:
        def generate(self, requests: Sequence[Request]) -> list[Completion]:
            judged.extend(requests)
            return [next(replies) for _ in requests]

    example = planning(2, 0).example
    answers = [
        (PDOSQuestion("", (), example, 1, about="Why?"), "Because."),
        (PDOSQuestion("", (), example, 1, about="Where?", reference="Oslo"), "{{ there }}"),
    ]
    assert [mark_of(Judge(), *one) for one in answers] == pytest.approx([4.0, 3.0], abs=0.01)
    assert all(request.choices == (" 1", " 2", " 3", " 4", " 5") and request.close_choices for request in judged)
    described = [request.prompt[0].content for request in judged]
    assert "right answer:\nOslo" in described[1]
    assert "right answer:" not in described[0]
    assert "{{ there }}" in described[1]


@pytest.mark.smoke
def test_the_tables_have_all_sides(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.papers.pdos_questions._A_STEP", 24)
    monkeypatch.setattr("benchmarks.papers.pdos_questions._AN_ASPECT", 24)
    monkeypatch.setattr("benchmarks.papers.pdos_questions._CONCLUSION", 16)
    data, out, screen = tmp_path / "wiki.jsonl", tmp_path / "numbers.json", StringIO()
    passages = "Passage 1:\nOslo is cold.\nPassage 2:\n" + "Rome. " * 3000
    data.write_text(json.dumps({"input": "Where?", "context": passages, "answers": ["Oslo"]}))
    options = PDOSBench(
        model=str(folder),
        tasks=("retrieval", "planning", "qa"),
        people=(4,),
        aspects=(2,),
        data=data,
        rounds=1,
        out=out,
    )
    run(options, Console(file=screen, width=240))
    numbers = json.loads(out.read_text())
    printed = screen.getvalue()
    rows = [line.split("│")[1].strip() for line in printed.splitlines() if line.startswith("│")]
    assert rows == [*SIDES, *SIDES[1:]] * 3
    assert "steps right" in printed
    assert all(cell["right steps"] is not None for cell in numbers["retrieval, 4 people"]["cells"])
    assert "for questions that lost some: 1 of 2" in printed
    for table, right, marked in (("planning, 2 aspects", False, True), ("multi-document QA", True, True)):
        cells = {cell["side"]: cell for cell in numbers[table]["cells"]}
        assert tuple(cells) == SIDES
        assert all((cell["right"] is not None, cell["mark"] is not None) == (right, marked) for cell in cells.values())
        ours, theirs = cells["CoD + pdos, given"], cells["CoD"]
        ratio = theirs["seconds"] / ours["seconds"]
        assert f"{ratio:.2f}x" in printed
        assert ours["seconds"] == ours["prefill"] + ours["decoding"]
        assert f"{cells['normal']['decoding'] / ours['decoding']:.2f}x" in printed
        assert f"{ours['mark'] - cells['normal']['mark']:+.2f} (one value)" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tasks", "retrieval,plan"), "option tasks: Input should be 'retrieval', 'planning' or 'qa'"),
        (("--people", "ten"), "option people: Input should be a valid integer"),
        (("--people", "3"), "option people: Input should be greater than or equal to 4"),
        (("--aspects", "2,11"), "option aspects: Input should be less than or equal to 10"),
        (("--passages", "3"), "option passages: Input should be greater than or equal to 4"),
        (("--tasks", "planning", "--data", "a.jsonl"), "which only the task qa reads: add qa to --tasks"),
        (("--out", "nowhere/n.json"), "does not exist: create it first"),
    ],
)
def test_invalid_options_are_rejected_with_an_error(
    capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main(["pdos", *arguments]) == 2
    assert message in capfd.readouterr().err
