"""A server returns the same text as the local decoder with the same float32 weights and chat template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tot.decoders import Completion, LocalDecoder, Message, ModelError, Request, Sampling

pytestmark = pytest.mark.real

QUESTIONS = (
    "Name three fruits.",
    "Hana reads 24 pages on Saturday and half as many on Sunday. How many pages does she read?",  # language: ok
    "Write one sentence about the sea.",
)


def make_request(question: str, **sampling: Any) -> Request:
    return Request(prompt=(Message(role="user", content=question),), sampling=Sampling(**sampling))


def text_and_end(completion: Completion) -> tuple[str, str]:
    return completion.text, "stop" if completion.finish_reason == "eos" else completion.finish_reason


def test_greedy_texts_equal_the_local_decoders(server: Any, remote: Callable[..., Any], local: LocalDecoder) -> None:
    requests = [make_request(question, max_tokens=24) for question in QUESTIONS]
    here, there = local.generate(requests), remote(server).generate(requests)
    assert [text_and_end(one) for one in there] == [text_and_end(one) for one in here]
    assert [one.usage.new_tokens for one in there] == [len(one.tokens) for one in here]
    assert [one.usage.prompt_tokens for one in there] == [one.usage.prompt_tokens for one in here]
    assert len({one.text for one in here}) == 3


def test_a_stop_string_ends_the_text_at_the_same_place_as_locally(
    server: Any, remote: Callable[..., Any], local: LocalDecoder
) -> None:
    (whole,) = local.generate([make_request(QUESTIONS[0], max_tokens=24)])
    stop = whole.text[7:10]
    request = make_request(QUESTIONS[0], max_tokens=24, stop=("never said", stop))
    (here,), (there,) = local.generate([request]), remote(server).generate([request])
    assert text_and_end(there) == text_and_end(here) == (whole.text[: whole.text.index(stop)], "stop")


def test_n_samples_differ_and_are_repeated_by_the_same_seed(server: Any, remote: Callable[..., Any]) -> None:
    # One request at a time: `transformers serve` shares one random generator among all requests.
    decoder = remote(server, concurrency=1)
    first, again, other = (
        [
            one.text
            for one in decoder.generate([make_request(QUESTIONS[2], max_tokens=8, temperature=1.0, n=3, seed=seed)])
        ]
        for seed in (2**64 - 1, 2**64 - 1, 5)
    )
    assert first == again
    assert len(set(first)) == 3
    assert set(first) != set(other)


def test_a_prompt_of_plain_text_is_continued(server: Any, remote: Callable[..., Any], local: LocalDecoder) -> None:
    request = Request(prompt="The capital of France is", sampling=Sampling(max_tokens=6))
    (here,), (there,) = local.generate([request]), remote(server).generate([request])
    assert text_and_end(there) == text_and_end(here)
    assert "Paris" in there.text


def test_a_wrong_model_name_error_lists_the_servers_models(server: Any, remote: Callable[..., Any]) -> None:
    decoder = remote(server, model="smollm-two")
    with pytest.raises(ModelError) as raised:
        decoder.generate([make_request(QUESTIONS[0], max_tokens=4)])
    assert "'smollm-two'" in str(raised.value)
    assert server.model in str(raised.value).lower().partition("its models:")[2]


@pytest.mark.servers
def test_an_assistants_beginning_is_continued_token_for_token(
    vllm_server: Any, remote: Callable[..., Any], local: LocalDecoder
) -> None:
    beginning = Message(role="assistant", content="1. Pears\n2.")
    request = Request(prompt=(Message(role="user", content=QUESTIONS[0]), beginning), sampling=Sampling(max_tokens=12))
    (here,), (there,) = local.generate([request]), remote(vllm_server).generate([request])
    assert text_and_end(there) == text_and_end(here)
    assert there.usage.prompt_tokens == here.usage.prompt_tokens


@pytest.mark.servers
@pytest.mark.parametrize("close", [False, True])
def test_choices_get_the_local_decoders_scores(
    close: bool, vllm_server: Any, remote: Callable[..., Any], local: LocalDecoder
) -> None:
    prompt = (Message(role="user", content="Is the sea wet?"), Message(role="assistant", content="My answer is"))
    choices = (" Yes", " No", " 1", " 10", " I do not know", "…")
    request = Request(prompt=prompt, choices=choices, close_choices=close)
    (here,), (there,) = local.generate([request]), remote(vllm_server).generate([request])
    assert [one.tokens for one in there.choice_logprobs] == [one.tokens for one in here.choice_logprobs]
    totals = [one.total for one in here.choice_logprobs]
    assert [one.total for one in there.choice_logprobs] == pytest.approx(totals, abs=2e-3)
    assert max(totals) - min(totals) > 1


@pytest.mark.servers
def test_log_probabilities_of_a_text_equal_the_local_decoders(
    vllm_server: Any, remote: Callable[..., Any], local: LocalDecoder
) -> None:
    request = make_request(QUESTIONS[1], max_tokens=12)
    (here,), (there,) = local.generate([request]), remote(vllm_server, logprobs=True).generate([request])
    assert there.text == here.text
    assert there.logprob == pytest.approx(here.logprob, abs=2e-3)
