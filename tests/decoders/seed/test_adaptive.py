"""SEED: the amount of drafting adapts to its benefit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tot.decoders import Completion, Request
from tot.decoders.drafting.latency_model import LatencyModel


def drafted(completions: Sequence[Completion]) -> int:
    return sum(completion.usage.drafted for completion in completions)


def accepted(completions: Sequence[Completion]) -> int:
    return sum(completion.usage.accepted for completion in completions)


CHEAP = (LatencyModel((1, 64), (0.01, 0.03)), LatencyModel((1, 64), (0.001, 0.002)))
"""Scripted seconds of the target and the draft by rows. Measured times of tiny models depend on the machine."""


@pytest.fixture
def measured(script_latency: Callable[..., None]) -> None:
    """Let every target and draft cost CHEAP's seconds."""
    script_latency(*CHEAP)


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("policy", ["packed", pytest.param("rounds", marks=pytest.mark.slow)])
def test_a_useless_draft_is_rarely_used(bench: Any, policy: str, branches: Callable[..., list[Request]]) -> None:
    requests = branches(4, tokens=60)
    got = {
        adapt: bench.seed(bench.model_drafter(0.5), policy=policy, adapt=adapt, k_config=(2, 1, 1, 1)).generate(
            requests
        )
        for adapt in (False, True)
    }
    assert drafted(got[False]) > 4 * 60 * 6
    assert drafted(got[True]) < drafted(got[False]) / 10
    assert [one.tokens for one in got[True]] == bench.expected(requests)


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("policy", ["packed", "rounds"])
def test_a_perfect_draft_is_used_fully(bench: Any, policy: str, branches: Callable[..., list[Request]]) -> None:
    requests = branches(4, tokens=80)
    got = bench.seed(bench.model_drafter(), policy=policy, k_config=(1,) * 4).generate(requests)
    assert accepted(got) == drafted(got)
    assert accepted(got) >= 0.6 * 4 * 80  # at most four of five tokens, after adapting
    assert [one.tokens for one in got] == bench.expected(requests)
