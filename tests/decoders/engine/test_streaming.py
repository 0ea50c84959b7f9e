"""The engine: streams of text, read from threads and from asyncio."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tot.decoders import LocalDecoder, Request, RequestError, Sampling
from tot.decoders.engine.sequence import Handle

Serve = Callable[..., LocalDecoder]


def streamed(handle: Handle) -> dict[int, str]:
    texts: dict[int, str] = {}
    for sample, piece in handle:
        assert piece
        texts[sample] = texts.get(sample, "") + piece
    return texts


def test_streamed_pieces_are_the_text(helpers: Any, serve: Serve, make_model: Callable[..., Any]) -> None:
    for tiny in (make_model(readable=True), make_model()):  # the second writes invalid UTF-8
        decoder = serve(tiny)
        requests = helpers.mixed_requests(15, seed=6)
        for handle in decoder.submit(requests, stream=True):
            texts = streamed(handle)
            assert [texts.get(i, "") for i in range(len(handle.result()))] == [c.text for c in handle.result()]


def test_no_part_of_a_stop_string_is_streamed(helpers: Any, decoder: LocalDecoder) -> None:
    text = helpers.greedy(decoder, max_tokens=12).text
    stop = text[4:9]
    (handle,) = decoder.submit([Request(prompt="abc", sampling=Sampling(max_tokens=12, stop=(stop,)))], stream=True)
    pieces = [piece for _, piece in handle]
    assert "".join(pieces) == text[:4] == handle.result()[0].text
    (handle,) = decoder.submit(
        [Request(prompt="abc", sampling=Sampling(max_tokens=12, stop=(stop + "~~",)))], stream=True
    )
    assert streamed(handle) == {0: text}


def test_only_streaming_requests_can_be_iterated(decoder: LocalDecoder) -> None:
    (handle,) = decoder.submit([Request(prompt="abc", sampling=Sampling(max_tokens=1))])
    with pytest.raises(RequestError, match=r"submit\(\.\.\., stream=True\)"):
        next(iter(handle))
