"""Admission by need: requests reserve slots only for their next tokens, and pausing them changes no result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tot.decoders import LocalDecoder, Request, Sampling, load_decoder
from tot.decoders.engine import scheduler
from tot.decoders.engine.sequence import Job
from tot.decoders.methods.autoregressive import Autoregressive

Serve = Callable[..., LocalDecoder]


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Counter[Job]:
    """Count how often each request was paused."""
    counted: Counter[Job] = Counter()
    release = scheduler.Scheduler._release

    def count(self: scheduler.Scheduler, job: Job) -> None:
        counted[job] += job.pauses > counted[job]
        release(self, job)

    monkeypatch.setattr(scheduler.Scheduler, "_release", count)
    return counted


def long_requests(count: int, tokens: int = 120) -> list[Request]:
    sampling = Sampling(max_tokens=tokens, temperature=1.0, ignore_eos=True, seed=3)
    return [Request(prompt=f"The sum of {i} and 10", sampling=sampling) for i in range(count)]


@pytest.mark.parametrize("chunk", [512, 7])
@pytest.mark.parametrize("ahead", [1, 8])
def test_every_kind_of_request_returns_the_same_beside_paused_ones(
    helpers: Any, serve: Serve, chunk: int, ahead: int, pauses: Counter[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [*long_requests(4), *helpers.mixed_requests(20, seed=3), *long_requests(3, 80)]
    expected = helpers.by_request(requests, serve().generate(requests))
    monkeypatch.setattr(scheduler, "_AHEAD", ahead)
    decoder = serve(kv_budget=420, chunk=chunk)
    assert helpers.by_request(requests, decoder.generate(requests)) == expected
    assert 1 <= max(pauses.values()) <= 7


def test_the_oldest_request_is_never_paused_and_paused_ones_finish_in_order(
    helpers: Any, serve: Serve, pauses: Counter[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "_AHEAD", 4)
    engine = serve(kv_budget=400).engine
    ended: list[int] = []
    requests = long_requests(6)
    handles = helpers.submit(engine, requests, Autoregressive)
    for i, handle in enumerate(handles):
        handle.future.add_done_callback(lambda _, i=i: ended.append(i))
    for handle in handles:
        handle.result(60)
    assert ended == sorted(ended)
    assert requests[0] not in [job.request for job, count in pauses.items() if count]


def test_a_paused_stream_repeats_nothing(
    helpers: Any, serve: Serve, pauses: Counter[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "_AHEAD", 4)
    engine = serve(kv_budget=400).engine
    handles = helpers.submit(engine, long_requests(6), Autoregressive, stream=True)
    for handle in handles:
        assert "".join(text for _, text in handle) == handle.result(60)[0].text
    assert any(pauses.values())


def test_a_paused_request_that_is_cancelled_keeps_its_text(
    helpers: Any, serve: Serve, pauses: Counter[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = long_requests(6)
    whole = serve(kv_budget=3000).generate(requests)[-1].tokens
    monkeypatch.setattr(scheduler, "_AHEAD", 4)
    release = scheduler.Scheduler._release

    def pause_and_cancel(self: scheduler.Scheduler, job: Job) -> None:
        release(self, job)
        if job.pauses:
            job.handle.cancel()

    monkeypatch.setattr(scheduler.Scheduler, "_release", pause_and_cancel)
    engine = serve(kv_budget=400).engine
    handles = helpers.submit(engine, requests, Autoregressive)
    (cancelled,) = handles[-1].result(60)
    assert any(pauses.values())
    assert cancelled.finish_reason == "cancelled"
    assert 0 < len(cancelled.tokens) < len(whole)
    assert cancelled.tokens == whole[: len(cancelled.tokens)]


def test_slots_used_by_choices_are_not_reserved_again(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = serve(kv_budget=3000).engine
    request = Request(prompt="abc", choices=("ten " * 20, "the " * 20))
    needed: list[int] = []
    admit = scheduler.Scheduler.admit

    def watch(self: scheduler.Scheduler) -> list[Any]:
        admitted = admit(self)
        needed.append(engine.cache.live + sum(job.policy.need(1000) for job in self.running))
        return admitted

    monkeypatch.setattr(scheduler.Scheduler, "admit", watch)
    load_decoder("ar", engine=engine).generate([request])
    assert needed == sorted(needed, reverse=True)
