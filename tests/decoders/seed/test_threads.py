"""SEED: who drafts in which thread, what overlaps, and whose a forward is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tot.decoders import Request
from tot.decoders.methods.options import SEEDOptions
from tot.decoders.methods.seed import Rounds
from tot.decoders.timeline import Timeline

ROUNDS: dict[str, Any] = {"policy": "rounds", "adapt": False, "k_config": (2, 1)}


@pytest.mark.parametrize(("overlap", "thread"), [(True, "tot-draft_0"), (False, "tot-engine")])
def test_who_drafts(
    bench: Any, overlap: bool, thread: str, watching: Any, branches: Callable[..., list[Request]]
) -> None:
    watched = watching()
    decoder = bench.seed(watched, **ROUNDS, overlap=overlap)
    decoder.generate(branches(3))
    decoder.close()
    assert watched.threads == {thread}
    assert len({*watched.ended}) == 3


def test_finished_drafts_queue_up_while_the_target_is_at_work(
    bench: Any, branches: Callable[..., list[Request]], watching: Any
) -> None:
    decoder = bench.seed(watching(), **ROUNDS, overlap=True)
    timeline = decoder.engine.timeline = Timeline()
    requests = branches(8, tokens=40)
    assert [completion.tokens for completion in decoder.generate(requests)] == bench.expected(requests)
    decoder.close()
    lengths = [length for _, length in timeline.queue]
    assert 1 < max(lengths) <= 8
    assert min(lengths) == 0
    verified = [span for span in timeline.spans if span.branch is not None and span.kind == "verify"]
    drafts = [span for span in timeline.spans if span.kind == "draft"]
    assert len({span.branch for span in verified}) == len({span.branch for span in drafts}) == 8
    assert any(draft.began < one.ended and one.began < draft.ended for draft in drafts for one in verified)
    assert all(after.began >= before.ended for before, after in itertools.pairwise(verified))  # one at a time


def test_without_overlap_nothing_is_drafted_while_the_target_is_at_work(
    bench: Any, watching: Any, branches: Callable[..., list[Request]]
) -> None:
    decoder = bench.seed(watching(), **ROUNDS, overlap=False)
    timeline = decoder.engine.timeline = Timeline()
    decoder.generate(branches(4))
    forwards = [span for span in timeline.spans if span.lane == "target"]
    drafts = [span for span in timeline.spans if span.kind == "draft"]
    assert not any(draft.began < one.ended and one.began < draft.ended for draft in drafts for one in forwards)


@pytest.mark.parametrize(("beside", "between"), [(0.5, 1.0), (1.0, 0.5)])
def test_drafts_are_made_beside_the_target_where_turns_are_the_shorter_for_it(
    bench: Any, beside: float, between: float
) -> None:
    rounds = Rounds(bench.engine(), bench.model_drafter(0.02), SEEDOptions(**ROUNDS))
    seconds = {rounds._worker: beside, rounds._inline: between}
    asked = []
    for _ in range(1000):
        asked.append(rounds._executor(3))
        rounds._gained, rounds._ended = 2, rounds._ended + seconds[asked[-1]]
    rounds.close()
    faster = min(seconds, key=lambda executor: seconds[executor])
    assert set(asked) == set(seconds)
    assert 850 < asked.count(faster) < 1000


def test_by_the_clock_the_texts_stay_the_same(bench: Any, branches: Callable[..., list[Request]]) -> None:
    decoder = bench.seed(bench.model_drafter(0.02), **ROUNDS)
    requests = branches(5, tokens=60)
    assert [completion.tokens for completion in decoder.generate(requests)] == bench.expected(requests)


def test_a_forward_counts_for_those_whose_turn_it_was(
    bench: Any, watching: Any, branches: Callable[..., list[Request]]
) -> None:
    decoder = bench.seed(watching(), **ROUNDS)
    got = decoder.generate(branches(5))
    for usage in (completion.usage for completion in got):
        assert usage.forwards + usage.accepted == usage.new_tokens == 20
    prompts = decoder.engine.forwards - sum(completion.usage.forwards for completion in got)
    assert prompts in (0, 1)  # they are computed while the first drafts are made
