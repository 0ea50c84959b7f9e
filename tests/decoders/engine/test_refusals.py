"""The engine: refused requests, and the numbers in their errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from tot.decoders import LocalDecoder, Message, Request, RequestError, Sampling

Serve = Callable[..., LocalDecoder]


def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(decoder: LocalDecoder) -> None:
    with pytest.raises(RequestError, match=r"prompt has 1024 tokens, .* holds 1024, and .* at least 1025: shorten"):
        decoder.submit([Request(prompt=(5,) * 1024)])
    trigger = Request(prompt=(5,) * 1000, answer_trigger="01234", answer_tokens=20)
    with pytest.raises(RequestError, match="this request needs at least 1026: shorten the prompt"):
        decoder.submit([trigger])


def test_a_request_larger_than_the_kv_budget_is_refused_with_the_numbers(serve: Serve) -> None:
    decoder = serve(kv_budget=50)
    fits = Request(prompt=(5,) * 10, sampling=Sampling(max_tokens=20, n=2, ignore_eos=True, temperature=1.0))
    assert len(decoder.generate([fits])) == 2
    request = fits.model_copy(update={"sampling": fits.sampling.model_copy(update={"max_tokens": 21})})
    with pytest.raises(
        RequestError, match=r"may need 52 .*\(10 for the prompt, .* n=2 samples\) .* holds 50: raise kv_budget"
    ):
        decoder.submit([request])


@pytest.mark.parametrize("prompt", ["", (), []])
def test_an_empty_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(ValidationError, match="the prompt is empty: give text, chat messages or token ids"):
        Request(prompt=prompt)


@pytest.mark.parametrize(
    "request_",
    [
        Request(prompt=(5, 270)),
        Request(prompt="abc and"),
        Request(prompt=(Message(role="user", content="abc"),)),
        Request(prompt="the number", answer_trigger="\nabc"),
        Request(prompt="the number", choices=(" 1", "abc")),
    ],
    ids=["ids", "text", "chat", "trigger", "choices"],
)
def test_a_token_without_a_row_in_the_embedding_is_refused(
    make_model: Callable[..., Any], serve: Serve, request_: Request
) -> None:
    """The tokenizer belongs to another model: it has 279 tokens, and "abc" has id 275."""
    decoder = serve(make_model(vocab_size=270))
    with pytest.raises(RequestError, match=r"token id 27\d \(.*\) has no row in the model's embedding of 270, .* 279"):
        decoder.submit([request_])
    (done,) = decoder.generate([Request(prompt="number", sampling=Sampling(max_tokens=2, ignore_eos=True))])
    assert len(done.tokens) == 2
