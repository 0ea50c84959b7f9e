"""Creative Writing: verification of endings, parsing of scores, and prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tot import solve
from tot.decoders.request import Completion, Request, Usage
from tot.tasks.creative_writing import CreativeWriting, endings, required
from tot.tasks.sentences import paragraphs, split
from tot.tree.thought import State, Thought

TASK = CreativeWriting()
CHAT = CreativeWriting().with_prompts("chat")
SENTENCES = ["The soup was cold.", "I’m a living furnace.", 'He said "go".', "Nobody came."]  # language: ok
QUESTION = " ".join(SENTENCES)
PASSAGE = "\n\n".join(f"Some words first. {sentence}" for sentence in SENTENCES)
FIRST = Thought(parts={"plan": "A plan.", "passage": "One.\n\nTwo."})


# -- required sentences -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", [QUESTION, "\n".join(SENTENCES), json.dumps(SENTENCES), "\n\n".join(SENTENCES)])
def test_sentences_may_be_one_line_several_lines_or_json(question: str) -> None:
    assert required(question) == SENTENCES
    assert endings(question, PASSAGE) == [True] * 4


@pytest.mark.parametrize("question", ["[1, 2]", "[]", '["a", ""]', "[" * 100_000, '["a"', '{"a": 1}'])
def test_invalid_json_is_parsed_as_a_line(question: str) -> None:
    assert required(question) == split(question)


def test_a_line_without_four_sentences_is_used_as_it_is(data: Path) -> None:
    lines = (data / "creative_writing_0_60.txt").read_text(encoding="utf-8").splitlines()
    assert sorted(len(required(line)) for line in lines) == [3] * 4 + [4] * 56
    for line in lines:
        row = {"text": line}
        question, reference = TASK.question_of(row), TASK.reference_of(row)
        assert TASK.start(question).question == line
        passage = "\n\n".join(f"So it was. {sentence}" for sentence in required(question))
        assert TASK.verify(question, passage)
        assert TASK.score(passage, reference) == 1
        spoilt = passage.replace("\n\n", " Or not.\n\n")  # only the last ending is unchanged
        assert TASK.score(spoilt, reference) == 1 / len(required(question))
        assert f"Sentences: {line}" in TASK.prompt("plan", TASK.start(question))[0].content


def test_a_row_may_have_its_sentences_in_the_question_column() -> None:
    assert TASK.question_of({"question": QUESTION}) == TASK.reference_of({"question": QUESTION}) == QUESTION


# -- endings ----------------------------------------------------------------------------------------------------


def test_a_passage_with_all_endings_is_verified() -> None:
    assert endings(QUESTION, PASSAGE) == [True] * 4
    assert TASK.verify(QUESTION, PASSAGE)
    assert TASK.score(PASSAGE, QUESTION) == 1


@pytest.mark.parametrize(
    ("last", "exact"),
    [
        ("Some words. Nobody came.", True),  # language: ok
        ("Nobody came.", True),  # language: ok
        ("Nobody  came. ", True),  # language: ok
        ("nobody came.", False),  # language: ok
        ("Some words. Nobody came", False),  # language: ok
        ("Somebody came.", False),
        ("Nobody came. Then they did.", False),  # language: ok
        ("Then: AntiNobody came.", False),  # language: ok
    ],
)
def test_an_ending_must_match_exactly(last: str, exact: bool) -> None:
    passage = "\n\n".join([*(f"So. {sentence}" for sentence in SENTENCES[:3]), last])
    assert endings(QUESTION, passage) == [True, True, True, exact]
    assert TASK.verify(QUESTION, passage) is exact
    assert TASK.score(passage, QUESTION) == (1 if exact else 0.75)


def test_quote_styles_are_equivalent() -> None:
    passage = PASSAGE.replace("’", "'").replace('"go"', "“go”")
    assert passage != PASSAGE
    assert TASK.verify(QUESTION, passage)


def test_missing_paragraphs_are_wrong() -> None:
    short = "\n\n".join(PASSAGE.split("\n\n")[:2])
    assert endings(QUESTION, short) == [True, True, False, False]
    assert TASK.score(short, QUESTION) == 0.5
    assert endings(QUESTION, "") == [False] * 4
    assert TASK.score("", QUESTION) == TASK.score(None, QUESTION) == 0


def test_an_extra_paragraph_is_not_verified_but_keeps_the_score() -> None:
    assert not TASK.verify(QUESTION, f"{PASSAGE}\n\nThe end.")
    assert TASK.score(f"{PASSAGE}\n\nThe end.", QUESTION) == 1
    assert TASK.score(f"One more. It rained.\n\n{PASSAGE}", QUESTION) == 0  # every ending is one paragraph late


@pytest.mark.parametrize("before", ["Title", "# Title", "**Title**", "*Title*", "Title: A Day", "Here is the passage:"])
def test_a_title_or_introduction_is_not_a_paragraph(before: str) -> None:
    assert TASK.score(f"{before}\n\n{PASSAGE}", QUESTION) == 1
    assert TASK.verify(QUESTION, f"{before}\n\n{PASSAGE}")


@pytest.mark.parametrize("mark", ["**", "*", "_"])
def test_emphasis_and_horizontal_rules_are_ignored(mark: str) -> None:
    passage = "\n\n---\n\n".join(f"Some words. {mark}{one}{mark}" for one in required(QUESTION))
    assert TASK.score(passage, QUESTION) == 1


def test_the_check_of_a_correct_passage_reports_success() -> None:
    assert TASK.verdict == "paragraphs end as asked"


def test_endings_in_the_wrong_order_are_wrong() -> None:
    turned = "\n\n".join(reversed(PASSAGE.split("\n\n")))
    assert endings(QUESTION, turned) == [False] * 4
    assert not TASK.verify(QUESTION, turned)


@pytest.mark.parametrize("answer", [None, 4, [PASSAGE]])
def test_an_answer_that_is_not_text_scores_0(answer: object) -> None:
    assert not TASK.verify(QUESTION, answer)
    assert TASK.score(answer, QUESTION) == 0


# -- parsing ----------------------------------------------------------------------------------------------------


def test_the_answer_of_a_state_is_its_last_passage() -> None:
    state = State(question=QUESTION)
    assert TASK.answer_at(state) is None
    assert TASK.answer_at(state.then(FIRST).then(Thought(parts={"plan": "b", "passage": "Three."}))) == "Three."


def test_the_heuristic_counts_missing_endings() -> None:
    state = State(question=QUESTION)
    assert TASK.heuristic(state) == 4
    assert TASK.heuristic(state.then(Thought(parts={"plan": "a", "passage": PASSAGE}))) == 0
    assert TASK.heuristic(state.then(Thought(parts={"chain": f" a\nPassage:\n{PASSAGE}"}))) == 0
    first, *rest = PASSAGE.split("\n\n")
    for count in (1, 2, 3):
        begun = "\n\n".join([first, *rest[: count - 1]])
        assert TASK.heuristic(state.then(Thought(parts={"plan": "a", "passage": begun}))) == 4 - count


def write(*leads: str) -> State | None:
    state: State | None = CHAT.start(QUESTION)
    for lead in leads:
        text = CHAT.parse_thought("paragraph", lead)
        assert state is not None
        assert text is not None
        state = CHAT.step(state, Thought(parts={"paragraph": text}))
    return state


def test_paragraphs_of_a_chat_model_end_in_the_required_sentences() -> None:
    first, second, third, fourth = required(QUESTION)
    begun = write("Some words.", f"**Paragraph 2:** Others. {second}\n\nAnd more.")
    assert begun is not None
    assert begun.message == f"Some words. {first}\n\nOthers. {second}\n\n"
    assert (CHAT.heuristic(begun), begun.thoughts[-1].ended) == (2, False)
    assert CHAT.candidate(begun) == begun.message.strip() in CHAT.prompt("paragraph", begun)[-1].content
    assert f'before "{third}"' in CHAT.prompt("paragraph", begun)[-1].content
    whole = write("Some words.", f"Others. {second} Too much.", "Third\nlines.", "The end is near.")
    assert whole is not None
    assert whole.thoughts[-1].ended
    assert whole.message.count(second) == 1
    assert whole.message.endswith(f"Third lines. {third}\n\nThe end is near. {fourth}")
    assert CHAT.verify(QUESTION, CHAT.parse_answer(whole.message))
    assert CHAT.step(whole, Thought(parts={"paragraph": "More."})) is None
    assert CHAT.parse_thought("paragraph", "Paragraph 1:\n") is None


class Writer:
    """Vote for the second candidate, and write texts that differ by sample."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        texts = [
            "2" if "Choice 1" in request.prompt[-1].content else f"Words {len(request.prompt[-1].content)}, {i}."  # type: ignore[union-attr]
            for request in requests
            for i in range(request.sampling.n)
        ]
        return [Completion(text, (), 0.0, "eos", Usage()) for text in texts]


