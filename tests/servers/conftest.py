"""Real servers on loopback with SmolLM2's weights in float32, each on a free port in its own process group.

`transformers serve` runs in every test run, vLLM and llama-cpp-python's server in `make test-servers`. A failed test
prints the end of the server's log and the path of the whole log.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tot.decoders import LocalDecoder, load_decoder
from tot.decoders.models.loading import load_model
from tot.decoders.models.model_names import find_model

_TAIL_LINES = 40


class Server:
    """A server process that can be killed and restarted at the same address."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], port: int, model: str, log: Path, health: str = "/health"
    ) -> None:
        self.url = f"http://127.0.0.1:{port}/v1"
        self.model = model
        """The served model name."""
        self.log = log
        self._command = list(command)
        self._env = {**os.environ, **env}
        self._health = health
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, seconds: float = 900.0) -> None:
        """Start the process and wait until it is healthy. Fail the test after `seconds`."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        end = time.monotonic() + seconds
        while not self.is_healthy():
            if self._process.poll() is not None:
                pytest.fail(f"the server ended with {self._process.returncode} before it answered\n{self.tail()}")
            if time.monotonic() > end:
                self.kill()
                pytest.fail(f"the server did not answer within {seconds:.0f} s\n{self.tail()}")
            time.sleep(0.2)

    def is_healthy(self) -> bool:
        try:
            return bool(self.fetch(self._health, seconds=5))
        except OSError:
            return False

    def fetch(self, path: str, seconds: float = 30) -> str:
        """Return the response body of a path beside /v1."""
        with urllib.request.urlopen(self.url.removesuffix("/v1") + path, timeout=seconds) as reply:
            return str(reply.read().decode()) or "ok"

    def metric(self, name: str) -> float:
        """Sum a Prometheus metric over its labels."""
        lines = (line.rpartition(" ") for line in self.fetch("/metrics").splitlines())
        found = [float(value) for left, _, value in lines if left.partition("{")[0] == name]
        assert found, f"no metric {name}"
        return sum(found)

    def stop(self) -> None:
        """Send SIGTERM, then kill the rest of the process group."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        self.kill()

    def kill(self) -> None:
        """Kill the whole group and wait until the address is free again."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):  # the group has already ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(20)
        self._process = None

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([*lines[-_TAIL_LINES:], f"(whole log: {self.log})"])


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="session")
def weights(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as a folder in transformers format."""
    folder, loaded = tmp_path_factory.mktemp("smollm2"), load_model(smollm2, device="cpu")
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def transformers_server(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run `transformers serve` with the weights in a separate hub cache.

    The server samples only if the model's generation_config.json sets do_sample, and takes top_k from there.
    """
    home = tmp_path_factory.mktemp("transformers-serve")
    repository = home / "hub" / "models--tot--smollm2-135m"
    revision = "0" * 40
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    for file in weights.iterdir():
        (snapshot / file.name).symlink_to(file)
    settings = json.loads((weights / "generation_config.json").read_text())
    (snapshot / "generation_config.json").unlink()
    (snapshot / "generation_config.json").write_text(json.dumps({**settings, "do_sample": True, "top_k": 0}))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    port, name = _free_port(), "tot/smollm2-135m"
    command = [str(Path(sys.executable).with_name("transformers")), "serve", name]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    env = {"HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "HF_HUB_OFFLINE": "1"}
    server = Server(command, env, port, name, home / "server.log")
    try:
        server.start()
        yield server
    finally:
        server.stop()


def _python(variable: str, server: str) -> str:
    """Return the Python interpreter of a server's environment. Skip the test without one."""
    python = os.environ.get(variable)
    if python is None:
        pytest.skip(f"needs {server} in an environment of its own: `make test-servers` sets it up, and {variable}")
    return python


@pytest.fixture(scope="session")
def llama_server(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run llama-cpp-python's server on SmolLM2's GGUF file, with the Python interpreter named in TOT_LLAMA."""
    python = _python("TOT_LLAMA", "llama-cpp-python's server")
    port, name = _free_port(), "smollm2-135m"
    command = [python, "-m", "llama_cpp.server", "--model", str(find_model(smollm2)), "--model_alias", name]
    command += ["--host", "127.0.0.1", "--port", str(port), "--n_ctx", "2048"]
    log = tmp_path_factory.mktemp("llama") / "server.log"
    server = Server(command, {}, port, name, log, health="/v1/models")
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def thinking_weights(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with tokens for thinking, in place of two unused ones, and a chat template that opens the thinking."""
    folder = tmp_path_factory.mktemp("thinking") / "smollm2"
    shutil.copytree(weights, folder)
    for file in folder.glob("*.json*"):
        text = file.read_text(encoding="utf-8")
        file.write_text(
            text.replace("<issue_start>", "<think>").replace("<issue_comment>", "</think>"), encoding="utf-8"
        )
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    for token in tokenizer["added_tokens"]:
        token["special"] = token["special"] and "think>" not in token["content"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant\n' }}", "assistant\n<think>\n' }}"))
    return folder


@pytest.fixture(scope="session")
def vllm_server(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run vLLM's CPU build with the Python interpreter named in TOT_VLLM."""
    yield from _vllm(weights, tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="session")
def vllm_caller(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run vLLM with a parser of calls."""
    options = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    yield from _vllm(weights, tmp_path_factory.mktemp("vllm"), *options)


@pytest.fixture(scope="session")
def vllm_thinker(thinking_weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run vLLM on a model that thinks, with a parser of its thinking."""
    yield from _vllm(thinking_weights, tmp_path_factory.mktemp("vllm"), "--reasoning-parser", "deepseek_r1")


def _vllm(weights: Path, home: Path, *options: str) -> Iterator[Server]:
    python = _python("TOT_VLLM", "vLLM")
    port, name = _free_port(), "smollm2-135m"
    # The command `vllm` fails in the CPU build's wheel: it looks for a distribution with another name.
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(weights), "--served-model-name", name]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "2048"]
    command += ["--enable-prefix-caching", "--enable-prompt-tokens-details", "--enforce-eager", *options]
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    server = Server(command, env, port, name, home / "server.log")
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(params=["transformers_server", pytest.param("vllm_server", marks=pytest.mark.servers)])
def server(request: pytest.FixtureRequest) -> Server:
    """Return each server in turn."""
    found: Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture(
    params=[
        "transformers_server",
        pytest.param("vllm_server", marks=pytest.mark.servers),
        pytest.param("llama_server", marks=pytest.mark.servers),
    ]
)
def each_server(request: pytest.FixtureRequest) -> Server:
    """Return each server in turn, whether or not its texts equal the local decoder's."""
    found: Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def remote(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Connect decoders to a server, and close them at teardown."""
    made: list[Any] = []

    def connect(server: Server, **options: Any) -> Any:
        made.append(load_decoder("openai", **{"model": server.model, "base_url": server.url} | options))
        return made[-1]

    yield connect
    for decoder in made:
        decoder.close()


@pytest.fixture(scope="session")
def local(smollm2: str) -> Iterator[LocalDecoder]:
    """Load the local `ar` decoder on the same weights, in float32."""
    torch.set_num_threads(1)
    with load_decoder("ar", smollm2, dtype="fp32") as decoder:
        yield decoder


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Add the end of the logs of the servers that a failed test used."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, Server):
                report.sections.append(("server", value.tail()))
