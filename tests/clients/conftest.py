"""`tot serve` on a free port, and clients in an environment of their own, which knows only its address."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tot.decoders.serving.limits import KEY_VARIABLE


@pytest.fixture(scope="session")
def clients() -> Path:
    """The folder of the clients' programs."""
    python = os.environ.get("TOT_CLIENTS")
    if python is None:
        pytest.skip("needs OpenAI clients in their own environment: `make test-clients` sets it up, and TOT_CLIENTS")
    return Path(python).parent


@pytest.fixture(scope="session")
def server(clients: Path, smollm2: str) -> Iterator[str]:
    """Serve SmolLM2 and its searches, and return the address."""
    command = [sys.executable, "-m", "tot.cli.app", "serve", "--model", smollm2, "--dtype", "fp32", "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    streams: Any = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, text=True, **streams) as process:
        try:
            lines = []
            for line in process.stderr or ():
                lines.append(line)
                if found := re.search(r" is served at (http://\S+)/v1$", line.strip()):
                    yield found[1]
                    return
            pytest.fail(f"the server did not start\n{''.join(lines)}")
        finally:
            process.terminate()


@pytest.fixture
def run(clients: Path, server: str, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a client in an empty folder: run("python", "-", code=...). The examples' address becomes the server's."""
    offline = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

    def run(program: str, *arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
        words = [word.replace("http://127.0.0.1:8000", server) for word in (code, *arguments)]
        return subprocess.run(
            [str(clients / program), *words[1:]],
            input=words[0],
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), **offline},
            cwd=tmp_path,
            text=True,
            capture_output=True,
            timeout=600,
        )

    return run
