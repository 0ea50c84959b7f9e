"""Benchmark sides of known speed, and small models for all benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.branches import Branches
from benchmarks.harness import Measured
from tot.decoders import LocalDecoder


@pytest.fixture
def log() -> list[tuple[str, int]]:
    """(side, samples) of every call of a paced side, in order."""
    return []


@pytest.fixture
def paced(log: list[tuple[str, int]]) -> Callable[..., Callable[[Branches], Measured]]:
    """Make sides whose work takes `seconds(samples)`, or raises, and log their calls."""

    def make(name: str, seconds: Callable[[int], float]) -> Callable[[Branches], Measured]:
        def run(work: Branches) -> Measured:
            log.append((name, work.count))
            spent = seconds(work.count)
            return work.measured(spent, spent / 2, [[1] * work.new] * work.count)

        return run

    return make


@pytest.fixture(scope="module")
def small(tiny: Callable[[], LocalDecoder], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model of a long context."""
    path = tmp_path_factory.mktemp("model")
    decoder = tiny()
    decoder.close()  # which restores the model's own attention
    decoder.model.config.max_position_embeddings = 16_384
    decoder.model.save_pretrained(path)
    decoder.tokenizer.save_pretrained(path)
    return path
