"""PDOS beside other requests, and with small chunks and budgets: every text stays the same, and usage adds up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tot.decoders import (
    LocalDecoder,
    Meter,
    Request,
    Sampling,
)

Make = Callable[..., LocalDecoder]


@pytest.mark.parametrize("model", ["llama", pytest.param("qwen2", marks=pytest.mark.slow)], indirect=True)
def test_other_requests_and_chunks_change_nothing(ids: Any, outcomes: Any, loose: Any, mixed: Any) -> None:
    decoder = loose()
    requests = mixed(decoder)
    for seed in range(10):
        sampling = Sampling(max_tokens=120, temperature=2.0, seed=seed)
        requests.append(Request(prompt=ids(decoder, f"abc 10 {seed}"), sampling=sampling))
    alone = [outcomes(decoder.generate([request])) for request in requests]
    counts = decoder.method.counts
    own = [one for request, one in zip(requests, alone, strict=True) if not request.steps]
    stepped = sum(any(part.kind == "step" for part in parts) for completions in own for *_, parts, _ in completions)
    assert stepped > 2
    assert counts["skeletons"] > counts["broken"] + 1 > 3
    expected = [one for completions in alone for one in completions]
    for options in ({}, {"chunk": 5, "kv_budget": 20_000}, {"kv_budget": 1200}):
        other = loose(**options)
        assert outcomes(other.generate(requests)) == expected
        order = list(range(len(requests)))[::-1]
        again = other.generate([requests[i] for i in order])
        assert sorted(map(str, outcomes(again))) == sorted(map(str, expected))


def test_without_a_marker_the_text_equals_ar(make: Make, marks: Any, outcomes: Any, mixed: Any) -> None:
    marks(marker="\u00e9")
    decoder = make()
    requests = [request.model_copy(update={"steps": ()}) for request in mixed(decoder)]
    assert outcomes(decoder.generate(requests)) == outcomes(make("ar").generate(requests))


def test_parts_join_to_the_text_and_usage_adds_up(loose: Any, mixed: Any) -> None:
    decoder = loose()
    meter = Meter()
    requests = mixed(decoder)
    completions = [one for handle in decoder.submit(requests, meter) for one in handle.result(60)]
    repeated = [request for request in requests for _ in range(request.sampling.n)]
    for request, one in zip(repeated, completions, strict=True):
        assert "".join(part.text for part in one.parts) == one.text
        assert one.usage.new_tokens == len(one.tokens)
        assert 0 < one.usage.forwards <= len(one.tokens) + 1 + bool(request.choices)
        for stop in request.sampling.stop:
            for part in one.parts:
                assert part.kind == "trigger" or stop not in part.text.removeprefix("e 10a")
    assert meter.new_tokens == sum(len(one.tokens) for one in completions)
    assert sum(one.usage.prompt_tokens for one in completions) == sum(len(request.prompt) for request in requests)


def test_two_requests_at_different_stages_share_forwards(make: Make, scripted: Any, ask: Any, documents: Any) -> None:
    decoder = make()
    step = "#### A:" + " on and" * 9
    script = scripted(decoder, *documents, f"{step}\n####", f"{step}\n####%%%\nSo.")
    requests = [ask(decoder), ask(decoder, "Other?|\n", steps=("A",))]
    got = decoder.generate(requests)
    assert [one.text for one in got] == [documents[-1], f"{step}\n####%%%\nSo."]

    def together(one: str, other: str) -> bool:
        return any(any(one in a for a in texts) and any(other in b for b in texts) for texts in script.texts)

    assert together("|\nI compare", "|\n#### A: on")
    assert together("Oslo:...\n####", "|\n#### A: on")