def test_a_chat_model_writes_a_verified_passage() -> None:
    solution = solve("creative_writing", QUESTION, decoder=Writer(), prompts="chat")
    assert solution.solved
    assert endings(QUESTION, solution.answer) == [True] * 4
    assert [node.depth for node in solution.tree if node.chosen][-1] == 4


# -- prompts ----------------------------------------------------------------------------------------------------


def test_the_demonstrations_follow_the_instructions() -> None:
    for demo in TASK.prompts.data("demonstrations"):
        question, passage = "\n".join(demo["sentences"]), "\n\n".join(demo["paragraphs"])
        assert TASK.verify(question, passage)
        assert split(" ".join(demo["sentences"])) == demo["sentences"]
        assert len(paragraphs(passage)) == 4
        head = TASK.prompt("plan", State(question=QUESTION))[0].content
        assert f"\nPlan: {demo['plan']}\nPassage:\n{passage}\nAnalysis: {demo['analysis']} Thus the " in head
        assert TASK.parse_value(f"{demo['analysis']} Thus the coherency score is {demo['score']}.") == demo["score"]


@pytest.mark.parametrize(
    "before", ["Sure!", "Certainly! Here is a passage that meets them.", '"A Day"', "A Day\n=====", "Sure!\n\n# A Day"]
)
@pytest.mark.parametrize("after", ["", "\n\n(Each paragraph ends as asked.)", "\n\nNote: it is coherent."])
def test_text_around_a_passage_is_not_a_paragraph(before: str, after: str) -> None:
    passage = f"{before}\n\n{PASSAGE}{after}"
    assert TASK.score(passage, QUESTION) == 1
    assert TASK.verify(QUESTION, passage)


@pytest.mark.parametrize("heading", ["## Part {}", "**Paragraph {}**", "**Part {}:**", "Paragraph {}:"])
def test_paragraphs_may_have_headings(heading: str) -> None:
    written = PASSAGE.split("\n\n")
    passage = "\n\n".join(f"{heading.format(place)}\n\n{one}" for place, one in enumerate(written, 1))
    assert TASK.score(passage, QUESTION) == 1
    assert TASK.verify(QUESTION, f"```\n{passage}\n```")
