"""Servers of searches on free loopback ports, over a scripted chat decoder, with OpenAI clients.

After each test, no search may run or wait, and no sample may be unfinished.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tot.decoders import Completion, LocalDecoder, Request, ToolCall, Usage
from tot.decoders.budget import Meter
from tot.decoders.serving.app import make_app
from tot.decoders.serving.completions import DecodingMethods
from tot.decoders.serving.limits import Limits
from tot.decoders.serving.service import Service
from tot.decoders.tools import OWN
from tot.serving.live import LiveSearches
from tot.serving.pages import Pages
from tot.serving.search_models import SearchModels
from tot.serving.searches import load_searches

MODEL = "chat"


class Chat:
    """A chat model whose n-th sample is the n-th text, of `tokens` tokens each. It needs no engine, as a remote one.

    A sample that begins with "wait" ends when `free` is set; one that ends with a blank line is not the whole message,
    and the token limit cuts one that ends with "…".
    """

    name = "scripted"
    chats = True

    def __init__(self, *texts: str, tokens: int = 5) -> None:
        self.texts = texts
        self.tokens = tokens
        self.free = threading.Event()
        self.requests: list[Request] = []
        self.unfinished = 0
        self.cancelled = 0

    def read_calls(self, completion: Completion) -> tuple[str, list[ToolCall]]:
        """Read calls in the form of Qwen."""
        return OWN.parse(completion.text)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        raise AssertionError("a server awaits `start`")

    def start(self, requests: Sequence[Request], meter: Meter | None = None) -> list[asyncio.Future[list[Completion]]]:
        return [asyncio.ensure_future(self._all(request, meter or Meter())) for request in requests]

    async def _all(self, request: Request, meter: Meter) -> list[Completion]:
        first = len(self.requests)
        self.requests += [request] * request.sampling.n
        texts = [self.texts[i % len(self.texts)] for i in range(first, first + request.sampling.n)]
        self.unfinished += 1
        try:
            while not self.free.is_set() and any(text.startswith("wait") for text in texts):
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.unfinished -= 1
        meter.count(new_tokens=self.tokens * len(texts))
        usages = [Usage(prompt_tokens=10 * (i == 0), new_tokens=self.tokens) for i in range(len(texts))]
        return [
            Completion(text, (1,), -1.0, {"\n": "stop", "…": "length"}.get(text[-1:], "eos"), usage, logprobs=(-1.0,))
            for text, usage in zip(texts, usages, strict=True)
        ]


@pytest.fixture(scope="session")
def chat() -> type[Chat]:
    return Chat


@pytest.fixture(scope="session")
def searching(served: Any) -> Callable[..., Any]:
    """Start a server of searches: searching(decoder, a file of searches, key="..." and limits)."""

    def start(decoder: Any, file: Path | None = None, key: str | None = None, **given: Any) -> Any:
        limits, runs = Limits(**given), LiveSearches()
        searches = SearchModels(MODEL, load_searches(file, decoder), limits, runs)
        methods = [DecodingMethods(MODEL, decoder, limits)] if isinstance(decoder, LocalDecoder) else []
        service = Service([*methods, searches], limits, {"model": MODEL, "decoder": decoder.name})
        pages = Pages(runs, "Searches", lambda: searches.gate.closed and not searches.gate.running)
        app = make_app(service, key, pages=pages.router)
        server = served(decoder, service, app, methods=methods, searches=searches, runs=runs, pages=pages)
        server.live = server.url + pages.path
        return server

    return start


@pytest.fixture
def serve(searching: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Start servers: serve(decoder, searches="vote: {...}", key="..." and limits)."""
    with ExitStack() as stack:

        def start(decoder: Any, searches: str | None = None, **options: Any) -> Any:
            file = None if searches is None else tmp_path / "searches.yaml"
            if file is not None:
                file.write_text(searches)
            return stack.enter_context(closing(searching(decoder, file, **options)))

        yield start


@pytest.fixture
def user() -> Callable[[str], list[dict[str, str]]]:
    """Return a chat with one user message."""
    return lambda text: [{"role": "user", "content": text}]
