"""Help: shown without arguments, with a description of every option."""

from __future__ import annotations

import re
from typing import Any

import pytest


@pytest.mark.parametrize(("arguments", "named"), [((), ("solve", "models", "train")), (("train",), ("collect",))])
def test_a_command_without_arguments_shows_its_help(
    tot: Any, arguments: tuple[str, ...], named: tuple[str, ...]
) -> None:
    status, out, err = tot(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("Usage: tot ")
    assert all(re.search(rf"^ +{name} ", err, re.MULTILINE) for name in named)


def test_help_is_a_command(tot: Any) -> None:
    assert tot("help") == tot("--help")
    assert tot("help", "train", "cllm") == tot("train", "cllm", "--help")


def test_help_describes_every_option(tot: Any) -> None:
    status, out, err = tot("solve", "--help")
    assert (status, err) == (0, "")
    for option in ("--search", "--budget-seconds", "--out", "--json", "--kv-budget"):
        assert re.search(rf"^ +{option}\b.* [A-Za-z]", out, re.MULTILINE)
