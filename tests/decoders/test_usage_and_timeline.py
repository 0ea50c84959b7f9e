"""Usages of completions, and the timeline of a run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tot.decoders import Completion, LocalDecoder, Meter, Request, Sampling, Usage
from tot.decoders.timeline import Span, Timeline

LONG = "The sum of 10 and 11 is in the range on and on, and the other one: "
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("sd", {"k": 3}),
    ("mcsd", {"k_config": (2, 1)}),
    ("seed", {"adapt": False, "k_config": (2, 1)}),
    ("seed", {"policy": "rounds", "adapt": False, "k_config": (2, 1)}),
    ("seed", {"policy": "rounds", "overlap": False}),
]
named = pytest.mark.parametrize(("name", "options"), METHODS, ids=lambda value: str(value).strip("{}"))
Load = Callable[..., LocalDecoder]


@pytest.fixture
def load(make_bench: Callable[..., Any]) -> Load:
    """Create decoders on one target. `draft` is "same" for a draft that is always right, else None."""
    bench = make_bench(kv_budget=6000)
    return lambda name, draft=None, **options: bench.speculative(name, draft, **options)


def requests(count: int = 3, tokens: int = 24, **more: Any) -> list[Request]:
    sampling = {"max_tokens": tokens, "temperature": 0.6, "ignore_eos": True, "n": 2}
    return [Request(prompt=LONG + str(i), sampling=Sampling(seed=i, **sampling), **more) for i in range(count)]


def total(completions: Sequence[Completion]) -> Usage:
    return sum((completion.usage for completion in completions), Usage())


# -- usages ----------------------------------------------------------------------------------------


def test_an_answer_is_counted_with_its_rationale(load: Load) -> None:
    meter = Meter()
    handles = load("sd").submit(requests(answer_trigger=" So", answer_tokens=5), meter)
    completions = [completion for handle in handles for completion in handle.result(30)]
    assert total(completions).new_tokens == meter.new_tokens == 6 * (24 + 5)


@pytest.mark.parametrize(("k", "tokens"), [(1, 32), (3, 32), (4, 50)])
@pytest.mark.parametrize("name", ["sd", "seed"])
def test_a_perfect_draft_gives_its_length_plus_one_tokens(load: Load, name: str, k: int, tokens: int) -> None:
    options: dict[str, Any] = {"k": k} if name == "sd" else {"k_config": (1,) * k, "adapt": False}
    usage = total(load(name, draft="same", **options).generate(requests(tokens=tokens)))
    assert usage.accepted == k * usage.forwards
    assert usage.acceptance_rate == 1.0


def test_the_acceptance_rate_counts_reached_positions(load: Load) -> None:
    usage = total(load("sd", k=4).generate(requests(6, tokens=60)))
    assert 0 < usage.accepted < usage.reached <= usage.drafted
    assert usage.acceptance_rate == usage.accepted / usage.reached
    assert Usage().acceptance_rate is None


def test_candidates_of_one_position_count_as_one_trial(load: Load) -> None:
    usage = total(load("mcsd", draft="same", k_config=(3, 2)).generate(requests(tokens=30)))
    assert usage.reached == usage.accepted == 2 * usage.forwards
    assert usage.accepted / usage.drafted == pytest.approx(2 / (3 + 3 * 2))


def test_drafts_cut_by_the_end_of_a_text_are_not_rejections(load: Load) -> None:
    decoder = load("sd", draft="same", k=4)
    sampling = [Sampling(max_tokens=60, temperature=1.0, seed=i, stop=("e", "1")) for i in range(8)]
    got = decoder.generate([Request(prompt="the range in", sampling=one) for one in sampling])
    assert any(one.usage.accepted < one.usage.drafted for one in got)
    assert [one.usage.reached for one in got] == [one.usage.accepted for one in got]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_forward_counts_for_the_sample_whose_draft_it_verified(load: Load, overlap: bool) -> None:
    decoder = load("seed", draft="same", policy="rounds", overlap=overlap, adapt=False, k_config=(1, 1, 1))
    got = decoder.generate(requests(3, tokens=24))
    assert [completion.usage.forwards for completion in got] == [24 // 4] * 6
    assert decoder.engine.forwards - 6 * 24 // 4 in ((0, 1) if overlap else (0,))  # the prompts


# -- the timeline ----------------------------------------------------------------------------------


@named
def test_spans_are_ordered_in_their_lanes(load: Load, name: str, options: dict[str, Any]) -> None:
    decoder = load(name, draft="same", **options)
    timeline = decoder.engine.timeline = Timeline()
    decoder.generate(requests(2))
    forwards = decoder.engine.forwards
    decoder.engine.close()
    lanes: dict[str, list[Span]] = {}
    for span in timeline.spans:
        lanes.setdefault(span.lane, []).append(span)
    rounds = options.get("policy") == "rounds"
    texts = {lane for lane in lanes if lane.startswith("branch ")}
    assert {*lanes} == {"target"} | (texts if rounds else {"draft"})
    assert len(texts) == (4 if rounds else 0)
    for lane, spans in lanes.items():
        assert all(span.began <= span.ended for span in spans), lane
        assert all(after.began >= before.ended for before, after in itertools.pairwise(spans)), lane
        assert {span.lane for span in spans if span.branch is not None} == ({lane} if lane in texts else set())
    assert [span.kind for span in lanes["target"]] == ["verify", "sampling"] * forwards
    for lane in texts:
        assert [span.kind for span in lanes[lane]] == ["draft", "verify"] * (len(lanes[lane]) // 2)
    if not rounds:
        assert timeline.queue == []
    seconds = timeline.seconds()
    assert {*seconds} == {"draft", "verify", "sampling"}
    for kind in ("verify", "sampling"):
        assert seconds[kind] == pytest.approx(sum(s.ended - s.began for s in lanes["target"] if s.kind == kind))
    drafts = [span for span in timeline.spans if span.kind == "draft"]
    assert seconds["draft"] == pytest.approx(sum(span.ended - span.began for span in drafts))
    assert min(seconds.values()) > 0
