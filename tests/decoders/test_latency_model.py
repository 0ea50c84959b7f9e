"""The cost of forwards by rows, measured beside running requests, and functions called in an engine's thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tot.decoders import Engine, LocalDecoder, Request, RequestError, Sampling, load_decoder, load_model
from tot.decoders.drafting import latency_model as latency_module
from tot.decoders.drafting.draft_model import ModelDrafter
from tot.decoders.drafting.latency_model import (
    ROWS,
    LatencyModel,
    engine_latency_model,
    latency_model,
)
from tot.decoders.drafting.opening import make_drafter
from tot.decoders.engine.runner import Runner
from tot.decoders.kernels.native.tiles import kernels_run
from tot.decoders.models.loading import open_model

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

    def counted(self: Runner, chunks: Any, layers: Any = ()) -> Any:
        counts.append(len(chunks))
        return forward(self, chunks, layers)

    monkeypatch.setattr(Runner, "forward", counted)
    return counts


def requests(count: int = 4, tokens: int = 60) -> list[Request]:
    settings = {"max_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
    return [Request(prompt=f"the range in {i}", sampling=Sampling(seed=i, **settings)) for i in range(count)]


# -- measuring -------------------------------------------------------------------------------------


def test_every_number_of_rows_is_measured_once_per_model(engine: Make, forwards: list[int]) -> None:
    one, other = engine(), engine(seed=1)
    latency = latency_model(one.runner)
    assert set(forwards) == set(ROWS)
    assert latency.rows == ROWS
    assert all(seconds > 0 for seconds in latency.seconds)
    forwards.clear()
    assert latency_model(one.runner) is engine_latency_model(one) is latency
    assert forwards == []
    latency_model(other.runner)
    assert set(forwards) == set(ROWS)


def test_measuring_leaves_nothing_in_the_cache(engine: Make) -> None:
    one = engine()
    latency_model(one.runner)
    assert (one.cache.live, one.cache.stored) == (0, 0)


def test_measuring_keeps_the_cached_prefixes(engine: Make) -> None:
    one = engine()
    decoder = load_decoder(engine=one)
    decoder.generate(requests())
    stored = one.cache.stored
    engine_latency_model(one)
    assert (one.cache.live, one.cache.stored) == (0, stored)
    (again,) = decoder.generate(requests(1))
    assert again.usage.reused_prompt_tokens > 0


def test_many_rows_take_longer_than_one(engine: Make) -> None:
    latency = latency_model(engine(hidden_size=384, intermediate_size=1024).runner)
    assert latency.of(64) > 2 * latency.of(1)


@pytest.mark.parametrize("kv_budget", [1, 2, 3, 4, 10, 50, 70])
def test_a_small_kv_budget_is_measured_with_the_rows_that_fit(engine: Make, kv_budget: int) -> None:
    small = engine(kv_budget)
    latency = engine_latency_model(small)
    fits = [rows for rows in ROWS if max(1, kv_budget // 4) + rows <= kv_budget]
    assert len(latency.rows) == max(1, len(fits))
    assert all(latency.of(rows) > 0 for rows in (1, 64))
    assert (small.cache.live, small.cache.stored) == (0, 0)


def test_a_vocabulary_smaller_than_the_rows_can_be_measured(engine: Make) -> None:
    latency = engine_latency_model(engine(vocab_size=20))
    assert latency.rows == (1, 4, 8, 16)
    assert latency.of(64) >= latency.of(1) > 0


def test_measuring_beside_running_requests_changes_nothing(engine: Make, forwards: list[int]) -> None:
    expected = [completion.tokens for completion in load_decoder(engine=engine()).generate(requests(tokens=200))]
    busy = engine()
    handles = load_decoder(engine=busy).submit(requests(tokens=200), stream=True)
    next(iter(handles[0]))
    forwards.clear()
    latency = engine_latency_model(busy)
    assert not any(handle.future.done() for handle in handles)
    assert set(ROWS) <= {*forwards}
    assert latency.rows == ROWS
    assert [handle.result(30)[0].tokens for handle in handles] == expected


def test_a_full_engine_is_measured_once_it_has_room(engine: Make) -> None:
    """Until then, drafts have their maximal length."""
    full = engine(1000)
    branch = full.call(lambda: full.cache.open([7] * 990))
    seed = load_decoder("seed", engine=full, k_config=(1, 1))
    assert engine_latency_model(full) == LatencyModel((1,), (1.0,))
    full.call(lambda: full.cache.release(branch))
    assert engine_latency_model(full).rows == ROWS
    (got,) = seed.generate(requests(1, tokens=20))
    assert got.tokens == load_decoder(engine=full).generate(requests(1, tokens=20))[0].tokens


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


def test_a_call_runs_in_the_engines_thread_and_returns_its_value(engine: Make) -> None:
    one = engine()
    assert one.call(lambda: threading.current_thread().name) == "tot-engine"
    assert one.call(lambda: one.cache.capacity) == 3000


def test_a_call_raises_its_exceptions_and_the_engine_keeps_running(engine: Make) -> None:
    one = engine()
    with pytest.raises(ZeroDivisionError):
        one.call(lambda: 1 / 0)
    assert one.call(lambda: 2) == 2
    assert len(load_decoder(engine=one).generate(requests())) == 4


def test_a_closed_engine_refuses_calls(engine: Make) -> None:
    one = engine()
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


def test_many_threads_can_call_at_once(engine: Make) -> None:
    one, found = engine(), []
    threads = [threading.Thread(target=lambda i=i: found.append(one.call(lambda: i))) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(found) == list(range(20))


def test_an_idle_engine_wakes_up_for_a_call(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tot.decoders.engine.engine._IDLE_SECONDS", 0.01)
    one = engine()
    one.call(lambda: 1)
    deadline = time.monotonic() + 10
    while one._thread is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert one._thread is None
    assert one.call(lambda: 2) == 2


# -- kept between processes ------------------------------------------------------------------------


@pytest.fixture
def saved(make_model: Callable[..., Any], tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in files, with an empty cache folder. The kernels in C need its size."""
    monkeypatch.setenv("TOT_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    make_model("llama", hidden_size=128, intermediate_size=256, head_dim=32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if not kernels_run(32, 2, np.dtype(np.float32), "cpu"):
        pytest.skip("needs a C compiler, and a processor with AVX2")
    return folder


def measure(folder: Path) -> LatencyModel:
    with Engine(open_model(folder, dtype="fp32"), 3000) as one:
        return engine_latency_model(one)


def test_a_model_in_files_is_measured_once_a_day_and_by_sizes(
    saved: Path, tmp_path: Path, forwards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = measure(saved)
    assert set(forwards) == set(ROWS)
    forwards.clear()
    assert (measure(saved), forwards) == (first, [])
    (path,) = (tmp_path / "cache" / "latency").iterdir()
    day = 86_400
    os.utime(path, (time.time() - day, time.time() - day))
    measure(saved)
    assert set(forwards) == set(ROWS)
    forwards.clear()
    monkeypatch.setattr(latency_module, "processor_info", lambda what: "another")
    measure(saved)
    assert set(forwards) == set(ROWS)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "[" * 100_000, '{"rows": [1, 4], "seconds": [1]}', '{"rows": [2], "seconds": [0.1]}',
     '{"rows": [1, 4], "seconds": [0.2, 0.1]}', '{"rows": [1], "seconds": [NaN]}', '{"rows": [1], "seconds": [0]}',
     '{"rows": [], "seconds": []}', '{"rows": [1], "seconds": ["x"]}'],
)  # fmt: skip
def test_a_damaged_measurement_is_made_again(saved: Path, tmp_path: Path, forwards: list[int], text: str) -> None:
    measure(saved)
    (path,) = (tmp_path / "cache" / "latency").iterdir()
    path.write_text(text)
    forwards.clear()
    assert measure(saved).rows == ROWS
    assert set(forwards) == set(ROWS)


def test_a_measurement_that_others_could_have_written_is_not_used(
    saved: Path, tmp_path: Path, forwards: list[int]
) -> None:
    measure(saved)
    (path,) = (tmp_path / "cache" / "latency").iterdir()
    path.chmod(0o666)
    forwards.clear()
    measure(saved)
    assert set(forwards) == set(ROWS)


def test_a_model_object_is_measured_each_time(engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOT_CACHE", str(tmp_path))
    latency_model(engine().runner)
    assert not (tmp_path / "latency").exists()
