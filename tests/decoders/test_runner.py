"""Runner: in any packed forward, each branch's logits equal its text run alone."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tot.decoders import OptionError
from tot.decoders.engine.radix_cache import Branch
from tot.decoders.engine.runner import Chunk, Forward, Runner
from tot.decoders.models.families import FAMILIES
from tot.decoders.models.loaded import LoadedModel

VOCAB = 300
WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
"""Sizes that run in C. Other models here run in torch."""
CLOSE = 2e-4
"""Logits have a standard deviation of about two, so this tolerance only covers float32 rounding."""


class Bench:
    """A Runner, an unmodified copy of its model, and checks after each forward."""

    def __init__(self, model: Any, logits_alone: Callable[..., Tensor], capacity: int = 4000) -> None:
        self.reference = copy.deepcopy(model)
        self.runner = Runner(LoadedModel.of(model), capacity)
        self.cache = self.runner.cache
        self._logits_alone = logits_alone

    def alone(self, branch: Branch) -> Tensor:
        return self._logits_alone(self.reference, self.cache.tokens(branch))

    def grow(self, branch: Branch, tokens: Sequence[int], reads: int = 1) -> Chunk:
        start = len(branch)
        self.cache.extend(branch, tokens)
        return Chunk(branch, start, len(branch), [0] * reads)

    def run(self, *chunks: Chunk) -> Forward:
        """Run one forward, and check that each read row equals the branch's text run alone."""
        with torch.inference_mode():
            result = self.runner.forward(chunks)
        for chunk, rows in zip(chunks, result.rows, strict=True):
            expected = self.alone(chunk.branch)[chunk.stop - len(chunk.reads) : chunk.stop]
            torch.testing.assert_close(torch.from_numpy(result.logits[rows]), expected, atol=CLOSE, rtol=0)
        assert all(self.cache.is_computed(slot) for chunk in chunks for slot in chunk.branch.slots[: chunk.stop])
        return result

    def prompt(self, tokens: Sequence[int]) -> Branch:
        branch = self.cache.open()
        self.run(self.grow(branch, tokens))
        return branch

    def forks(self, branch: Branch, count: int) -> list[Branch]:
        return [self.cache.fork(branch) for _ in range(count)]


@pytest.fixture
def bench(make_model: Callable[..., Any], logits_alone: Callable[..., Tensor]) -> Bench:
    return Bench(make_model(), logits_alone)


def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def test_a_draft_tree_computes_each_of_its_tokens_once(bench: Bench) -> None:
    """Branches 1-2-3, 1-2-4 and 1-5 over one prompt take five rows, although seven tokens are read."""
    rows: list[int] = []
    forward = bench.runner.backend.forward
    bench.runner.backend.forward = lambda tokens, *rest: rows.append(tokens.shape[1]) or forward(tokens, *rest)  # type: ignore[method-assign, func-returns-value]
    drafts = bench.forks(bench.prompt(text(300)), 3)
    paths = ([1, 2, 3], [1, 2, 4], [1, 5])
    result = bench.run(*(bench.grow(draft, path, len(path)) for draft, path in zip(drafts, paths, strict=True)))
    assert rows == [300, 5]
    assert result.own_from == [300, 302, 301]
    assert result.logits.shape == (5, VOCAB)
    assert result.rows[0][:2] == result.rows[1][:2]


