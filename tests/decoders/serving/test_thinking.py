"""A server returns the thinking of its model in a field of its own, whole or streamed."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import openai
import pytest

from tot.decoders import Message, Request, Sampling, load_decoder
from tot.decoders.engine.text import TextCodec

HOT = {"temperature": 1.0, "max_tokens": 40, "seed": 11}


@pytest.fixture
def thinker(server: Any) -> Any:
    """A server whose chat template opens the thinking."""
    tokenizer = server.decoder.tokenizer
    before = tokenizer.chat_template
    tokenizer.chat_template = before.replace("assistant\n", "assistant\n<think>\n")
    server.decoder.engine.codec = TextCodec(tokenizer)
    yield server
    tokenizer.chat_template = before


def test_thinking_is_reasoning_content(thinker: Any, client: openai.OpenAI, says: Any) -> None:
    reply = client.chat.completions.create(model="tiny", messages=says("q"), **HOT)
    (local,) = thinker.decoder.generate(
        [Request(prompt=(Message(role="user", content="q"),), sampling=Sampling(**HOT))]
    )
    assert (local.text, local.finish_reason, len(local.tokens)) == ("", "length", 40)
    assert len(local.thinking) > 5
    message = reply.choices[0].message
    assert (message.content, message.reasoning_content) == ("", local.thinking)
    assert reply.choices[0].finish_reason == "length"
    deltas = [
        chunk.choices[0].delta
        for chunk in client.chat.completions.create(model="tiny", messages=says("q"), stream=True, **HOT)
        if chunk.choices
    ]
    thinking = [delta.reasoning_content for delta in deltas if getattr(delta, "reasoning_content", None)]
    assert (len(thinking) > 3, "".join(thinking)) == (True, local.thinking)
    assert "".join(delta.content or "" for delta in deltas) == ""


def test_a_remote_decoder_gets_the_thinking_with_its_own_limit(thinker: Any) -> None:
    sampling = Sampling(temperature=1.0, max_tokens=8, thinking_tokens=30, seed=3)
    request = Request(prompt=(Message(role="user", content="q"),), sampling=sampling)
    (local,) = thinker.decoder.generate([request])
    with closing(load_decoder("openai", "tiny", base_url=f"{thinker.url}/v1")) as remote:
        (completion,) = remote.generate([request])
    assert (completion.text, completion.thinking) == ("", local.thinking)
    assert completion.tokens == local.tokens
    assert len(local.tokens) == 30
