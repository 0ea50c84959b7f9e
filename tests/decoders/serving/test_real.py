"""The real model behind a server: the same texts as the local decoder, and shared forwards for many clients."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx2
import openai
import pytest

from tot.decoders import Message, Request, Sampling, load_decoder
from tot.decoders.serving.options import KEY_VARIABLE

QUESTIONS = [
    "What is 12 + 30?",
    "Name three colours.",
    "Is fire cold?",
    "Tom has 5 apples and eats 2. How many are left?",
]


class Server(NamedTuple):
    url: str
    model: str


@contextmanager
def served(options: list[str]) -> Iterator[Server]:
    """Run `tot serve` with these options in its own process on a free port.

    Raises:
        ValueError: If the server does not start, with its last line of output.
    """
    command = [sys.executable, "-m", "tot.cli.app", "serve", "--port", "0", *options]
    environment = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    streams: Any = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, text=True, **streams) as process:
        try:
            line = ""
            for line in process.stderr or ():
                if found := re.search(r"tot serve: (\S+) \(\S+\) is served at (http://\S+)/v1$", line.strip()):
                    yield Server(found[2], found[1])
                    return
            raise ValueError(line.strip())
        finally:
            process.terminate()


def counted(server: Server) -> float:
    """Return the number of forwards so far."""
    found = re.search(r"^tot_forwards_total (\S+)$", httpx2.get(f"{server.url}/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


@pytest.mark.real
def test_smollm2_returns_the_same_texts_to_openais_client_as_locally(smollm2: str) -> None:
    sampling = {"max_tokens": 24, "temperature": 0.8, "seed": 4}
    requests = [
        Request(prompt=(Message(role="user", content=text),), sampling=Sampling(**sampling, n=2)) for text in QUESTIONS
    ]
    with load_decoder("ar", smollm2, dtype="fp32", kv_budget=8000) as decoder:
        expected = [completion.text for completion in decoder.generate(requests)]
    with served(["--model", smollm2, "--decoder", "seed", "--dtype", "fp32", "--kv-budget", "8000"]) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)

        def ask(text: str) -> list[str]:
            reply = client.chat.completions.create(
                model=server.model, messages=[{"role": "user", "content": text}], n=2, **sampling
            )
            return [choice.message.content or "" for choice in reply.choices]

        with client, ThreadPoolExecutor(len(QUESTIONS)) as pool:
            served_texts = [text for texts in pool.map(ask, QUESTIONS) for text in texts]
    assert served_texts == expected


@pytest.mark.real
def test_many_clients_at_once_share_forwards(smollm2: str) -> None:
    with served(["--model", smollm2]) as server:

        def forwards(clients: int) -> float:
            """Count the forwards of all chats with this number of concurrent clients."""

            def ask(text: str) -> None:
                body = {"model": server.model, "messages": [{"role": "user", "content": text}], "max_tokens": 6}
                httpx2.post(f"{server.url}/v1/chat/completions", json=body, timeout=600).raise_for_status()

            before = counted(server)
            with ThreadPoolExecutor(clients) as pool:
                list(pool.map(ask, QUESTIONS))
            return counted(server) - before

        assert forwards(len(QUESTIONS)) < forwards(1)


def test_a_server_that_does_not_start_raises_its_error() -> None:
    with (
        pytest.raises(ValueError, match=r"tot: unknown decoder 'beam'"),
        served(["--model", "x", "--decoder", "beam"]),
    ):
        pass
