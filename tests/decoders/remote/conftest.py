"""A scripted local server with OpenAI's protocol, which records its requests and can fail in scripted ways.

Faults are statuses, resets, and slow, truncated and malformed replies. pytest imports with `importlib`, so tests get
these helpers as fixtures.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from tot.decoders import RemoteDecoder, load_decoder
from tot.decoders.remote.loop import LoopThread

KEY = "sk-very-secret-1234567890"
_BLANKS = 6000


@dataclass
class Asked:
    """One received request."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]


@dataclass
class Fault:
    """A failure that replaces the scripted reply, or changes it (`raw` None)."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    delay: float = 0.0
    """Seconds before the body."""
    keep: float = 1.0
    """Fraction of the body that is sent before the connection is closed."""
    drip: float = 0.0
    """Seconds between the blanks before the body, thousands of them."""
    reset: bool = False
    """Close the connection without a reply."""


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"text": text, "finish_reason": "stop", **fields}


class Scripted:
    """A server that replies with `reply(path, body)`: a list of choices ({"text": ...}), a whole reply, or (status,
    JSON).

    The default text depends only on the prompt, the seed and the sample.
    """

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.faults: deque[Fault] = deque()
        self.always: Fault | None = None
        self.reply: Callable[[str, dict[str, Any]], Any] = self.hashed
        self.models = ["tiny"]
        self.owner = ""
        """`owned_by` of the models."""
        self.models_status = 200
        self.takes_n = True
        self.in_flight = self.most_in_flight = 0
        self.cut_off = 0
        """Number of requests whose client disconnected before the reply."""
        self.wait_for = 0
        """Hold replies until this number of requests has been in flight."""
        self.slow: str | None = None
        """Never reply to messages that begin with this."""
        self.die_after: int | None = None
        """Close the server after this number of replies."""
        self._thread = LoopThread(self._stop)
        self._server: Any = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def posts(self) -> list[Asked]:
        """The requests, without lists of models."""
        return [asked for asked in self.asked if not asked.path.endswith("/models")]

    # -- start and end ----------------------------------------------------------------------------------------------

    def start(self, after: float = 0.0) -> None:
        """Start the server, after some seconds without a wait for it."""
        if after:
            self._thread.submit(partial(self._start, after))
        else:
            self._thread.wait(self._start)

    async def _start(self, after: float = 0.0) -> None:
        await asyncio.sleep(after)
        self._enough = asyncio.Event()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        self._thread.wait(self._stop)

    async def _stop(self) -> None:
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    def end(self) -> None:
        self._thread.close()

    # -- replies ----------------------------------------------------------------------------------------------------

    def hashed(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        about = json.dumps([body.get("messages"), body.get("prompt")])
        samples = body.get("n", 1) if self.takes_n else 1
        digests = [hashlib.sha256(f"{about}{body.get('seed')}{i}".encode()).hexdigest() for i in range(samples)]
        return [said(f"reply {digest[:8]}") for digest in digests]

    def _whole(self, path: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        made = []
        for i, choice in enumerate(choices):
            rest = {name: value for name, value in choice.items() if name != "text"}
            if path.endswith("/chat/completions"):
                message = {"role": "assistant", "content": choice["text"], **rest.pop("message", {})}
                made.append({"index": i, "message": message, **rest})
            else:
                made.append({"index": i, "text": choice["text"], **rest})
        usage = {
            "prompt_tokens": 10,
            "completion_tokens": 3 * len(choices),
            "prompt_tokens_details": {"cached_tokens": 4},
        }
        return {"id": "x", "object": "reply", "choices": made, "usage": usage}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        body = json.loads(content) if content else {}
        self.asked.append(Asked(target, body, headers))
        if method == "GET":
            names = json.dumps({"data": [{"id": model, "owned_by": self.owner} for model in self.models]})
            return await self._send(writer, Fault(self.models_status, raw=names.encode()))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        gone = asyncio.ensure_future(self._hung_up(reader))
        try:
            if self.most_in_flight >= self.wait_for:
                self._enough.set()
            work = asyncio.ensure_future(self._answer(target, body, writer))
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.cut_off += 1
                work.cancel()
                return False
            return await work
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            self.in_flight -= 1

    async def _hung_up(self, reader: asyncio.StreamReader) -> None:
        while not (reader.at_eof() or reader.exception()):
            await asyncio.sleep(0.005)

    async def _answer(self, target: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if self.wait_for:
            await asyncio.wait_for(self._enough.wait(), 10)
        if self.slow and body["messages"][0]["content"].startswith(self.slow):
            await asyncio.sleep(60)
        fault = self.faults.popleft() if self.faults else self.always or Fault()
        if fault.raw is None:
            reply = self.reply(target, body)
            if isinstance(reply, list):
                reply = self._whole(target, reply)
            if isinstance(reply, tuple):
                fault.status, reply = reply
            fault = Fault(**{**fault.__dict__, "raw": json.dumps(reply).encode()})
        if self.die_after is not None:
            self.die_after -= 1
            if self.die_after < 0:
                await self._stop()
                return False
        return await self._send(writer, fault)

    async def _send(self, writer: asyncio.StreamWriter, fault: Fault) -> bool:
        if fault.reset:
            writer.transport.abort()
            return False
        raw = fault.raw or b""
        length = len(raw) + (_BLANKS if fault.drip else 0)
        headers = {"content-type": "application/json", "content-length": str(length), **fault.headers}
        lines = [f"HTTP/1.1 {fault.status} Said", *(f"{name}: {value}" for name, value in headers.items())]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        await writer.drain()
        await asyncio.sleep(fault.delay)
        for _ in range(_BLANKS if fault.drip else 0):
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(fault.drip)
        sent = raw[: int(len(raw) * fault.keep)]
        writer.write(sent)
        await writer.drain()
        return len(sent) == len(raw)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly remove the waits between retries."""
    monkeypatch.setattr("tot.decoders.remote.client._FIRST_WAIT", 0.001)
    monkeypatch.setattr("tot.decoders.remote.client._LONGEST_WAIT", 0.01)


