"""Splitting text into sentences and paragraphs, in linear time on adversarial text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tot.tasks.sentences import paragraphs, split, typed

# Sentences are separated by "|": the text is the same without it.
TEXTS = [
    "It rained. |We left.",
    "The U.S. Army marched at dawn. |It rained.",
    "He is from the U.S. |She left.",
    "At 5 p.m. Tom left. |Ann stayed.",
    "Washington D.C. Police came. |It was late.",
    "She has a Ph.D. in math. |He left.",
    "It rained.",
    "No full stop here",
    "It rained. |And then",
    "Why? |Because! |Really?! |Yes!! |Good.",
    "Dr. Smith met Mr. Jones, Mrs. Jones and Prof. J. R. Smith. |They ate.",
    "We saw St. Paul and Mt. Etna. |Then we slept.",
    "Fruit, e.g. Apples and pears, i.e. Sweet things. |Eat them.",
    "It costs 3.50 or so. |He paid $1.5 in all.",
    "See Fig. 3 and No. 7 on p. 12. |Then stop.",
    "He said no. |Then he left.",
    "He left in Jan. |She left on Feb. 3, in the morning.",
    "It was I. |He saw me.",
    "He lives in the U.S. |She does not.",
    "It opens at 9 a.m. and closes at 5 p.m. |Come early.",
    "Well... maybe. |Wait... |What? |And so… |The end.",
    'She said, "Go now." |He went.',
    'People tell me "orange" but I prefer "pink". |He left.',
    "“Why?” he asked. |“I know.” |She nodded.",
    "‘Stop!’ |‘No.’ |They ran.",
    "(It rained.) |We left [at noon.] |And slept.",
    "*It rained.* |**We left.**",
    "In 1999. |Then 7 more came.",
    "iron rusts. and so on. |Gold does not.",
    "He saw www.example.com today. |It was down.",
    "1. First we eat. |Then we sleep.",
]


def test_a_blank_line_ends_a_sentence_and_a_line_break_does_not() -> None:
    assert split("It rained\n\nWe left") == ["It rained", "We left"]
    assert split("It rained\n   all day. We left.") == ["It rained all day.", "We left."]
    assert split("") == split(" \n\n ") == []


@given(st.text(alphabet='Ab1.!?…"” (\n)D r', max_size=60))
def test_splitting_only_drops_whitespace(text: str) -> None:
    assert "".join("".join(split(text)).split()) == "".join(text.split())
    assert all(sentence == " ".join(sentence.split()) != "" for sentence in split(text))


def test_56_of_60_real_lines_have_four_sentences_and_the_others_lack_a_full_stop(data: Path) -> None:
    lines = (data / "creative_writing_0_60.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 60
    others = {number: split(line) for number, line in enumerate(lines) if len(split(line)) != 4}
    assert {number: len(sentences) for number, sentences in others.items()} == {5: 3, 28: 3, 49: 3, 59: 3}
    joined = [sentence for sentences in others.values() for sentence in sentences if " party " in sentence]
    assert [sentence.split()[5] for sentence in joined] == ["You", "Just", "The"]
    assert others[28][1].startswith("The heat He picked up trash")
    assert all(" ".join(split(line)) == line for line in lines)


# -- paragraphs -------------------------------------------------------------------------------------------------


def test_typed_text_keeps_its_case() -> None:
    assert typed(" I’m “in”\nhere — now… ") == 'I\'m "in" here - now...'


# -- time -------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
@pytest.mark.parametrize("unit", [". ", '."', "A. ", ".", "\n\n", '"', " ", "\n ", "Dr. ", "?!", "a", ".)x", ".x"])
def test_adversarial_text_takes_linear_time(unit: str) -> None:
    text = unit * (400_000 // len(unit)) + "x"
    assert sum(map(len, split(text))) <= len(text)
    assert sum(map(len, paragraphs(text))) <= len(text)
