"""SEED: drafts are verified first come, first served, one after another."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tot.decoders import Request
from tot.decoders.timeline import Timeline

ROUNDS: dict[str, Any] = {"policy": "rounds", "adapt": False, "k_config": (2, 1)}


@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_are_verified_in_the_order_in_which_they_were_drafted(
    bench: Any, watching: Any, branches: Callable[..., list[Request]], overlap: bool
) -> None:
    watched, requests = watching(), branches(5)
    decoder = bench.seed(watched, **ROUNDS, overlap=overlap)
    timeline = decoder.engine.timeline = Timeline()
    assert [one.tokens for one in decoder.generate(requests)] == bench.expected(requests)
    decoder.close()
    verified = [span.branch for span in timeline.spans if span.branch is not None and span.kind == "verify"]
    assert verified == [key for key, _ in watched.asked]
    assert len({*verified}) == 5
    for key in {*verified}:  # no draft waits for more verifications than there are other branches
        turns = [turn for turn, whose in enumerate(verified) if whose == key]
        assert all(after - before <= 5 for before, after in itertools.pairwise(turns))


def test_a_branch_never_drafts_past_unverified_tokens(
    bench: Any, watching: Any, branches: Callable[..., list[Request]]
) -> None:
    """Each drafted text is a prefix of the target's text, longer than at the branch's previous draft."""
    for overlap in (False, True):
        watched = watching()
        requests = branches(6)
        got = bench.seed(watched, **ROUNDS, overlap=overlap).generate(requests)
        written = [tuple(bench.engines[-1].codec.encode_prompt(request.prompt)) for request in requests]
        texts = [prompt + one.tokens for prompt, one in zip(written, got, strict=True)]
        asked: dict[int, list[list[int]]] = {}
        for key, text in watched.asked:
            asked.setdefault(key, []).append(text)
        assert len(asked) == 6
        for (key, growing), whole in zip(sorted(asked.items()), texts, strict=True):
            assert all(tuple(text) == whole[: len(text)] for text in growing), key
            assert all(len(before) < len(after) for before, after in itertools.pairwise(growing))
