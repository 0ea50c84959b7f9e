"""PDOS: steps and texts end by stop strings, limits, budgets and cancellation, and an answer may follow a trigger."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tot.decoders import (
    Budget,
    LocalDecoder,
    Meter,
    Request,
    Sampling,
)

LONG = "The sum of 10 and 11 is in the range on and on, and the other one: " * 2
CITIES = ("Oslo", "Rome", "the other one", "10")
Make = Callable[..., LocalDecoder]


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_stop_string_in_a_step_ends_the_text(make: Make, scripted: Any, ask: Any) -> None:
    decoder = make()
    scripted(decoder, *(f"#### {title}: on\n####" for title in "ACD"), "#### B: on and off, and on\n####")
    (got,) = decoder.generate([ask(decoder, steps=tuple("ABCD"), sampling={"stop": ("off",)})])
    assert [part.text for part in got.parts] == ["#### A: on\n", "#### B: on and ", ""]
    assert got.finish_reason == "stop"
    assert got.usage.new_tokens == len(got.tokens) == sum(part.tokens for part in got.parts)


def test_a_stop_string_in_a_title_ends_the_text_like_in_ar(make: Make, scripted: Any, ask: Any) -> None:
    decoder, plain = make(), make("ar")
    for target in (decoder, plain):
        scripted(target, "One.\n#### Oslo: cold")
    for stop in ("slo", "# O", "####", "\n##"):
        (got,), (expected,) = (
            target.generate([ask(target, sampling={"stop": (stop,)})]) for target in (decoder, plain)
        )
        assert (got.text, got.finish_reason, got.tokens) == (expected.text, "stop", expected.tokens)
        assert got.logprob == pytest.approx(expected.logprob, abs=1e-3)


def test_a_step_ends_at_its_marker_end_token_or_limit(make: Make, scripted: Any, ask: Any) -> None:
    decoder = make()
    scripted(decoder, "#### A: on\n####", "#### B: and", "#### C: on and on and on and on", "#### D: x %%%")
    frame = sum(len(decoder.engine.codec.encode(f"#### {title}:")) + 1 for title in "ABCD")
    most = frame + len(decoder.engine.codec.encode("####%%%\n")) + 5 * 9
    (got,) = decoder.generate([ask(decoder, steps=tuple("ABCD"), sampling={"max_tokens": most})])
    a, b, c, d = (part for part in got.parts if part.kind == "step")
    assert (a.text, b.text, d.text) == ("#### A: on\n", "#### B: and\n", "#### D: x\n")
    assert "#### C: on and on and on and on\n".startswith(c.text.rstrip())
    assert c.tokens == 9 > a.tokens
    assert b.tokens == len(decoder.engine.codec.encode(" and")) + 1


def test_a_step_whose_end_splits_a_token_keeps_its_limit(make: Make, marks: Any, scripted: Any, ask: Any) -> None:
    marks(marker="e")
    decoder = make()
    scripted(decoder, "e A: the")  # one token, " the", of which the two tokens of " th" remain
    most = len(decoder.engine.codec.encode("e A:")) + 1 + len(decoder.engine.codec.encode("e%%%\n")) + 2
    (got,) = decoder.generate([ask(decoder, steps=("A",), sampling={"max_tokens": most})])
    assert (got.parts[0].text, got.parts[0].tokens) == ("e A: \n", 1)


def test_steps_share_max_tokens_with_the_rest_of_the_text(make: Make, ids: Any, kinds: Any) -> None:
    decoder = make()
    sampling = Sampling(max_tokens=100, temperature=1.0, ignore_eos=True)
    (got,) = decoder.generate([Request(prompt=ids(decoder, LONG + "|\n"), sampling=sampling, steps=CITIES)])
    codec = decoder.engine.codec
    frame = sum(len(codec.encode(f"#### {title}:")) + 1 for title in CITIES) + len(codec.encode("####%%%\n"))
    assert [part.tokens for part in got.parts if part.kind == "step"] == [(100 - frame) // 5] * 4
    assert (got.finish_reason, kinds(got)) == ("length", ["step"] * 4 + ["exact"] * 2)
    assert got.parts[-1].tokens >= (100 - frame) // 5


@pytest.mark.parametrize("by", ["cancel", "budget"])
def test_an_interrupted_block_returns_its_partial_steps(
    make: Make, by: str, watching: Any, ids: Any, kinds: Any
) -> None:
    decoder = make()
    sampling = Sampling(max_tokens=900, temperature=1.0, ignore_eos=True, n=2)
    request = Request(prompt=ids(decoder, "abc|\n"), sampling=sampling, steps=CITIES)
    (whole, *_) = decoder.generate([request])
    if by == "budget":
        (handle,) = decoder.submit([request], Meter(Budget(tokens=80)))
    else:
        watch = watching(decoder)
        (handle,) = decoder.submit([request])
        wait_until(lambda: len(watch.texts) > 6)
        handle.cancel()
    first, second = handle.result(30)
    assert first.finish_reason == second.finish_reason == ("cancelled" if by == "cancel" else "budget")
    assert kinds(first) == ["step"] * 4 + ["exact"]
    for cut, part in zip(first.parts, whole.parts, strict=False):
        assert part.kind == "exact" or part.text.startswith(cut.text.removesuffix("\n"))
    assert len(first.tokens) == sum(part.tokens for part in first.parts) > 0
    assert by == "cancel" or len(first.tokens) + len(second.tokens) == 80
    wait_until(lambda: decoder.engine.cache.live == 0)


def test_a_cancelled_skeleton_is_not_part_of_the_text(make: Make, scripted: Any, ask: Any) -> None:
    decoder = make()
    script = scripted(decoder, "I compare.\n" + "".join(f"#### {i}:...\n" for i in range(90)))
    (handle,) = decoder.submit([ask(decoder, sampling={"max_tokens": 900})], stream=True)
    wait_until(lambda: any(texts[0].endswith("#### 3") for texts in script.texts))
    handle.cancel()
    (got,) = handle.result(30)
    assert (got.text, got.finish_reason) == ("I compare.\n", "cancelled")
    wait_until(lambda: decoder.engine.cache.live == 0)


def test_streamed_pieces_join_to_the_text(loose: Any, mixed: Any) -> None:
    decoder = loose()
    for request in mixed(decoder):
        (handle,) = decoder.submit([request], stream=True)
        texts = dict.fromkeys(range(request.sampling.n), "")
        for sample, piece in handle:
            texts[sample] += piece
        assert list(texts.values()) == [one.text for one in handle.result()]


@pytest.mark.parametrize("stop", [(), ("cold",)])
def test_an_answer_follows_the_conclusion(make: Make, stop: tuple[str, ...], scripted: Any, ask: Any, ids: Any) -> None:
    decoder, plain = make(), make("ar")
    prompt = "Which?|\n"
    steps = ("Oslo", "Rome")
    documents = (
        "#### Oslo: is cold\n####",
        "#### Rome: warm\n####",
        "#### Oslo: is cold\n#### Rome: warm\n####%%%\nSo.",
    )
    scripted(decoder, *documents)
    rationale = "#### Oslo: is " if stop else documents[-1]
    joined = Request(prompt=ids(plain, prompt + rationale + " Answer:"), choices=("1", "10", "a"))
    more = {"answer_trigger": " Answer:", "steps": steps, "sampling": {"stop": stop}}
    (scored,) = decoder.generate([ask(decoder, prompt, choices=joined.choices, **more)])
    scripted(plain)
    (expected,) = plain.generate([joined])
    assert scored.text == rationale + " Answer:"
    totals = [[choice.total for choice in one.choice_logprobs] for one in (scored, expected)]
    assert totals[0] == pytest.approx(totals[1], abs=1e-2)
    again = scripted(decoder, *documents, rationale + " Answer: 10#### x: y")
    (got,) = decoder.generate([ask(decoder, prompt, **more)])
    assert got.answer == " 10#### x: y"  # an answer has no skeleton
    assert got.parts[-2].kind == "trigger"
    assert again.texts[-1][0].endswith(rationale + " Answer: 10#### x: y")


def test_choices_alone_get_the_scores_of_ar(make: Make) -> None:
    decoder, plain = make(), make("ar")
    request = Request(prompt="Which is it?", choices=("1", "10"), sampling=Sampling())
    (got,), (expected,) = decoder.generate([request]), plain.generate([request])
    assert got.choice_logprobs == expected.choice_logprobs
    assert got.usage.prompt_tokens == expected.usage.prompt_tokens
