"""The cost of forwards by rows and context, learned from them, and functions called in an engine's thread."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tot.decoders import Engine, LocalDecoder, Request, RequestError, Sampling, load_decoder, load_model
from tot.decoders.drafting.draft_model import ModelDrafter, make_drafter
from tot.decoders.drafting.latency_model import ROWS, LatencyModel, latency_model
from tot.decoders.engine.runner import Runner

Make = Callable[..., Engine]


@pytest.fixture
def engine(make_model: Callable[..., Any], tokenizer: Any) -> Iterator[Make]:
    """Create engines, each on a separate model without measurements. All slots must be free at the end."""
    made: list[Engine] = []

    def make(kv_budget: int = 3000, **changes: Any) -> Engine:
        made.append(Engine(load_model(make_model(readable=True, **changes), tokenizer=tokenizer), kv_budget))
        return made[-1]

    yield make
    for one in made:
        one.close()
        assert one.cache.live == 0


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of chunks of each later forward of any runner."""
    counts: list[int] = []
    forward = Runner.forward

    def counted(self: Runner, chunks: Any) -> Any:
        counts.append(len(chunks))
        return forward(self, chunks)

    monkeypatch.setattr(Runner, "forward", counted)
    return counts


def requests(count: int = 4, tokens: int = 60) -> list[Request]:
    settings = {"max_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
    return [Request(prompt=f"the range in {i}", sampling=Sampling(seed=i, **settings)) for i in range(count)]


# -- learning from forwards ------------------------------------------------------------------------


def simulated(rows: int, keys: int) -> float:
    """Seconds of a simulated model: a row costs a tenth of a forward, and as much again with 8,000 keys."""
    return 0.010 + 0.001 * rows + keys * 0.001 / 8000


@pytest.mark.parametrize("speed", [0.05, 1.0, 20.0])
def test_the_model_approaches_the_observed_seconds_at_every_context(speed: float) -> None:
    latency = LatencyModel(ROWS, (0.01, 0.013, 0.017, 0.026, 0.08), 4e-8)
    rng = random.Random(2)
    for count in range(1, 1500):
        rows, context = rng.choice([1, 1, 2, 4, 5, 8, 15]), rng.choice([100, 1000, 8000])
        noise = rng.uniform(0.9, 1.1) if rng.random() < 0.98 else 20.0  # now and then another program interrupts
        keys = rows * context
        latency = latency.refined(rows, keys, speed * noise * simulated(rows, keys), max(0.02, 1 / count))
    for rows, context in [(1, 100), (4, 1000), (8, 8000), (15, 8000)]:
        expected = speed * simulated(rows, rows * context)
        assert latency.at(context).of(rows) == pytest.approx(expected, rel=0.25)
    assert latency.at(8000).slope(4) > 1.3 * latency.at(100).slope(4)


@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(0, 10**6), st.floats(1e-6, 1e3)), max_size=30),
    st.integers(1, 80),
)
def test_more_rows_never_cost_less_after_any_observations(seen: list[tuple[int, int, float]], rows: int) -> None:
    latency = LatencyModel(ROWS, (0.01, 0.013, 0.017, 0.026, 0.08), 1e-8)
    for observed in seen:
        latency = latency.refined(*observed)
    assert latency.of(rows + 1) >= latency.of(rows) > 0
    assert latency.key_seconds > 0


def test_nothing_is_computed_to_learn_latencies(engine: Make, forwards: list[int]) -> None:
    one = engine()
    first = latency_model(one.runner)
    assert forwards == []
    assert first.rows == ROWS
    assert list(first.seconds) == sorted(first.seconds)
    load_decoder(engine=one).generate(requests())
    learned = latency_model(one.runner)
    assert learned != first
    assert latency_model(engine(seed=1).runner) == first  # the other model has seen no forward


@pytest.mark.parametrize("depth", [1, 3])
def test_the_forwards_of_a_draft_model_are_observed(make_bench: Callable[..., Any], depth: int) -> None:
    """After an accepted token the draft computes two rows and reads one."""
    bench = make_bench()
    drafter = bench.model_drafter()
    first = latency_model(drafter.runner)
    bench.seed(drafter, k_config=(1,) * depth).generate(requests())
    assert latency_model(drafter.runner) != first


# -- drafts as slow as their targets ---------------------------------------------------------------


@pytest.mark.parametrize(("layers", "warned"), [(3, True), (2, True), (1, False)])
def test_a_draft_as_large_as_its_target_causes_a_warning(
    engine: Make, make_model: Callable[..., Any], layers: int, warned: bool, recwarn: pytest.WarningsRecorder
) -> None:
    target = engine(num_hidden_layers=2)
    made = make_model(readable=True, num_hidden_layers=layers)
    target_weights = sum(one.numel() for one in target.loaded.model.parameters())
    drafter = make_drafter(made, target, ExitStack())
    assert isinstance(drafter, ModelDrafter)
    texts = [text for warning in recwarn if "the draft" in (text := str(warning.message))]
    assert len(texts) == warned
    for text in texts:
        weights = sum(one.numel() for one in made.parameters())
        assert text.startswith(f"the draft LlamaForCausalLM has {weights:,} weights and the target")
        assert text.endswith(f" {target_weights:,}: drafting will not make it faster; choose a smaller draft")
    drafter.close()


# -- functions in the engine's thread --------------------------------------------------------------


def test_a_call_raises_its_exceptions_and_a_closed_engine_refuses_calls(engine: Make) -> None:
    one = engine()
    with pytest.raises(ZeroDivisionError):
        one.call(lambda: 1 / 0)
    assert len(load_decoder(engine=one).generate(requests())) == 4
    one.close()
    with pytest.raises(RequestError, match="this engine is closed: make a new one"):
        one.call(lambda: 1)


def test_calls_run_between_steps_and_do_not_affect_running_requests(engine: Make) -> None:
    expected = load_decoder(engine=engine()).generate(requests())
    one = engine()
    decoder: LocalDecoder = load_decoder(engine=one)
    handles = decoder.submit(requests())
    seen = []
    while not all(handle.future.done() for handle in handles):
        seen.append(one.call(lambda: (threading.current_thread().name, one.forwards)))
    assert {name for name, _ in seen} == {"tot-engine"}
    assert len({forwards for _, forwards in seen}) > 5  # at different times during the run
    assert [handle.result(30)[0].tokens for handle in handles] == [completion.tokens for completion in expected]
