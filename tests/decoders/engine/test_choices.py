"""The engine: scores of choices, and answers after a trigger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tot.decoders import Completion, LocalDecoder, Request, Sampling

END = 2
LONG = "The sum of 10 and 11 is in the range on and on, and the other one: " * 4
Serve = Callable[..., LocalDecoder]


@pytest.mark.parametrize("close", [False, True])
def test_choices_get_the_scores_of_the_text_run_alone(decoder: LocalDecoder, alone: Any, close: bool) -> None:
    codec = decoder.engine.codec
    choices = ("1", "10", "102", " the other", "the <|im_end|>", "z")
    request = Request(prompt=LONG, choices=choices, close_choices=close)
    (completion,), _ = decoder.generate([request]), decoder.generate([request])
    prompt = codec.encode_prompt(LONG)
    for choice, score in zip(choices, completion.choice_logprobs, strict=True):
        ids = [*codec.encode(choice), *([END] if close else [])]
        assert score.total == pytest.approx(alone.total(prompt, ids), abs=1e-3)
        assert score.tokens == len(ids)
        assert score.mean == score.total / len(ids)
    assert (completion.text, completion.tokens, completion.finish_reason) == ("", (), "stop")
    assert completion.usage.new_tokens == 0
    assert completion.usage.forwards == 1


def test_scoring_and_decoding_share_a_batch(decoder: LocalDecoder, outcome: Callable[..., tuple[Any, ...]]) -> None:
    scored = Request(prompt=LONG, choices=("yes", "no"))
    decoded = Request(prompt=LONG, sampling=Sampling(max_tokens=10, n=2, temperature=1.0))
    expected = decoder.generate([scored])[0], *decoder.generate([decoded])
    got = decoder.generate([decoded, scored, decoded, scored])
    assert [outcome(got[i]) for i in (2, 5)] == [outcome(expected[0])] * 2
    assert [outcome(got[i]) for i in (0, 1, 3, 4)] == [outcome(one) for one in expected[1:]] * 2


ENDS = pytest.mark.parametrize(
    ("ended", "settings"),
    [
        ("length", {"max_tokens": 9}),
        ("eos", {"max_tokens": 200}),
        ("stop", {"max_tokens": 20}),
        ("length", {"max_tokens": 9, "temperature": 1.0}),
    ],
)


@ENDS
def test_an_answer_follows_its_trigger(
    decoder: LocalDecoder,
    alone: Any,
    ended: str,
    settings: dict[str, Any],
    answered: Callable[..., tuple[Completion, list[int]]],
    ended_by: Callable[..., Sampling],
) -> None:
    completion, context = answered(decoder, ended, **settings)
    sampling = ended_by(decoder, ended, settings)
    first = len(decoder.generate([Request(prompt="abc", sampling=sampling)])[0].tokens)
    expected = alone.tokens(context, sampling, 7, first=first)
    text = decoder.engine.codec.decode(expected)
    cut = min((text.find(stop) for stop in sampling.stop if stop in text), default=len(text))
    answer = list(completion.tokens[first:])
    assert answer == expected[: len(answer)]
    assert completion.answer == text[:cut]
    assert len(answer) == 7 or completion.finish_reason in ("eos", "stop")


@ENDS
def test_choices_are_scored_after_the_trigger(
    decoder: LocalDecoder,
    alone: Any,
    ended: str,
    settings: dict[str, Any],
    answered: Callable[..., tuple[Completion, list[int]]],
) -> None:
    choices = (" 1", " 10", "z")
    completion, context = answered(decoder, ended, choices, **settings)
    assert completion.answer == ""
    for choice, score in zip(choices, completion.choice_logprobs, strict=True):
        ids = decoder.engine.codec.encode(choice)
        assert score.total == pytest.approx(alone.total(context, ids), abs=1e-3)
