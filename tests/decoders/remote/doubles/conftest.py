"""Doubles of Ollama and LM Studio, with their differences from OpenAI's API.

The doubles follow the documentation and issues of the two servers, as far as the decoder notices: Ollama ignores `n`,
`top_k` and `min_p`, and runs one request at a time. LM Studio ignores `n`, `min_p`, logprobs and, with MLX, the seed;
its errors have the status 200; thinking is in `reasoning_content`.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any, ClassVar

import pytest

from tot.decoders.remote import decoder as remote_decoder

LONG = 64
"""New tokens of the probe that a short request may overtake."""


class Double:
    """A server with one model, whose words depend on the prompt, and on the seed if it has seeds."""

    ignores: ClassVar[set[str]]
    one_at_a_time = False
    continues = False
    thinking = ""

    def __init__(self) -> None:
        self.posts: list[dict[str, Any]] = []
        self.at_once = self.most_at_once = 0
        self._unseeded = count()
        self._running, self._changed = threading.Lock(), threading.Condition()
        self._shorts = 0

    # -- the model ------------------------------------------------------------------------------------------------

    def words(self, body: dict[str, Any]) -> list[str]:
        given = {name: value for name, value in body.items() if name not in self.ignores}
        messages, limit = body["messages"], body["max_tokens"]
        if messages[-1]["role"] == "assistant":
            return ["0,", "11"] if self.continues else ["1,", "2"]
        one_token = given.get("top_k") == 1 or given.get("top_p", 1) <= 0.01 or given.get("min_p") == 1
        greedy = not body["temperature"] or one_token
        seed = given["seed"] if "seed" in given else next(self._unseeded)
        drawn = random.Random(0 if greedy else f"{seed} {messages[-1]['content']}")
        if "apples" in messages[-1]["content"]:
            return f"3 + 4 = 7. The answer is {drawn.choice((7, 7, 7, 8))}.".split()[:limit]
        return [f"word{drawn.randrange(1000)}" for _ in range(limit)]

    def reply(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        words = self.words(body)
        message = {"role": "assistant", "content": " ".join(words)}
        if self.thinking:
            message["reasoning_content"] = self.thinking
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "stop"}
        if body.get("logprobs") and "logprobs" not in self.ignores:
            choice["logprobs"] = {"content": [{"token": f" {word}", "logprob": -len(word) / 10} for word in words]}
        usage = {"prompt_tokens": 9, "completion_tokens": len(words), "total_tokens": 9 + len(words)}
        return 200, {"object": "chat.completion", "choices": [choice], "usage": usage}

    def unknown(self, method: str, path: str) -> tuple[int, dict[str, Any]]:
        return 404, {"detail": "Not Found"}

    # -- requests -------------------------------------------------------------------------------------------------

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "qwen3:8b", "object": "model", "owned_by": "library"}]}
        if path != "/v1/chat/completions":
            return self.unknown(method, path)
        with self._changed:
            self.posts.append(body)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            self._changed.notify_all()
        try:
            return self._one_of_several(body)
        finally:
            with self._changed:
                self.at_once -= 1
                self._shorts += body["max_tokens"] == 1
                self._changed.notify_all()

    def _one_of_several(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Reply to the long probe after a short one, or before it if the server runs one request at a time."""
        long, held = body["max_tokens"] == LONG, body["messages"][0]["content"].startswith("held")
        if self.one_at_a_time:
            with self._running:
                with self._changed:
                    self._changed.wait_for(lambda: not long or self.at_once > 1, 10)
                time.sleep(0.2 * (body["max_tokens"] == 1))  # the reply before has arrived
                return self.reply(body)
        with self._changed:
            shorts = self._shorts
            self._changed.wait_for(lambda: self._shorts > shorts if long else not held or self.most_at_once > 1, 10)
        return self.reply(body)


class Ollama(Double):
    ignores: ClassVar[set[str]] = {"n", "top_k", "min_p"}
    one_at_a_time = True
    continues = True


class LMStudio(Double):
    ignores: ClassVar[set[str]] = {"n", "min_p", "logprobs", "seed"}
    thinking = "The user wants words."

    def unknown(self, method: str, path: str) -> tuple[int, dict[str, Any]]:
        return 200, {"error": f"Unexpected endpoint or method. ({method} {path})"}

    def reply(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if len(body["messages"][0]["content"]) > 1000:
            return 200, {"error": "The number of tokens to keep is greater than the context length"}
        return super().reply(body)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Double], str]]:
    """Serve a double, and return its address."""
    monkeypatch.setattr(remote_decoder, "_PROBED", {})
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    servers = []

    def start(double: Double) -> str:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                length = int(self.headers.get("content-length", 0))
                body = json.loads(self.rfile.read(length)) if length else {}
                status, data = double.answer(self.command, self.path, body)
                content = json.dumps(data).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST  # noqa: N815

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}/v1"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(params=[Ollama, LMStudio])
def double(request: pytest.FixtureRequest) -> Double:
    made: Double = request.param()
    return made


@pytest.fixture
def ollama() -> type[Double]:
    return Ollama


@pytest.fixture
def lm_studio() -> type[Double]:
    return LMStudio
