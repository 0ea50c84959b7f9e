"""`tot bench serve`: tokens a second of a server with many clients at once against the same server with one.

The server is a process of its own, and so is not slowed by its clients; both sides take turns on it in every round.
Each request is a chat that no one has asked before, prefill and HTTP counted; each client has one under way.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import httpx2
from rich.console import Console

from tot.bench.harness import RATE, Bench, Measured, Metric, Side, plain, timed
from tot.bench.options import ServeOptions
from tot.decoders.errors import ModelError
from tot.decoders.serving.options import KEY_VARIABLE
from tot.registry import load_task

_PATIENCE = 600
"""Seconds for one reply."""


class Server(NamedTuple):
    url: str
    model: str


def run(asked: ServeOptions, console: Console) -> None:
    """One client against many, each with as many requests."""
    options = [part for each in asked.decoder_option for part in ("--decoder-option", each)]
    command = ["--model", asked.model, "--decoder", asked.decoder, *options]
    metrics = [
        RATE,
        Metric("replies a round", lambda took: took["replies"], plain(".0f")),
        Metric("tokens a forward", lambda took: took["tokens"] / took["forwards"]),
    ]
    questions = _questions()
    with served(command) as server, Bench(asked, console, str(_call(server, "/health").json()["machine"])) as bench:

        def side(count: int) -> Side:
            return Side(f"{count} client{'s' * (count > 1)}", partial(chats, server, count, asked.tokens, questions))

        bench.compare(
            f"tot serve {' '.join(command)}: {asked.tokens} new tokens a reply",
            [side(1), side(asked.clients)],
            lambda _, turn: asked.requests,
            rounds=asked.rounds,
            warm_up=lambda _: 1,  # the first use of a shape is slow on either side
            metrics=metrics,
            against=["1 client"],
        )


def chats(server: Server, clients: int, tokens: int, questions: Iterator[str], requests: int) -> Measured:
    """So many clients at once, each with `requests` chats one after another."""
    asked = [[next(questions) for _ in range(requests)] for _ in range(clients)]
    before = _forwards(server)
    with ThreadPoolExecutor(clients) as pool:
        work = partial(pool.map, lambda mine: sum(_chat(server, text, tokens) for text in mine), asked)
        seconds, drawn = timed(lambda: sum(work()))
    forwards = _forwards(server) - before
    return {"seconds": seconds, "tokens": drawn, "replies": clients * requests, "forwards": forwards}


@contextmanager
def served(options: list[str]) -> Iterator[Server]:
    """`tot serve` with these options, in a process of its own on a free port, until the end of the block. Raises
    ModelError where it does not start."""
    command = [sys.executable, "-m", "tot.cli.app", "serve", "--port", "0", *options]
    environment = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    with subprocess.Popen(
        command, env=environment, text=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        try:
            assert process.stderr is not None
            said = ["it said nothing"]
            for line in process.stderr:
                said.append(line.strip())
                if found := re.search(r"tot serve: (\S+) \(\S+\) is served at (http://\S+)/v1$", line.strip()):
                    break
            else:
                raise ModelError(f"the server did not start: {said[-1]}")
            yield Server(found[2], found[1])
        finally:
            process.terminate()


def _chat(server: Server, question: str, tokens: int) -> int:
    """New tokens of one reply."""
    asked = {
        "model": server.model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": tokens,
        "temperature": 1.0,
        "seed": 0,
        "ignore_eos": True,
    }
    return int(_call(server, "/v1/chat/completions", asked).json()["usage"]["completion_tokens"])


def _forwards(server: Server) -> float:
    found = re.search(r"^tot_forwards_total (\S+)$", _call(server, "/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def _call(server: Server, path: str, body: dict[str, Any] | None = None) -> httpx2.Response:
    url = server.url + path
    reply = httpx2.get(url) if body is None else httpx2.post(url, json=body, timeout=_PATIENCE)
    if reply.is_error:
        raise ModelError(f"the server refused a request of the benchmark ({reply.status_code}): {reply.text}")
    return reply


def _questions() -> Iterator[str]:
    """GSM8K's demonstrations, over and over, numbered: what precedes the question is shared, the rest is not."""
    texts = [str(entry["question"]) for entry in load_task("gsm8k").data("demonstrations")]
    for number, text in enumerate(itertools.cycle(texts), 1):
        yield f"Problem {number}. {text}"
