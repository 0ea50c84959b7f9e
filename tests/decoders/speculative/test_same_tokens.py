"""Speculative decoding: the tokens equal ar with every draft."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tot.decoders import Request, RequestError

SD = [("sd", {"k": k}) for k in range(1, 7)]
MCSD = [("mcsd", {"k_config": config}) for config in ((2, 2, 1), (4, 2, 1, 1), (1,), (3,))]
SEED: list[tuple[str, dict[str, Any]]] = [
    ("seed", {}),
    ("seed", {"adapt": False, "k_config": (2, 2, 1)}),
    ("seed", {"policy": "rounds"}),
    ("seed", {"policy": "rounds", "overlap": False}),
    ("seed", {"policy": "rounds", "adapt": False, "k_config": (2, 2, 1)}),
]
METHODS = [*SD, *MCSD, *SEED]
FAST = [SD[0], SD[4], MCSD[1], MCSD[2], *SEED]
"""Each of these runs on one of the two families. The rest is slow."""
DRAFTS = ["lookup", "same", "near", "far"]


named = pytest.mark.parametrize(("name", "options"), METHODS, ids=lambda value: str(value).strip("{}"))


def is_slow(family: str, method: tuple[str, dict[str, Any]]) -> bool:
    return method not in FAST or FAST.index(method) % 2 != (family == "qwen2")


@pytest.mark.parametrize(
    ("bench", "name", "options"),
    [
        pytest.param(family, *method, marks=pytest.mark.slow if is_slow(family, method) else ())
        for family in ("llama", "qwen2")
        for method in METHODS
    ],
    indirect=["bench"],
    ids=lambda value: str(value).strip("{}"),
)
def test_all_drafts_equal_ar(
    bench: Any,
    name: str,
    options: dict[str, Any],
    mixed_requests: Callable[..., list[Request]],
    assert_same: Callable[..., None],
    accepted: Callable[..., int],
    drafted: Callable[..., int],
) -> None:
    requests = mixed_requests(8, seed=1)
    expected = bench.ar().generate(requests)
    for draft in DRAFTS if "policy" not in options else ["lookup", "near"]:  # rounds are slow
        got = bench.speculative(name, draft, **options).generate(requests)
        assert_same(got, expected)
        assert accepted(got) < drafted(got) or draft == "same" or options.get("adapt", name == "seed")
    assert {completion.finish_reason for completion in expected} == {"stop", "eos", "length"}
    assert {len(completion.parts) for completion in expected} == {1, 3}


@pytest.mark.parametrize(("kv_budget", "chunk"), [(300, 512), (300, 9), (3000, 1)])
@pytest.mark.parametrize("draft", ["lookup", "near"])
def test_eviction_and_chunks_change_nothing(
    bench: Any,
    draft: str,
    kv_budget: int,
    chunk: int,
    mixed_requests: Callable[..., list[Request]],
    assert_same: Callable[..., None],
) -> None:
    requests = mixed_requests(12, seed=2)
    roomy = bench.engine()
    expected = bench.ar(roomy).generate(requests)
    assert roomy.cache.stored > 300
    engine = bench.engine(kv_budget, chunk)
    decoder = bench.speculative("mcsd", draft, engine, k_config=(3, 2, 1))
    for _ in range(2):
        assert_same(decoder.generate(requests), expected)
    assert engine.cache.peak_live <= kv_budget


def test_a_request_returns_the_same_alone_or_packed_in_any_order(
    bench: Any, mixed_requests: Callable[..., list[Request]], assert_same: Callable[..., None]
) -> None:
    requests = mixed_requests(16, seed=3)
    decoder = bench.speculative("mcsd", "near")
    alone = [decoder.generate([request]) for request in requests]
    for seed in range(3):
        order = random.Random(seed).sample(range(16), 16)
        handles = bench.speculative("mcsd", "near").submit([requests[i] for i in order])
        for i, handle in zip(order, handles, strict=True):
            assert_same(handle.result(30), alone[i])


@pytest.mark.parametrize(
    ("name", "draft", "options"), [("sd", "near", {}), ("sd", "lookup", {}), ("mcsd", "far", {"k_config": (5, 4, 1)})]
)
def test_the_smallest_kv_budget_that_admits_a_request_is_enough(
    bench: Any,
    name: str,
    draft: str,
    options: dict[str, Any],
    plain: Callable[..., Request],
    assert_same: Callable[..., None],
) -> None:
    short = plain("abc the and", max_tokens=12, n=3, temperature=1.0, seed=3)
    answered = short.model_copy(update={"answer_trigger": " So", "answer_tokens": 7})
    for request in (short, answered):
        with pytest.raises(RequestError, match="this request may need") as refused:
            bench.speculative(name, draft, bench.engine(9), **options).submit([request])
        engine = bench.engine(int(str(refused.value).split("may need ")[1].split()[0]))
        got = bench.speculative(name, draft, engine, **options).generate([request])
        assert_same(got, bench.ar().generate([request]))


@named
def test_one_token_is_not_drafted(
    bench: Any, name: str, options: dict[str, Any], assert_same: Callable[..., None], plain: Callable[..., Request]
) -> None:
    (got,) = bench.speculative(name, "same", **options).generate([plain(max_tokens=1)])
    assert (got.usage.drafted, got.usage.accepted, got.usage.forwards) == (0, 0, 1)
    assert_same([got], bench.ar().generate([plain(max_tokens=1)]))
