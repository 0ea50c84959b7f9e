"""PDOS uses at most the key-value slots that it reserves, and at most the slots of its text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tot.decoders import (
    LocalDecoder,
    Request,
    RequestError,
    Sampling,
)

LONG = "The sum of 10 and 11 is in the range on and on, and the other one: " * 2
CITIES = ("Oslo", "Rome", "the other one", "10")
Make = Callable[..., LocalDecoder]


def reservations_suffice(watch: Any) -> bool:
    """Return whether the live and reserved slots at each time were enough for all later use."""
    most = 0
    for what, slots in reversed(watch.slots):
        most = max(most, slots) if what == "are" else most
        if what == "may be" and most > slots:
            return False
    return True


@pytest.mark.parametrize("model", ["llama", pytest.param("qwen2", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("steps", [(), CITIES])
def test_growth_is_never_too_small(make: Make, steps: tuple[str, ...], watching: Any, ids: Any, loose: Any) -> None:
    decoder = loose(make)
    for seed in range(4):
        watch = watching(decoder)
        sampling = Sampling(max_tokens=120, temperature=1.0, seed=seed, n=2, ignore_eos=True)
        decoder.generate([Request(prompt=ids(decoder, LONG), sampling=sampling, steps=steps, answer_trigger=" So")])
        watch.leave()
        assert reservations_suffice(watch)


def test_growth_includes_slots_shared_with_other_requests(make: Make, watching: Any, ids: Any) -> None:
    """Two texts begin with the same steps. When one continues, the other still needs their shared slots."""
    decoder = make()
    watch = watching(decoder)
    for tokens in ((250, 800), (250, 800, 500)):
        samplings = [Sampling(max_tokens=count, ignore_eos=True) for count in tokens]
        decoder.generate([Request(prompt=ids(decoder, LONG), sampling=s, steps=CITIES) for s in samplings])
        assert reservations_suffice(watch)
        watch.slots.clear()


def test_a_skeleton_uses_at_most_the_slots_of_its_text(make: Make, scripted: Any, ask: Any, kinds: Any) -> None:
    decoder = make(ellipsis="." * 35)
    watch = scripted(decoder, "".join(f"#### {title}:{'.' * 35}\n" for title in "ABCDEFGHIJ"))
    request = ask(decoder, sampling={"max_tokens": 140})
    (got,) = decoder.generate([request])
    assert 1 < kinds(got).count("step") < 10
    assert decoder.engine.cache.peak_live <= len(request.prompt) + 140
    assert reservations_suffice(watch)


def test_steps_use_at_most_the_slots_of_the_text(make: Make, ids: Any) -> None:
    peaks = []
    for steps in ((), CITIES):
        decoder = make(marker="\u00e9")
        sampling = Sampling(max_tokens=200, temperature=1.0, ignore_eos=True)
        decoder.generate([Request(prompt=ids(decoder, LONG), sampling=sampling, steps=steps)])
        peaks.append(decoder.engine.cache.peak_live)
    assert peaks[1] <= peaks[0]


@pytest.mark.parametrize("short", [0, 1])
def test_a_request_that_just_fits_the_kv_budget_runs(make: Make, short: int, ids: Any) -> None:
    prompt = ids(make(), LONG)
    decoder = make(kv_budget=len(prompt) + 120 - short)
    request = Request(prompt=prompt, sampling=Sampling(max_tokens=120, ignore_eos=True), steps=CITIES)
    if short:
        with pytest.raises(RequestError, match=rf"may need {len(prompt) + 120} tokens"):
            decoder.generate([request])
    else:
        (got,) = decoder.generate([request])
        assert got.finish_reason == "length"
