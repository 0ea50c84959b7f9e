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


TRIGGER = " So the answer is"


def ended_by(decoder: LocalDecoder, ended: str, settings: dict[str, Any]) -> Sampling:
    """Return settings under which "abc" is continued to the given end.

    A stop string begins inside a token and ends two tokens later, so that some of its tokens are in the cache.
    """
    sampling = Sampling(seed=3, **settings)
    if ended != "stop":
        return sampling
    tokens = decoder.generate([Request(prompt="abc", sampling=sampling)])[0].tokens
    pieces = [decoder.engine.codec.decode([token]) for token in tokens]
    at = next(i for i, piece in enumerate(pieces) if i and len(piece) > 1)
    return Sampling(seed=3, stop=(pieces[at][1:] + "".join(pieces[at + 1 : at + 3]),), **settings)


def answered(
    decoder: LocalDecoder, ended: str, choices: tuple[str, ...] = (), **settings: Any
) -> tuple[Completion, list[int]]:
    """Run a request whose rationale has the given end, and check it up to its trigger.

    Returns:
        The completion, and the token ids that the answer continues.
    """
    codec = decoder.engine.codec
    sampling = ended_by(decoder, ended, settings)
    plain = decoder.generate([Request(prompt="abc", sampling=sampling)])[0]
    assert plain.finish_reason == ended
    request = Request(prompt="abc", sampling=sampling, answer_trigger=TRIGGER, answer_tokens=7, choices=choices)
    (completion,) = decoder.generate([request])
    rationale, trigger, answer = completion.parts
    assert [part.kind for part in completion.parts] == ["exact", "trigger", "exact"]
    assert (rationale.text, trigger.text) == (plain.text, TRIGGER)
    assert completion.text == plain.text + TRIGGER + answer.text
    assert completion.answer == answer.text
    assert completion.tokens[: len(plain.tokens)] == plain.tokens
    retained = max(n for n in range(len(plain.tokens) + 1) if plain.text.startswith(codec.decode(plain.tokens[:n])))
    if ended == "eos":
        retained -= 1
    rest = plain.text[len(codec.decode(plain.tokens[:retained])) :] + TRIGGER
    return completion, [*codec.encode_prompt("abc"), *plain.tokens[:retained], *codec.encode(rest)]


@pytest.mark.parametrize(
    ("ended", "settings"),
    [
        ("length", {"max_tokens": 9}),
        ("eos", {"max_tokens": 200}),
        ("stop", {"max_tokens": 20}),
        ("length", {"max_tokens": 9, "temperature": 1.0}),
    ],
)
def test_an_answer_or_scores_of_choices_follow_the_trigger(
    decoder: LocalDecoder, alone: Any, ended: str, settings: dict[str, Any]
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
    choices = (" 1", " 10", "z")
    completion, context = answered(decoder, ended, choices, **settings)
    assert completion.answer == ""
    for choice, score in zip(choices, completion.choice_logprobs, strict=True):
        ids = decoder.engine.codec.encode(choice)
        assert score.total == pytest.approx(alone.total(context, ids), abs=1e-3)
