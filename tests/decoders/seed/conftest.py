"""Helpers for SEED's tests: decoders on copies of one target, and a drafter that records its calls.

pytest imports with `importlib`, so tests get these functions and classes as fixtures.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tot.decoders import Completion, Request, Sampling
from tot.decoders.drafting.drafters import Draft, DraftContext
from tot.decoders.drafting.lookup import LookupDrafter

LONG = "The sum of 10 and 11 is in the range on and on, and the other one: "


class Watched(LookupDrafter):
    """A lookup drafter that records keys, texts and threads. It fails if `fails` is set, and waits while `go_on` is
    clear."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, list[int]]] = []
        """(key, text) of each draft."""
        self.ended: list[int] = []
        self.threads: set[str] = set()
        self.fails = False
        self.go_on = threading.Event()
        self.go_on.set()

    def draft(self, contexts: Sequence[DraftContext], planner: Any = None) -> list[Draft]:
        self.threads.add(threading.current_thread().name)
        self.asked += [(context.key, list(context.tokens)) for context in contexts]
        self.go_on.wait(30)
        if self.fails:
            raise ZeroDivisionError("no draft today")
        return super().draft(contexts, planner)

    def end(self, key: int) -> None:
        self.threads.add(threading.current_thread().name)
        self.ended.append(key)
        super().end(key)


@pytest.fixture
def bench(make_bench: Callable[..., Any]) -> Any:
    return make_bench()


def plain(prompt: str = "abc", **settings: Any) -> Request:
    return Request(prompt=prompt, sampling=Sampling(**{"ignore_eos": True, **settings}))


def branches(count: int, tokens: int = 20) -> list[Request]:
    return [plain(LONG + str(i), max_tokens=tokens, temperature=0.6, seed=i) for i in range(count)]


def results(handles: Sequence[Any]) -> list[Completion]:
    return [completion for handle in handles for completion in handle.result(30)]


@pytest.fixture(name="watching")
def _watching() -> type[Watched]:
    return Watched


@pytest.fixture(name="plain")
def _plain() -> Callable[..., Request]:
    return plain


@pytest.fixture(name="branches")
def _branches() -> Callable[..., list[Request]]:
    return branches


@pytest.fixture(name="results")
def _results() -> Callable[..., list[Completion]]:
    return results
