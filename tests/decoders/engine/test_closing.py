"""The engine: loading a decoder, sharing it among threads, and closing it."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from tot.decoders import (
    LocalDecoder,
    ModelError,
    OptionError,
    Request,
    RequestError,
    Sampling,
    load_decoder,
)
from tot.decoders.engine import scheduler
from tot.decoders.engine.runner import Chunk, Runner
from tot.decoders.methods.autoregressive import Autoregressive

LONG = "The sum of 10 and 11 is in the range on and on, and the other one: " * 4
Serve = Callable[..., LocalDecoder]


def test_a_shared_engine_outlives_its_decoders(helpers: Any, decoder: LocalDecoder) -> None:
    with load_decoder("ar", engine=decoder.engine) as second:
        assert second.model is decoder.model
        first = helpers.greedy(second, max_tokens=3)
    assert helpers.greedy(decoder, max_tokens=3).tokens == first.tokens


def test_bad_decoder_names_and_options_are_refused(decoder: LocalDecoder) -> None:
    with pytest.raises(OptionError, match=r"unknown decoder 'arr' \(did you mean ar\?\)"):
        load_decoder("arr", engine=decoder.engine)
    with pytest.raises(OptionError, match="decoder ar, option width"):
        load_decoder("ar", engine=decoder.engine, width=3)


def test_a_closed_engine_refuses_requests(helpers: Any, decoder: LocalDecoder) -> None:
    helpers.greedy(decoder, max_tokens=1)
    decoder.engine.close()
    decoder.engine.close()
    with pytest.raises(RequestError, match="this engine is closed: make a new one"):
        decoder.submit([Request(prompt="abc")])


def test_closing_cancels_running_and_waiting_requests(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_AHEAD", 700)  # so that all but the first have to wait
    decoder = serve(kv_budget=1000)
    requests = [Request(prompt=p, sampling=Sampling(max_tokens=700, ignore_eos=True)) for p in ("abc", "the", "in")]
    handles = decoder.submit(requests, stream=True)
    next(iter(handles[0]))
    decoder.engine.close()
    completions = [handle.result(30)[0] for handle in handles]
    assert [completion.finish_reason for completion in completions] == ["cancelled"] * 3
    assert len(completions[0].tokens) >= 1
    assert [completion.tokens for completion in completions[1:]] == [(), ()]


def test_an_unreferenced_engine_is_collected_once_idle(
    helpers: Any, make_model: Callable[..., Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tot.decoders.engine.engine._IDLE_SECONDS", 0.02)
    decoder = load_decoder("ar", make_model(), tokenizer=tokenizer, kv_budget=200)
    first = helpers.greedy(decoder, max_tokens=2).tokens
    thread = decoder.engine._thread
    assert thread is not None
    thread.join(10)
    assert helpers.greedy(decoder, max_tokens=2).tokens == first  # an ended thread is restarted
    assert decoder.engine._thread is not None
    decoder.engine._thread.join(10)
    engine = weakref.ref(decoder.engine)
    del decoder
    gc.collect()
    assert engine() is None


class Stalled(Autoregressive):
    """A policy that never has anything to run."""

    def propose(self) -> list[Chunk]:
        return []


def test_a_policy_with_nothing_to_run_fails_instead_of_looping_forever(helpers: Any, decoder: LocalDecoder) -> None:
    (handle,) = helpers.submit(decoder.engine, [Request(prompt="abc")], Stalled)
    with pytest.raises(ModelError, match="Stalled proposed no chunks and has not ended"):
        handle.result(30)


def test_closing_a_decoder_with_running_requests_does_not_affect_others(
    model: Any, tokenizer: Any, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread frees the draft between two steps."""
    other = serve()
    threads = []
    close = Runner.close
    monkeypatch.setattr(
        Runner, "close", lambda runner: (threads.append(threading.current_thread().name), close(runner))[1]
    )
    requests = [Request(prompt=LONG, sampling=Sampling(max_tokens=60, temperature=1.0, ignore_eos=True))]
    expected = [one.tokens for one in other.generate(requests)]
    draft = copy.deepcopy(model)
    for _ in range(3):
        drafting = load_decoder("sd", engine=other.engine, draft=draft)
        lost = drafting.submit([Request(prompt=LONG, sampling=Sampling(max_tokens=900))], stream=True)
        kept = other.submit(requests)
        next(iter(lost[0]))
        drafting.close()
        assert [one.finish_reason for one in lost[0].result(0)] == ["cancelled"]
        assert [one.tokens for one in kept[0].result(30)] == expected
        assert draft.config._attn_implementation == "sdpa"
    assert threads == ["tot-engine"] * 3
