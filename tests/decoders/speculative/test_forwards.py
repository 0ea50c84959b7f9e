"""Speculative decoding: the number of forwards of a text."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from tot.decoders import Request

LONG = "The sum of 10 and 11 is in the range on and on, and the other one: " * 2
DEPTHS: list[tuple[str, dict[str, Any]]] = [
    *(("sd", {"k": k}) for k in range(1, 7)),
    *(("mcsd", {"k_config": config}) for config in ((2, 2, 1), (4, 2, 1, 1), (1,), (3,))),
    *(("seed", {**policy, "adapt": False, "k_config": (2, 2, 1)}) for policy in ({}, {"policy": "rounds"})),
]
DRAFTS = ["lookup", "same", "near", "far"]


@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize(("name", "options"), DEPTHS, ids=lambda value: str(value).strip("{}"))
def test_a_perfect_draft_is_accepted_whole(
    bench: Any, name: str, options: dict[str, Any], heat: float, plain: Callable[..., Request]
) -> None:
    depth = options.get("k") or len(options["k_config"])
    decoder = bench.speculative(name, "same", **options)
    (got,) = decoder.generate([plain(LONG, max_tokens=23, temperature=heat)])
    assert got.usage.forwards == math.ceil(23 / (depth + 1))
    alone = options.get("policy") == "rounds"  # only then may the prompt be prefilled while the first draft is computed
    assert 0 <= decoder.engine.forwards - got.usage.forwards <= alone
    assert got.usage.accepted == 23 - got.usage.forwards
    if name == "sd":
        assert got.usage.drafted == got.usage.accepted


def test_more_candidates_are_accepted_more_often(
    bench: Any, plain: Callable[..., Request], accepted: Callable[..., int]
) -> None:
    requests = [plain(max_tokens=60, temperature=1.0, seed=seed) for seed in range(4)]
    shares = []
    for config in ((1, 1), (2, 1), (4, 1), (8, 2)):
        got = bench.speculative("mcsd", "near", k_config=config).generate(requests)
        shares.append(accepted(got))
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]


@pytest.mark.parametrize("draft", DRAFTS)
def test_each_forward_returns_the_accepted_tokens_and_one_more(
    bench: Any, draft: str, plain: Callable[..., Request], accepted: Callable[..., int], drafted: Callable[..., int]
) -> None:
    requests = [plain(p, max_tokens=40, temperature=t, n=2) for p in ("abc", LONG) for t in (0.0, 0.6, 1.0)]
    decoder = bench.speculative("sd", draft)
    got = decoder.generate(requests)
    for usage in (completion.usage for completion in got):
        assert usage.new_tokens == usage.forwards + usage.accepted == 40
        assert usage.accepted <= usage.drafted <= 4 * usage.forwards
    assert decoder.engine.forwards == max(completion.usage.forwards for completion in got)
    share = accepted(got) / drafted(got)
    bounds = {"lookup": (0.01, 0.9), "same": (1, 1), "near": (0.1, 0.9), "far": (0, 0.1)}
    assert bounds[draft][0] <= share <= bounds[draft][1]
