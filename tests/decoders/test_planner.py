"""The benefit of speculation: the cost of rows, acceptance statistics, and the plan of one step."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tot.decoders import load_model
from tot.decoders.drafting.draft_model import ModelDrafter
from tot.decoders.drafting.drafters import Draft, DraftContext
from tot.decoders.drafting.latency_model import LatencyModel
from tot.decoders.drafting.lookup import LookupDrafter
from tot.decoders.drafting.planner import AcceptanceStatistics, SpeculationPlanner
from tot.decoders.engine.sampling import Draw

seconds = st.floats(1e-4, 10.0)
measured = st.dictionaries(st.integers(1, 100), seconds, min_size=1, max_size=8).map(
    lambda found: LatencyModel(tuple(sorted(found)), tuple(sorted(found.values())))
)
chances = st.floats(0.0, 1.0)

FLAT = LatencyModel((1,), (1.0,))
LINEAR = LatencyModel((1, 11), (10.0, 20.0))
"""Nine seconds, plus one per row."""
FULL = LatencyModel((1, 8, 16, 32, 64), (1.0, 1.01, 2.0, 4.0, 8.0))
"""Eight rows cost about the same as one. Beyond that, time is proportional to rows."""


# -- latency -----------------------------------------------------------------------------------------


def test_costs_are_interpolated_and_extrapolated_linearly() -> None:
    latency = LatencyModel((1, 5, 7), (1.0, 3.0, 9.0))
    assert [latency.of(rows) for rows in (1, 2, 5, 6, 7, 10)] == [1.0, 1.5, 3.0, 6.0, 9.0, 18.0]
    assert [latency.slope(rows) for rows in (1, 4, 5, 6, 7, 100)] == [0.5, 0.5, 3.0, 3.0, 3.0, 3.0]


def test_with_one_point_rows_are_free() -> None:
    assert [FLAT.of(rows) for rows in (1, 50)] == [1.0, 1.0]
    assert FLAT.slope(9) == 0.0


# -- statistics ------------------------------------------------------------------------------------


def learned(*outcomes: bool, kind: Any = "a") -> AcceptanceStatistics:
    statistics = AcceptanceStatistics()
    for accepted in outcomes:
        statistics.learn(kind, accepted)
    return statistics


def test_unknown_kinds_have_prior_chances() -> None:
    assert learned(True, True, kind="b").chance("a") == 0.5
    assert AcceptanceStatistics().chance(("lookup", 8)) == 0.5
    assert AcceptanceStatistics().chance(("model", 1)) == AcceptanceStatistics().chance(("level", 0)) == 0.8


@given(st.lists(st.booleans(), max_size=60))
def test_a_chance_is_the_share_accepted_with_two_prior_trials(outcomes: list[bool]) -> None:
    assert learned(*outcomes).chance("a") == pytest.approx((sum(outcomes) + 1) / (len(outcomes) + 2))


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(0, 2000))
def test_statistics_fade_towards_the_prior(outcomes: list[bool], steps: int) -> None:
    statistics = learned(*outcomes)
    fresh = statistics.chance("a")
    statistics.step = steps
    faded = statistics.chance("a")
    assert min(fresh, 0.5) - 1e-12 <= faded <= max(fresh, 0.5) + 1e-12
    statistics.step += 5000
    assert statistics.chance("a") == pytest.approx(0.5, abs=1e-3)


# -- the plan of a step ----------------------------------------------------------------------------


def planner(
    target: LatencyModel, branches: int = 1, draft: LatencyModel | None = None, **known: float
) -> SpeculationPlanner:
    """Create a planner. `known` gives the accepted share of 100 trials by kind."""
    outcomes = [(kind, trial < share * 100) for kind, share in known.items() for trial in range(100)]
    statistics = AcceptanceStatistics()
    for kind, accepted in outcomes:
        statistics.learn(kind, accepted)
    return SpeculationPlanner(statistics, target, draft, branches)


@pytest.mark.parametrize(("branches", "threshold"), [(1, 0.1), (3, 0.25), (27, 0.75), (81, 0.9)])
def test_a_token_is_worth_its_row_above_a_threshold(branches: int, threshold: float) -> None:
    """With nine seconds plus one per row, b branches give b / (9 + b) tokens per second."""
    assert planner(LINEAR, branches).admit(threshold + 0.01)
    assert not planner(LINEAR, branches).admit(threshold - 0.01)


@given(measured, st.integers(1, 80), st.lists(chances, max_size=12))
def test_a_token_is_admitted_if_it_raises_the_steps_tokens_per_second(
    latency: LatencyModel, branches: int, offered: list[float]
) -> None:
    assume(latency.of(branches) > 1e-6)
    plan, tokens, rows = planner(latency, branches), float(branches), branches
    assume(branches >= min(latency.rows))
    for chance in offered:
        now, then = tokens / latency.of(rows), (tokens + chance) / latency.of(rows + 1)
        admitted = plan.admit(chance)
        if then != pytest.approx(now, rel=1e-6):
            assert admitted == (then > now)
        if admitted:
            tokens, rows = tokens + chance, rows + 1


@pytest.mark.parametrize(("cost", "pays"), [(0.4, True), (0.6, False)])
def test_a_forward_of_the_draft_pays_if_it_gives_more_tokens_than_its_time_costs(cost: float, pays: bool) -> None:
    """The target makes one token per second, and a draft gives half a token."""
    assert planner(FLAT, draft=LatencyModel((1,), (cost,)), known=0.5).deepen("known", [1.0]) == pays


def test_a_forward_of_the_draft_pays_by_the_statistics_of_its_kind() -> None:
    draft = LatencyModel((1,), (0.4,))
    assert planner(FLAT, draft=draft, good=0.6).deepen("good", [1.0])
    assert not planner(FLAT, draft=draft, bad=0.2).deepen("bad", [1.0])
    assert not planner(FLAT, draft=draft, good=0.6).deepen("good", [0.5])  # a node that is itself uncertain
    assert planner(FLAT, draft=draft, good=0.6).deepen("good", [0.5] * 3)  # three such nodes


@pytest.mark.parametrize(("cost", "pays"), [(1.3, True), (1.5, False)])
def test_a_draft_that_was_not_timed_may_cost_more_than_it_gives(cost: float, pays: bool) -> None:
    plan = planner(FLAT, draft=LatencyModel((1,), (cost,)), known=0.5)
    assert not copy(plan).deepen("known", [1.0])
    assert plan.deepen("known", [1.0], timed=False) == pays
    assert plan.drafting == (cost if pays else 0.0)


def test_equal_texts_share_their_rows() -> None:
    """Three equal texts are one row of ten seconds, so a step makes 0.3 tokens per second."""
    known = AcceptanceStatistics()
    assert SpeculationPlanner(known, LINEAR, None, 3, distinct=1).admit(0.11)
    assert not SpeculationPlanner(known, LINEAR, None, 3, distinct=1).admit(0.09)
    assert not SpeculationPlanner(known, LINEAR, None, 3).admit(0.11)
    draft = LatencyModel((1, 2), (2.0, 4.0))  # one row of the draft for three texts
    assert SpeculationPlanner(known, FLAT, draft, 3, distinct=1).rate == 3.0
    plan = SpeculationPlanner(known, LINEAR, draft, 3, distinct=1)
    assert plan.deepen("kind", [1.0] * 3)
    assert plan.drafting == 2.0


# -- drafters with a plan --------------------------------------------------------------------------


def texts(count: int, widths: tuple[int, ...]) -> list[DraftContext]:
    """Return texts with repetitions, so that lookup finds drafts."""
    draws = [Draw(0.0, 0, 1.0, 0.0, 0, 0, ahead) for ahead in range(len(widths))]
    prompts = [[5 + key, 6, 7, 8, 9, 10, 11, 5 + key, 6, 7] for key in range(count)]
    return [DraftContext(key, prompt, prompt, draws, widths) for key, prompt in enumerate(prompts)]


@pytest.fixture
def model_drafter(make_model: Callable[..., Any], tokenizer: Any) -> Any:
    drafter = ModelDrafter(load_model(make_model(), tokenizer=tokenizer), 4000, 300)
    yield drafter
    drafter.close()


def sizes(drafts: list[Draft]) -> list[int]:
    return [len(draft.tokens) for draft in drafts]


CHEAP = LatencyModel((1, 64), (0.01, 0.02))


def test_a_full_batch_is_not_drafted_for(model_drafter: ModelDrafter) -> None:
    assert sizes(model_drafter.draft(texts(64, (2, 1, 1)), planner(FULL, 64, CHEAP))) == [0] * 64
    assert model_drafter.forwards == 0
    assert sizes(LookupDrafter().draft(texts(64, (1,) * 4), planner(FULL, 64))) == [0] * 64


def test_a_draft_as_slow_as_its_target_is_used_only_until_it_was_timed(model_drafter: ModelDrafter) -> None:
    for _ in range(100):
        model_drafter.draft(texts(2, (2, 1)), planner(FLAT, 2, FLAT))
    assert sizes(model_drafter.draft(texts(2, (2, 1)), planner(FLAT, 2, FLAT))) == [0, 0]
    assert model_drafter.forwards == 16


def test_a_copy_of_a_plan_can_be_tried_and_adopted() -> None:
    plan = planner(LINEAR)
    before = plan.rate
    tried = copy(plan)
    tried.admit(0.9)
    assert plan.rate == before < tried.rate
    plan.take(tried)
    assert plan.rate == tried.rate
    assert plan.admit(0.2) == tried.admit(0.2)