def mixed_step(bench: Bench, branches: list[Branch], rng: random.Random) -> list[Chunk]:
    """Return random chunks of all kinds. New branches are added to `branches`."""
    chunks = []
    for branch in rng.sample(branches, rng.randint(1, min(8, len(branches)))):
        kind = rng.choice(["decode", "decode", "chain", "replay", "drafts", "twins", "prompt", "rolled back"])
        if kind == "decode":
            chunks.append(bench.grow(branch, [rng.randrange(VOCAB)]))
        elif kind == "chain":
            new = rng.choices(range(VOCAB), k=rng.randint(2, 20))
            chunks.append(bench.grow(branch, new, rng.randint(1, len(new))))
        elif kind == "replay":
            reads = rng.randint(1, min(4, len(branch)))
            chunks.append(Chunk(branch, len(branch) - reads, len(branch), [0] * reads))
        elif kind in ("drafts", "twins"):
            for fork in bench.forks(branch, rng.randint(2, 4)):
                new = rng.choices(range(2 if kind == "drafts" else 1), k=rng.randint(1, 4))
                chunks.append(bench.grow(fork, new, rng.randint(1, len(new))))
                branches.append(fork)
        elif kind == "prompt":
            start = rng.randint(0, len(branch))
            fork = bench.cache.fork(branch, start)
            bench.cache.extend(fork, rng.choices(range(VOCAB), k=rng.randint(20, 300)))
            chunks.append(Chunk(fork, start, len(fork), [0] * rng.randint(0, 1)))
            branches.append(fork)
        else:
            bench.cache.rollback(branch, rng.randint(1, len(branch)))
            chunks.append(bench.grow(branch, rng.choices(range(VOCAB), k=3), 2))
    return chunks


@pytest.mark.parametrize(("family", "sizes"), [*((name, WIDE) for name in FAMILIES), ("llama", {}), ("qwen2", {})])
def test_any_mix_gives_the_logits_of_each_text_alone(
    make_model: Callable[..., Any], logits_alone: Callable[..., Tensor], family: str, sizes: dict[str, Any]
) -> None:
    """Slots of evicted texts are used again."""
    bench = Bench(make_model(family, **sizes), logits_alone, capacity=1300)
    rng = random.Random(0)
    branches = [bench.prompt(text(300))]
    branches += bench.forks(branches[0], 4)
    for _ in range(20):
        bench.run(*mixed_step(bench, branches, rng))
        kept = [branch for branch in branches if len(branch) < 700][-8:]
        for branch in branches:
            if branch not in kept:
                bench.cache.release(branch)
        branches = kept
    assert bench.cache.stored == 1300


# -- the budget -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "capacity"),
    [(500, 500), ("500", 500), (" 7 ", 7), ("1MiB", 2**20 // 384), ("0.5 mb", 500_000 // 384), ("384KB", 1000)],
)
def test_the_budget_is_in_tokens_or_bytes(make_model: Callable[..., Any], budget: int | str, capacity: int) -> None:
    runner = Runner(LoadedModel.of(make_model()), budget)
    assert runner.slot_bytes == 2 * 2 * 2 * 12 * 4  # keys and values, layers, KV heads, head dim, float32
    assert runner.cache.capacity == capacity


def test_without_a_budget_finished_requests_keep_a_bounded_number_of_tokens(make_model: Callable[..., Any]) -> None:
    caches = [Runner(LoadedModel.of(make_model()), budget).cache for budget in (None, 2**17)]
    assert [cache.most_idle for cache in caches] == [2**15, 2**17]
    assert caches[0].capacity > 2**15


INVALID = r"give tokens, such as 20000, or a size, such as \"1\.5GiB\""
EMPTY = r"holds 0 tokens \(384 bytes each\): give more"


@pytest.mark.parametrize(
    ("message", "budgets"),
    [(INVALID, ["lots", "1.5", "GiB", "1..5GiB", "-3", "1 TiB", ""]), (EMPTY, [0, -5, "0", "0.1KiB"])],
)
def test_an_invalid_budget_is_refused(make_model: Callable[..., Any], message: str, budgets: list[Any]) -> None:
    for budget in budgets:
        with pytest.raises(OptionError, match=message):
            Runner(LoadedModel.of(make_model()), budget)


def test_a_store_that_cannot_be_allocated_leaves_the_model_as_it_was(
    make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    model = make_model()
    monkeypatch.setattr("torch.empty", fail)
    with pytest.raises(MemoryError):
        Runner(LoadedModel.of(model), 500)
    assert model.config._attn_implementation == "sdpa"
