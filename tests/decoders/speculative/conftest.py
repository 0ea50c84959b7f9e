"""Helpers for the tests of speculative decoding: a target, drafts of different quality, and requests of all kinds.

pytest imports with `importlib`, so tests get these functions and classes as fixtures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tot.decoders import Completion, Request, Sampling


@pytest.fixture
def bench(request: pytest.FixtureRequest, make_bench: Callable[..., Any]) -> Any:
    return make_bench(getattr(request, "param", "llama"), kv_budget=3000)


def exact(completions: Sequence[Completion]) -> list[tuple[Any, ...]]:
    return [
        (c.tokens, c.text, c.finish_reason, c.parts, [score.tokens for score in c.choice_logprobs]) for c in completions
    ]


def scores(completions: Sequence[Completion]) -> list[float]:
    return [score for c in completions for score in (c.logprob, *(choice.total for choice in c.choice_logprobs))]


def assert_same(got: Sequence[Completion], expected: Sequence[Completion]) -> None:
    assert exact(got) == exact(expected)
    assert scores(got) == pytest.approx(scores(expected), abs=1e-4)


def plain(prompt: str = "abc", **settings: Any) -> Request:
    return Request(prompt=prompt, sampling=Sampling(**{"ignore_eos": True, **settings}))


def drafted(completions: Sequence[Completion]) -> int:
    return sum(completion.usage.drafted for completion in completions)


def accepted(completions: Sequence[Completion]) -> int:
    return sum(completion.usage.accepted for completion in completions)


def rationale(bench: Any, at: int, **settings: Any) -> tuple[str, Completion]:
    """Return two characters that the model first writes at about token `at`, as a stop string, and the text without
    it."""
    (free,) = bench.ar().generate([plain(max_tokens=24, **settings)])
    head = len(bench.engines[0].codec.decode(free.tokens[:at]))
    begins = next(i for i in range(head, len(free.text) - 1) if free.text.find(free.text[i : i + 2]) == i)
    return free.text[begins : begins + 2], free


@pytest.fixture(name="assert_same")
def _assert_same() -> Callable[..., None]:
    return assert_same


@pytest.fixture(name="plain")
def _plain() -> Callable[..., Request]:
    return plain


@pytest.fixture(name="drafted")
def _drafted() -> Callable[..., int]:
    return drafted


@pytest.fixture(name="accepted")
def _accepted() -> Callable[..., int]:
    return accepted


@pytest.fixture(name="rationale")
def _rationale() -> Callable[..., tuple[str, Completion]]:
    return rationale
