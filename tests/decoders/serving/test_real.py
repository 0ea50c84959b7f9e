"""The real model behind `tot serve`: the same texts as the local decoder, for several clients at once."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tot.decoders import Message, Request, Sampling, load_decoder

QUESTIONS = [
    "What is 12 + 30?",
    "Name three colours.",
    "Is fire cold?",
    "Tom has 5 apples and eats 2. How many are left?",
]


@pytest.mark.real
@pytest.mark.processes
def test_smollm2_returns_the_same_texts_to_openais_client_as_locally(smollm2: str, python: Any) -> None:
    sampling = {"max_tokens": 24, "temperature": 0.8, "seed": 4}
    requests = [
        Request(prompt=(Message(role="user", content=text),), sampling=Sampling(**sampling, n=2)) for text in QUESTIONS
    ]
    with load_decoder("ar", smollm2, dtype="fp32", kv_budget=8000) as decoder:
        expected = [completion.text for completion in decoder.generate(requests)]
    options = ("--model", smollm2, "--decoder", "seed", "--dtype", "fp32", "--kv-budget", "8000", "--port", "0")
    process = python("-m", "tot.cli.app", "serve", *options)
    url = next(found[1] for line in process.stderr if (found := re.search(r"is served at (\S+)", line)))
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as client:

        def ask(text: str) -> list[str]:
            messages: Any = [{"role": "user", "content": text}]
            reply = client.chat.completions.create(model=smollm2, messages=messages, n=2, **sampling)  # type: ignore[call-overload]
            return [choice.message.content or "" for choice in reply.choices]

        with ThreadPoolExecutor(len(QUESTIONS)) as pool:
            texts = [text for one in pool.map(ask, QUESTIONS) for text in one]
    process.terminate()
    assert texts == expected
