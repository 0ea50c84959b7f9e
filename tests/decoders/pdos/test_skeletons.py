"""PDOS, stage 1: skeletons written by the model with forced logits, and the handling of broken ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tot.decoders import LocalDecoder
from tot.decoders.methods import pdos

END = 2
Make = Callable[..., LocalDecoder]
OSLO, ROME = "I compare.\n#### Oslo: cold\n####", "I compare.\n#### Rome: warm, they say.\n####"
SKELETON = "I compare.\n#### Oslo:...\n#### Rome:...\n####%%%"
TEXT = "I compare.\n#### Oslo: cold\n#### Rome: warm, they say.\n####%%%\nSo Oslo is colder."
PARTS = [
    ("exact", "I compare.\n"),
    ("step", "#### Oslo: cold\n"),
    ("step", "#### Rome: warm, they say.\n"),
    ("exact", "####%%%\n"),
    ("exact", "So Oslo is colder."),
]


def counts(decoder: LocalDecoder) -> tuple[int, int]:
    """Return the numbers of skeletons and of broken ones."""
    found = decoder.method.counts
    assert found is not None
    return found["skeletons"], found["broken"]


def test_a_skeleton_becomes_steps_and_a_conclusion(make: Make, scripted: Any, ask: Any, documents: Any) -> None:
    decoder = make()
    script = scripted(decoder, *documents)
    (got,) = decoder.generate([ask(decoder)])
    assert [(part.kind, part.text) for part in got.parts] == PARTS
    assert (got.text, got.finish_reason, got.answer) == (TEXT, "eos", TEXT)
    assert counts(decoder) == (1, 0)
    assert len(got.tokens) == got.usage.new_tokens
    seen = [text.rpartition("|\n")[2] for texts in script.texts for text in texts]
    assert "I compare.\n#### Oslo:...\n####" in seen  # the model would have continued with " cold"
    assert "I compare.\n#### Oslo:..." not in seen  # fed at once, not sampled
    assert not any("Oslo" in text and "Rome" in text and " cold" in text and "they" not in text for text in seen)


def test_every_sampled_token_is_counted_once_and_given_tokens_never(
    make: Make, scripted: Any, ask: Any, documents: Any
) -> None:
    decoder = make()
    script = scripted(decoder, *documents)
    (got,) = decoder.generate([ask(decoder)])
    codec = decoder.engine.codec
    drawn = [
        "I compare.\n####",
        " Oslo:",
        " Rome:",
        "%%%",
        " cold\n####",
        " warm, they say.\n####",
        "So Oslo is colder.",
    ]
    assert codec.decode(got.tokens) == "".join(drawn)
    skeleton = len(codec.encode("".join(drawn[:4])))
    longest = max(part.tokens for part in got.parts if part.kind == "step")
    assert got.usage.forwards == skeleton + longest + len(codec.encode(drawn[-1])) + 1
    assert got.usage.forwards <= len(script.texts)


def test_a_colon_may_be_part_of_a_token_and_follow_a_token_without_text(
    make: Make, marks: Any, scripted: Any, ask: Any
) -> None:
    class Ends(scripted):
        """After a title's first letter, write an end token that should be ignored, and then "the"."""

        visits = 0

        def next(self, text: str) -> int | None:
            if not text.endswith("|\n#### A"):
                return super().next(text)
            self.visits += 1
            return END if self.visits == 1 else self.engine.codec.encode("the")[0]

    marks(colon="t")
    decoder = make()
    script = Ends(decoder, "#### At on\n####", "#### At...\n####%%%", "#### At on\n####%%%\n.")
    (got,) = decoder.generate([ask(decoder, sampling={"ignore_eos": True, "max_tokens": 70})])
    assert script.visits == 2
    assert got.text.startswith("#### At on\n####%%%\n.")
    skeleton = next(tokens for tokens, *_ in script.tokens if decoder.engine.codec.decode(tokens).endswith("...\n####"))
    assert END not in skeleton


def test_a_second_skeleton_starts_a_second_block(make: Make, scripted: Any, ask: Any, kinds: Any) -> None:
    again = TEXT + "\n#### Ulm: mild.\n####"
    skeleton = TEXT + "\n#### Ulm:...\n####%%%"
    whole = TEXT + "\n#### Ulm: mild.\n####%%%\nDone."
    decoder = make()
    scripted(decoder, OSLO, ROME, SKELETON, again, skeleton, whole)
    (got,) = decoder.generate([ask(decoder)])
    assert got.text == whole
    assert kinds(got) == ["exact", "step", "step", "exact", "exact", "step", "exact", "exact"]
    assert counts(decoder) == (2, 0)


