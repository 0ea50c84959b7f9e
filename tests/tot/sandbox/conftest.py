"""Skip where programs cannot be confined, and leave no process behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from tot.decoders.errors import OptionError
from tot.sandbox import confines


@pytest.fixture(autouse=True)
def confined() -> Iterator[None]:
    """Skip if the kernel cannot sandbox programs; fail in CI. Every started process must have ended after the test."""
    try:
        confines()
    except OptionError as error:
        if "CI" in os.environ:
            pytest.fail(str(error))
        pytest.skip(str(error))
    before = {child.pid for child in psutil.Process().children()}  # a browser's processes, too, which start others
    yield
    deadline = time.monotonic() + 20  # a killed process takes a moment to disappear
    while (left := _left(before)) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert left == []


def _left(before: set[int]) -> list[list[str]]:
    """Return the commands of running children of this process that are not in `before`."""
    new = [child for child in psutil.Process().children() if child.pid not in before]
    found = []
    for child in new:
        with suppress(psutil.NoSuchProcess):
            running = [one for one in (child, *child.children(recursive=True)) if one.status() != psutil.STATUS_ZOMBIE]
            found += [one.cmdline() for one in running]
    return found
