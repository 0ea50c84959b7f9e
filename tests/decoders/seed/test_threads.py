"""SEED: drafting threads, overlap, and the count of forwards by request."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tot.decoders import Request
from tot.decoders.timeline import Timeline

ROUNDS: dict[str, Any] = {"policy": "rounds", "adapt": False, "k_config": (2, 1)}
BESIDE = {**ROUNDS, "overlap": True}


@pytest.mark.parametrize(("overlap", "thread"), [(True, "tot-draft_0"), (False, "tot-engine")])
def test_drafts_run_in_the_expected_thread(
    bench: Any, overlap: bool, thread: str, watching: Any, branches: Callable[..., list[Request]]
) -> None:
    watched = watching()
    decoder = bench.seed(watched, **ROUNDS, overlap=overlap)
    decoder.generate(branches(3))
    decoder.close()
    assert watched.threads == {thread}
    assert len({*watched.ended}) == 3


def test_finished_drafts_queue_up_while_the_target_runs(
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


def test_without_overlap_no_draft_runs_beside_the_target(
    bench: Any, watching: Any, branches: Callable[..., list[Request]]
) -> None:
    decoder = bench.seed(watching(), **ROUNDS, overlap=False)
    timeline = decoder.engine.timeline = Timeline()
    decoder.generate(branches(4))
    forwards = [span for span in timeline.spans if span.lane == "target"]
    drafts = [span for span in timeline.spans if span.kind == "draft"]
    assert not any(draft.began < one.ended and one.began < draft.ended for draft in drafts for one in forwards)