@pytest.mark.parametrize(
    "written",
    [
        "#### a title without a colon\nand on.\n#### more: of it",
        "####: no title\n#### more: of it",
        "####\n\nno title\n#### more: of it",
        (
            "#### a title that goes on"  # language: ok
            " and on and on and on and on and on and on: too long\n#### more: of it"
        ),
        "#### the text ends in its title",
        "####%%% no title at all\n#### more: of it",
        "#### A%%%: a terminator in a title",
    ],
)
def test_a_skeleton_without_steps_gives_the_text_of_ar(
    make: Make, written: str, scripted: Any, ask: Any, outcomes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pdos, "_TITLE_TOKENS", 24)
    decoder, plain = make(), make("ar")
    for target in (decoder, plain):
        scripted(target, "One.\n" + written)
    (got,), (expected,) = (target.generate([ask(target)]) for target in (decoder, plain))
    assert outcomes([got]) == outcomes([expected])
    assert got.logprob == pytest.approx(expected.logprob, abs=1e-3)
    assert got.usage.forwards == expected.usage.forwards
    assert counts(decoder) == (1, 1)


@pytest.mark.parametrize("broken", ["#### no colon\n", "####: ", "####\n", "#### ends", "#### Oslo:", "#### A%%%"])
def test_a_broken_skeleton_runs_the_steps_that_it_has(
    make: Make, broken: str, scripted: Any, ask: Any, kinds: Any
) -> None:
    decoder = make()
    joined = "#### Oslo: cold\n####%%%\nSo."
    scripted(decoder, "#### Oslo: cold\n####", f"#### Oslo:...\n{broken}", joined)
    (got,) = decoder.generate([ask(decoder)])
    assert (got.text, kinds(got), got.finish_reason) == (joined, ["step", "exact", "exact"], "eos")
    assert counts(decoder) == (1, 1)


@pytest.mark.parametrize(
    "skeleton",
    [
        *(f"#### Oslo:...\n{end}" for end in ("####%\n", "#### %%\n", "####%%%", "#####%%%")),
        "##### Oslo:...\n####%%%",  # the marker is too long, and not a part of the title
    ],
)
def test_a_part_of_the_terminator_on_its_own_line_ends_the_block(
    make: Make, ask: Any, scripted: Any, skeleton: str
) -> None:
    decoder = make()
    joined = "#### Oslo: cold\n####%%%\nSo."
    scripted(decoder, *(["##### Oslo:"] if skeleton[4] == "#" else []), "#### Oslo: cold\n####", skeleton, joined)
    (got,) = decoder.generate([ask(decoder)])
    assert (got.text, counts(decoder)) == (joined, (1, 0))


def test_a_skeleton_ends_at_the_maximum_number_of_steps(
    make: Make, scripted: Any, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pdos, "_MAX_STEPS", 2)
    decoder = make()
    skeleton = "".join(f"#### {title}:...\n" for title in "ABCDE")
    steps = [f"#### {title}: on\n####" for title in "AB"]
    scripted(decoder, *steps, skeleton, "#### A: on\n#### B: on\n####%%%\n.")
    (got,) = decoder.generate([ask(decoder)])
    assert got.text == "#### A: on\n#### B: on\n####%%%\n."
    assert counts(decoder) == (1, 0)


def test_a_skeleton_has_at_most_the_steps_that_fit(make: Make, scripted: Any, ask: Any) -> None:
    decoder = make()
    scripted(decoder, "".join(f"#### {title}:...\n" for title in "ABCDEFGHIJ"))
    (got,) = decoder.generate([ask(decoder, sampling={"max_tokens": 60})])
    steps = [part for part in got.parts if part.kind == "step"]
    assert 2 <= len(steps) < 10
    assert len(decoder.engine.codec.encode(got.text)) <= 60
    assert counts(decoder) == (1, 1)


def test_a_skeleton_starts_no_step_that_does_not_fit(
    make: Make, marks: Any, scripted: Any, ask: Any, kinds: Any
) -> None:
    marks(ellipsis=".")
    decoder = make()
    scripted(decoder, "".join(f"#### {title}:.\n" for title in "ABCDEFGHIJ"))
    for room in range(30, 50):
        (got,) = decoder.generate([ask(decoder, sampling={"max_tokens": room})])
        assert "step" in kinds(got)
        assert len(decoder.engine.codec.encode(got.text)) <= room
