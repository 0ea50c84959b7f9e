"""`tot bench serve`: tokens a second of a server with many clients at once against the same server with one.

The server is a process of its own, and so is not slowed by its clients; both sides take turns on it in every round.
Each request is a chat that no one has asked before, prefill and HTTP counted; each client has one under way.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from tot.bench.harness import RATE, Bench, Measured, Metric, Side, plain, timed
from tot.decoders.errors import ModelError
from tot.decoders.serving.options import KEY_VARIABLE
from tot.registry import load_task

_PATIENCE = 600
"""Seconds for one reply."""


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int
    model: str


def run(
    model: str,
    options: list[str],
    clients: int,
    requests: int,
    tokens: int,
    rounds: int,
    out: Path | None,
    console: Console,
) -> None:
    """Measure, print a table and write the numbers to `out`. `options` are those of `tot serve`; `requests` is how many
    each side makes of one client: many clients make as many each."""
    asked = {"model": model, "options": options, "tokens": tokens, "requests": requests, "rounds": rounds}
    metrics = [
        RATE,
        Metric("replies a round", lambda took: took["replies"], plain(".0f")),
        Metric("tokens a forward", lambda took: took["tokens"] / took["forwards"]),
    ]
    questions = _questions()
    with served(model, options) as server, Bench(console, out, _machine(server), asked) as bench:

        def side(count: int) -> Side:
            return Side(f"{count} client{'s' * (count > 1)}", partial(chats, server, count, tokens, questions))

        bench.compare(
            f"tot serve {' '.join(['--model', model, *options])}: {tokens} new tokens a reply",
            [side(1), side(clients)],
            lambda _, turn: requests,
            rounds=rounds,
            warm_up=lambda _: 1,  # the first use of a shape is slow on either side
            size=float,
            metrics=metrics,
            against=["1 client"],
        )


def chats(server: Address, clients: int, tokens: int, questions: Iterator[str], requests: int) -> Measured:
    """So many clients at once, each with `requests` chats one after another."""
    asked = [[next(questions) for _ in range(requests)] for _ in range(clients)]
    before = _forwards(server)
    with ThreadPoolExecutor(clients) as pool:
        work = partial(pool.map, lambda mine: sum(_chat(server, text, tokens) for text in mine), asked)
        seconds, drawn = timed(lambda: sum(work()))
    forwards = _forwards(server) - before
    return {"seconds": seconds, "tokens": drawn, "replies": clients * requests, "forwards": forwards}


@contextmanager
def served(model: str, options: list[str]) -> Iterator[Address]:
    """A server of its own on a free port, until the end of the block. Raises ModelError where it does not start."""
    command = [sys.executable, "-m", "tot.cli.app", "serve", "--model", model, "--port", "0", *options]
    environment = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    with subprocess.Popen(
        command, env=environment, text=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        try:
            assert process.stderr is not None
            said = []
            for line in process.stderr:
                said.append(line.strip())
                if found := re.search(r"tot serve: (\S+) \(\S+\) is served at http://([^/:]+):(\d+)/v1$", line.strip()):
                    break
            else:
                raise ModelError(f"the server did not start: {said[-1] if said else 'it said nothing'}")
            yield Address(found[2], int(found[3]), found[1])
        finally:
            process.terminate()


def _chat(server: Address, question: str, tokens: int) -> int:
    """New tokens of one reply."""
    asked = {
        "model": server.model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": tokens,
        "temperature": 1.0,
        "seed": 0,
        "ignore_eos": True,
    }
    reply = json.loads(_call(server, "POST", "/v1/chat/completions", json.dumps(asked)))
    return int(reply["usage"]["completion_tokens"])


def _forwards(server: Address) -> float:
    found = re.search(r"^tot_forwards_total (\S+)$", _call(server, "GET", "/metrics"), re.MULTILINE)
    assert found is not None
    return float(found[1])


def _machine(server: Address) -> str:
    return str(json.loads(_call(server, "GET", "/health"))["machine"])


def _call(server: Address, method: str, path: str, body: str | None = None) -> str:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=_PATIENCE)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        reply = connection.getresponse()
        text = reply.read().decode()
    finally:
        connection.close()
    if reply.status != 200:
        raise ModelError(f"the server refused a request of the benchmark ({reply.status}): {text}")
    return text


def _questions() -> Iterator[str]:
    """GSM8K's demonstrations, over and over, numbered: what precedes the question is shared, the rest is not."""
    texts = [str(entry["question"]) for entry in load_task("gsm8k").data("demonstrations")]
    for number, text in enumerate(itertools.cycle(texts), 1):
        yield f"Problem {number}. {text}"