@pytest.fixture
def fault() -> type[Fault]:
    return Fault


@pytest.fixture
def broken(fault: type[Fault]) -> dict[str, Fault]:
    """Replies that cannot be read, by name."""
    return {
        "reset": fault(reset=True),
        "truncated body": fault(keep=0.6),
        "no body": fault(keep=0.0),
        "malformed JSON": fault(raw=b'{"choices": [{"mess'),
        "empty body": fault(raw=b""),
        "JSON of another shape": fault(raw=b'{"choices": "none"}'),
        "no choices": fault(raw=b'{"choices": []}'),
        "null": fault(raw=b"null"),
        "bytes": fault(raw=b"\xff\xfe\x00", headers={"content-type": "application/octet-stream"}),
        "plain text": fault(raw=b"upstream died", headers={"content-type": "text/plain"}),
        "broken off": fault(raw=b'{"choices": [{"message": {"content": "ha"}, "finish_reason": "abort"}]}'),
        "neither message nor text": fault(raw=b'{"choices": [{"index": 0, "finish_reason": "stop"}]}'),
        "message of null": fault(raw=b'{"choices": [{"message": null, "finish_reason": "stop"}]}'),
        "content of another shape": fault(raw=b'{"choices": [{"message": {"content": {"text": "a"}}}]}'),
        "error with status 200": fault(raw=b'{"error": {"message": "Too many requests"}}'),
        "error with choices of null": fault(raw=b'{"choices": null, "detail": "no capacity"}'),
    }


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    """A separate server for each test, with the key in the environment."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    scripted = Scripted()
    yield scripted
    scripted.end()


@pytest.fixture
def key() -> str:
    return KEY


@pytest.fixture
def remote(server: Scripted) -> Iterator[Callable[..., RemoteDecoder]]:
    """Create decoders of that server."""
    made: list[RemoteDecoder] = []

    def load(**options: Any) -> RemoteDecoder:
        made.append(load_decoder("openai", "tiny", **{"base_url": server.url} | options))
        return made[-1]

    yield load
    for decoder in made:
        decoder.close()
