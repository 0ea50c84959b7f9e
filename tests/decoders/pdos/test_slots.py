"""PDOS takes no more key-value slots than it said it would, and no more than its text does."""

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


def promises_are_kept(watch: Any) -> bool:
    """Whether what was live and promised at any time was enough for all that came later."""
    most = 0
    for what, slots in reversed(watch.slots):
        most = max(most, slots) if what == "are" else most
        if what == "may be" and most > slots:
            return False
    return True


@pytest.mark.parametrize("model", ["llama", pytest.param("qwen2", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("steps", [(), CITIES])
def test_growth_is_never_too_little(make: Make, steps: tuple[str, ...], watching: Any, ids: Any, loose: Any) -> None:
    decoder = loose(make)
    for seed in range(4):
        watch = watching(decoder)
        sampling = Sampling(max_tokens=120, temperature=1.0, seed=seed, n=2, ignore_eos=True)
        decoder.generate([Request(prompt=ids(decoder, LONG), sampling=sampling, steps=steps, answer_trigger=" So")])
        watch.leave()
        assert promises_are_kept(watch)


def test_growth_counts_what_others_hold_on_to(make: Make, watching: Any, ids: Any) -> None:
    """Two texts whose steps are the same at first: when one goes on, the other still needs what they share."""
    decoder = make()
    watch = watching(decoder)
    for tokens in ((250, 800), (250, 800, 500)):
        samplings = [Sampling(max_tokens=count, ignore_eos=True) for count in tokens]
        decoder.generate([Request(prompt=ids(decoder, LONG), sampling=s, steps=CITIES) for s in samplings])
        assert promises_are_kept(watch)
        watch.slots.clear()


def test_a_skeleton_takes_no_more_slots_than_the_text_may(make: Make, scripted: Any, ask: Any, kinds: Any) -> None:
    decoder = make(ellipsis="." * 35)
    watch = scripted(decoder, "".join(f"#### {title}:{'.' * 35}\n" for title in "ABCDEFGHIJ"))
    request = ask(decoder, sampling={"max_tokens": 140})
    (got,) = decoder.generate([request])
    assert 1 < kinds(got).count("step") < 10
    assert decoder.engine.cache.peak_live <= len(request.prompt) + 140
    assert promises_are_kept(watch)


def test_steps_take_no_more_slots_than_the_text_does(make: Make, ids: Any) -> None:
    peaks = []
    for steps in ((), CITIES):
        decoder = make(marker="\u00e9")
        sampling = Sampling(max_tokens=200, temperature=1.0, ignore_eos=True)
        decoder.generate([Request(prompt=ids(decoder, LONG), sampling=sampling, steps=steps)])
        peaks.append(decoder.engine.cache.peak_live)
    assert peaks[1] <= peaks[0]


@pytest.mark.parametrize("short", [0, 1])
def test_what_just_fits_the_store_runs(make: Make, short: int, ids: Any) -> None:
    prompt = ids(make(), LONG)
    decoder = make(kv_budget=len(prompt) + 120 - short)
    request = Request(prompt=prompt, sampling=Sampling(max_tokens=120, ignore_eos=True), steps=CITIES)
    if short:
        with pytest.raises(RequestError, match=rf"may need {len(prompt) + 120} tokens"):
            decoder.generate([request])
    else:
        (got,) = decoder.generate([request])
        assert got.finish_reason == "length"
