"""The engine: a cancelled request frees its slots and does not affect other requests."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tot.decoders import LocalDecoder, Request, Sampling
from tot.decoders.engine import scheduler
from tot.decoders.engine.runner import Chunk
from tot.decoders.engine.sequence import Job
from tot.decoders.methods.autoregressive import Autoregressive

LONG = "The sum of 10 and 11 is in the range on and on, and the other one: " * 4
Serve = Callable[..., LocalDecoder]


def test_cancelling_frees_the_slots_and_does_not_affect_others(helpers: Any, decoder: LocalDecoder) -> None:
    cache = decoder.engine.cache
    endless = Request(prompt=LONG + "x", sampling=Sampling(max_tokens=900, ignore_eos=True, n=2))
    other = Request(prompt=LONG + "y", sampling=Sampling(max_tokens=60, ignore_eos=True, temperature=1.0))
    expected = decoder.generate([other])[0]
    cancelled, kept = decoder.submit([endless, other], stream=True)
    next(iter(cancelled))
    cancelled.cancel()
    completions = cancelled.result(30)
    assert [completion.finish_reason for completion in completions] == ["cancelled"] * 2
    assert 0 < len(completions[0].tokens) < 900
    assert completions[0].text == decoder.engine.codec.decode(completions[0].tokens)
    assert helpers.outcome(kept.result(30)[0]) == helpers.outcome(expected)
    helpers.wait_until(lambda: cache.live == 0)


def test_a_waiting_request_can_be_cancelled(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_AHEAD", 700)  # so that the second request has to wait
    decoder = serve(kv_budget=1000)
    running, waiting = (
        decoder.submit([Request(prompt=p, sampling=Sampling(max_tokens=700, ignore_eos=True))], stream=True)[0]
        for p in ("abc", "the")
    )
    next(iter(running))
    waiting.cancel()
    (completion,) = waiting.result(30)
    assert (completion.tokens, completion.text, completion.finish_reason) == ((), "", "cancelled")
    assert completion.usage.reused_prompt_tokens == 0
    assert not running.future.done()
    running.cancel()


def test_cancelling_a_finished_request_does_nothing(helpers: Any, decoder: LocalDecoder) -> None:
    (handle,) = decoder.submit([Request(prompt="abc", sampling=Sampling(max_tokens=3))])
    done = handle.result(30)
    handle.cancel()
    assert handle.result(30) is done
    assert helpers.greedy(decoder, max_tokens=3).tokens == done[0].tokens


class Blocked(Autoregressive):
    """A policy that decodes only after `unblocked` is set."""

    def __init__(self, job: Job, unblocked: threading.Event) -> None:
        super().__init__(job)
        self._unblocked = unblocked

    def propose(self) -> list[Chunk]:
        self._unblocked.wait(20)
        return super().propose()


@pytest.mark.parametrize("loop_ends_first", [False, True])
def test_cancelling_the_task_that_awaits_cancels_the_request(
    helpers: Any, decoder: LocalDecoder, caplog: pytest.LogCaptureFixture, loop_ends_first: bool
) -> None:
    unblocked = threading.Event()
    sampling = Sampling(max_tokens=900, ignore_eos=True)
    request = Request(prompt="abc", sampling=sampling)
    (handle,) = helpers.submit(decoder.engine, [request], partial(Blocked, unblocked=unblocked))
    brief = decoder.submit([Request(prompt="the", sampling=Sampling(max_tokens=5, ignore_eos=True))])[0]

    async def wait() -> None:
        await handle

    async def main() -> None:
        task = asyncio.create_task(wait())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if not loop_ends_first:
            unblocked.set()
            assert len((await brief)[0].tokens) == 5

    asyncio.run(main())
    unblocked.set()
    (completion,) = handle.result(30)
    assert completion.finish_reason == "cancelled"
    assert len(completion.tokens) < 900
    assert len(brief.result(30)[0].tokens) == 5
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.DEBUG] == []
