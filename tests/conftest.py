"""What all tests share."""

from __future__ import annotations

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
