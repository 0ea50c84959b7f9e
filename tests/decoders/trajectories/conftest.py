"""Helpers for the tests of trajectories: an engine, requests, and the contents of a folder of trajectories.

pytest imports with `importlib`, so tests get these functions as fixtures.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tot.decoders import Engine, Request, Sampling, load_model
from tot.decoders.training.cllm.trajectories import trajectories

LONG = "The sum of 10 and 11 is in the range on and on, and the other one: "


@pytest.fixture(scope="module")
def target(make_model: Callable[..., Any]) -> Any:
    model = make_model(readable=True)
    model.config.name_or_path = "first"
    return model


@pytest.fixture
def engine(target: Any, tokenizer: Any) -> Iterator[Engine]:
    """An engine on a copy of the target, so that the target stays unmodified. All slots must be free at the end."""
    made = Engine(load_model(copy.deepcopy(target), tokenizer=tokenizer), 6000)
    yield made
    made.close()
    assert made.cache.live == 0


def requests(count: int = 10, tokens: int = 30, heat: float = 1.0, **more: Any) -> list[Request]:
    """Return sampled requests, because a random model's greedy text soon loops."""
    sampling = {"max_tokens": tokens, "temperature": heat, "ignore_eos": True, **more}
    return [Request(prompt=LONG[i:], sampling=Sampling(seed=i, **sampling)) for i in range(count)]


def rows(folder: Path, engine: Engine) -> list[dict[str, Any]]:
    return list(trajectories(folder, engine.loaded))


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("shard-*.parquet"))}


@pytest.fixture(name="requests")
def _requests() -> Callable[..., list[Request]]:
    return requests


@pytest.fixture(name="rows")
def _rows() -> Callable[..., list[dict[str, Any]]]:
    return rows


@pytest.fixture(name="shards")
def _shards() -> Callable[..., dict[str, bytes]]:
    return shards
