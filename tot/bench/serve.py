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
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tot.bench.machine import spread
from tot.decoders.errors import ModelError
from tot.decoders.files import write_json
from tot.decoders.serving.options import KEY_VARIABLE
from tot.registry import load_task

GOAL = 5.0
_PATIENCE = 600
"""Seconds for one reply."""


@dataclass(frozen=True, slots=True)
class Side:
    """What so many clients got out of the server in one round."""

    tokens: int
    seconds: float
    forwards: float

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


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
    questions = _questions()
    sides: dict[int, list[Side]] = {1: [], clients: []}
    with served(model, options) as server:
        for count in sides:  # the first use of a shape is slow on either side
            side(server, count, 1, tokens, questions)
        for turn in range(rounds):
            for count, measured in sides.items():
                measured.append(side(server, count, requests, tokens, questions))
                console.print(f"round {turn + 1}: {count} at once: {measured[-1].speed:.1f} tokens/s", style="dim")
        machine = _machine(server)
    speeds = {count: [one.speed for one in measured] for count, measured in sides.items()}
    ratios = [many / one for many, one in zip(speeds[clients], speeds[1], strict=True)]
    ratio = statistics.median(speeds[clients]) / statistics.median(speeds[1])
    table = Table(
        title=f"tot serve {' '.join(['--model', model, *options])}: {tokens} new tokens a reply, {rounds} rounds",
        caption=machine,
    )
    for heading in ("clients", "tokens/s", "replies a round", "tokens a forward", "against one", "goal"):
        table.add_column(heading, overflow="fold")
    for count, measured in sides.items():
        told = "1.00x" if count == 1 else f"{ratio:.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"
        dense = [one.tokens / one.forwards for one in measured]
        goal = f"at least {GOAL:g}x with 16" if count > 1 else ""
        table.add_row(str(count), spread(speeds[count]), str(requests * count), spread(dense), told, goal)
    console.print(table)
    if out is not None:
        numbers = {str(count): [one.speed for one in measured] for count, measured in sides.items()}
        forwards = {str(count): [one.forwards for one in measured] for count, measured in sides.items()}
        said = {"machine": machine, "model": model, "options": options, "tokens": tokens, "requests": requests}
        write_json(out, {**said, "tokens_per_second": numbers, "forwards": forwards, "ratio": ratio, "ratios": ratios})


def side(server: Address, clients: int, requests: int, tokens: int, questions: Iterator[str]) -> Side:
    """So many clients at once, each with `requests` chats one after another."""
    asked = [[next(questions) for _ in range(requests)] for _ in range(clients)]
    before = _forwards(server)
    with ThreadPoolExecutor(clients) as pool:
        began = time.perf_counter()
        drawn = sum(pool.map(lambda mine: sum(_chat(server, text, tokens) for text in mine), asked))
        seconds = time.perf_counter() - began
    return Side(drawn, seconds, _forwards(server) - before)


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
