"""PDOS: instructions in prompts, and refused requests and options."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tot.decoders import (
    LocalDecoder,
    Message,
    OptionError,
    Request,
    RequestError,
    Sampling,
)
from tot.decoders.methods.steps_format import instructed

LONG = "The sum of 10 and 11 is in the range on and on, and the other one: " * 2
CITIES = ("Oslo", "Rome", "the other one", "10")
END = 2
Make = Callable[..., LocalDecoder]


def test_instructions_are_added_to_the_last_user_message_or_the_text() -> None:
    system, user = Message(role="system", content="S"), Message(role="user", content="Q?")
    begun = Message(role="assistant", content="Well,")
    marked = Message(role="user", content="Q?\n\nMark steps.")
    alone = Message(role="user", content="Mark steps.")
    for prompt, expected in [
        ("Q: and on\nA:", "Mark steps.\n\nQ: and on\nA:"),
        ((system, user), (system, marked)),
        ((system, user, begun), (system, marked, begun)),
        ((user, begun, user), (user, begun, marked)),
        ((begun,), (alone, begun)),
        ((system,), (system, alone)),
        ((5, 6, 7), (5, 6, 7)),
    ]:
        assert instructed(prompt, False, "Mark steps.") == expected
        assert instructed(prompt, False, "") == prompt


def test_a_prompt_is_prepared_before_it_reaches_the_model(make: Make, watching: Any) -> None:
    decoder = make(instructions="Mark steps.")
    watch = watching(decoder)
    decoder.generate([Request(prompt="Q: and on\nA:", sampling=Sampling(max_tokens=3))])
    assert watch.texts[0][-1] == "Mark steps.\n\nQ: and on\nA:"


@pytest.mark.parametrize("given", [False, True])
def test_default_instructions_contain_the_markers(given: bool) -> None:
    text = instructed("Which?", given)
    assert "####%%%" in text
    assert ("#### Schools:..." in text) != given
    assert text.endswith("\n\nWhich?")


def test_a_template_that_raises_fails_only_its_request(make: Make, tokenizer: Any) -> None:
    decoder = make(instructions="Mark steps.")
    chat = (Message(role="user", content="Q?"), Message(role="user", content="Please."))
    template = (
        "{% if messages|length > 2 %}{{ raise_exception('no more than two') }}{% endif %}{{ messages[-1].content }}"
    )
    codec = decoder.engine.codec
    codec.tokenizer = copy.deepcopy(tokenizer)
    codec.tokenizer.chat_template = template
    with pytest.raises(RequestError, match="no more than two"):
        decoder.generate([Request(prompt=(*chat, chat[0]))])
    (got,) = decoder.generate([Request(prompt=chat, sampling=Sampling(max_tokens=4))])  # no message was added
    assert len(got.tokens) > 0


@pytest.mark.parametrize(("heat", "alike"), [(0.0, True), (1.0, False)])
def test_equal_titles_are_two_steps(make: Make, heat: float, alike: bool, ids: Any) -> None:
    decoder = make()
    sampling = Sampling(max_tokens=120, temperature=heat, ignore_eos=True)
    (got,) = decoder.generate([Request(prompt=ids(decoder, LONG), sampling=sampling, steps=("Oslo", "Oslo"))])
    first, second = (part for part in got.parts if part.kind == "step")
    assert (first.text.strip() == second.text.strip()) == alike


def test_steps_can_follow_a_prompt_of_one_token(make: Make) -> None:
    decoder = make()
    (got,) = decoder.generate([Request(prompt=(60,), sampling=Sampling(max_tokens=60), steps=("Oslo", "Rome"))])
    assert [part.text.partition(":")[0] for part in got.parts[:3]] == ["\n", "#### Oslo", "#### Rome"]


def test_invalid_steps_are_refused(make: Make) -> None:
    decoder = make()
    short = Sampling(max_tokens=20)
    with pytest.raises(RequestError, match=r"3 steps need at least \d+ tokens, .* room for 20: raise max_tokens"):
        decoder.generate([Request(prompt="abc", sampling=short, steps=("A", "B", "C"))])
    with pytest.raises(ValueError, match="step 2 has no title"):
        Request(prompt="abc", steps=("A", " "))
    with pytest.raises(ValueError, match="give an answer_trigger"):
        Request(prompt="abc", steps=("A",), choices=("1", "2"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_tokens": 6}, "option step_tokens: was removed: steps share max_tokens equally"),
        ({"marker": "@@"}, "option marker: was removed: the format of steps is fixed"),
    ],
)
def test_invalid_options_are_refused(make: Make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make(**options)


@pytest.mark.parametrize("short", [0, 1])
def test_a_request_that_just_fits_the_kv_budget_runs(make: Make, short: int, ids: Any) -> None:
    prompt = ids(make(), LONG)
    decoder = make(kv_budget=len(prompt) + 120 - short)
    request = Request(prompt=prompt, sampling=Sampling(max_tokens=120, ignore_eos=True), steps=CITIES)
    if short:
        with pytest.raises(RequestError, match=rf"may need {len(prompt) + 120} tokens"):
            decoder.generate([request])
    else:
        (got,) = decoder.generate([request])
        assert got.finish_reason == "length"
