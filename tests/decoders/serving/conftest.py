"""Servers on free loopback ports, each in its own thread, over the tiny random model, with OpenAI clients.

After each test, all of its server's slots must be free and none of its requests may remain.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from transformers.utils import logging

from tot.decoders import LocalDecoder
from tot.decoders.engine.text import TextCodec
from tot.decoders.serving.app import make_app
from tot.decoders.serving.completions import DecodingMethods
from tot.decoders.serving.limits import Limits
from tot.decoders.serving.service import Service

MODEL = "tiny"


@pytest.fixture
def serve(served: Any, tiny: Callable[..., LocalDecoder]) -> Iterator[Callable[..., Any]]:
    """Start servers: serve(key=..., hosts=..., kv_budget=..., options=..., sampling=..., and limits)."""
    with ExitStack() as stack:

        def start(
            key: str | None = None,
            hosts: Any = (),
            kv_budget: int = 4000,
            options: Any = None,
            sampling: Any = None,
            **given: Any,
        ) -> Any:
            decoder = stack.enter_context(closing(tiny(kv_budget=kv_budget)))
            limits = Limits(**{"max_tokens_limit": 300} | given)
            methods = DecodingMethods(MODEL, decoder, limits, options, sampling)
            stack.enter_context(closing(methods))
            service = Service([methods], limits, {"model": MODEL, "decoder": decoder.name})
            app = make_app(service, key, hosts)
            return stack.enter_context(closing(served(decoder, service, app, methods=methods, gate=methods.gate)))

        yield start


@pytest.fixture
def server(serve: Callable[..., Any]) -> Any:
    return serve()


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], None]:
    """Give the model of a server another chat template."""

    def use(server: Any, template: str) -> None:
        tokenizer = server.decoder.tokenizer
        monkeypatch.setattr(tokenizer, "chat_template", template)
        server.decoder.engine.codec = codec = TextCodec(tokenizer)
        monkeypatch.setitem(vars(server.decoder), "calls", codec.calls)  # without a trial, which a tiny model fails

    return use


@pytest.fixture
def says() -> Callable[[str], list[dict[str, str]]]:
    """Return a chat with one user message."""
    return lambda text: [{"role": "user", "content": text}]


@pytest.fixture(autouse=True)
def _no_error_is_a_crash(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Check that the server's log has no traceback, regardless of the client's requests."""
    yield
    assert [record for record in caplog.records if record.exc_info] == []


# -- as a program ----------------------------------------------------------------------------------


@pytest.fixture
def folder(tiny: Callable[..., Any], tmp_path: Path) -> Path:
    """Save the tiny model as a folder."""
    place = tmp_path / "tiny"
    with tiny() as decoder:
        pass  # restores the model's own attention
    logging.disable_progress_bar()
    decoder.model.save_pretrained(place)
    logging.enable_progress_bar()
    decoder.tokenizer.save_pretrained(place)
    return place


class Program:
    """A running `tot serve`. `said` holds the lines that it wrote before it was ready."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said: list[str] = []
        assert process.stderr is not None
        for line in process.stderr:
            self.said.append(line)
            if found := re.search(r" is served at (http://\S+)/v1$", line):
                self.url = found[1]
                return
        raise AssertionError("".join(self.said))

    def metric(self, name: str) -> float:
        return float(re.findall(rf"^{name} (\S+)$", httpx.get(f"{self.url}/metrics").text, re.MULTILINE)[0])

    def end(self) -> tuple[int, str, str]:
        """Return the exit status and the output written since the program was ready."""
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@pytest.fixture
def start(python: Any, folder: Path) -> Callable[..., Program]:
    def run(*options: str, **environment: Any) -> Program:
        arguments = ("--model", str(folder), "--dtype", "fp32", "--port", "0", "--kv-budget", "12000", *options)
        return Program(python("-m", "tot.cli.app", "serve", *arguments, **environment))

    return run
