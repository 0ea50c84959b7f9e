"""Jacobi decoding: token for token what `ar` gives, in no more forwards, along trajectories that satisfy equation 3."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from tot.decoders import Completion, LocalDecoder, OptionError, Request, Sampling, load_decoder

LONG = "The sum of 10 and 11 is in the range on and on, and the other one: " * 2
Make = Callable[..., LocalDecoder]


@pytest.fixture(params=["llama", "qwen2"])
def make(request: pytest.FixtureRequest, make_model: Callable[..., Any], tokenizer: Any) -> Iterator[Make]:
    """Decoders by name, each on a copy of one model of its own; their slots must all be free in the end."""
    model = make_model(request.param, readable=True)
    made: list[LocalDecoder] = []

    def load(name: str, **options: Any) -> LocalDecoder:
        kv_budget = options.pop("kv_budget", 3000)
        made.append(load_decoder(name, copy.deepcopy(model), tokenizer=tokenizer, kv_budget=kv_budget, **options))
        return made[-1]

    yield load
    for decoder in made:
        decoder.close()
        assert decoder.engine.tree.live == 0


def mixed(count: int = 14) -> list[Request]:
    rng = random.Random(4)
    requests = []
    for i in range(count):
        prompt = LONG[: rng.randint(1, len(LONG))] + rng.choice(["and", " 10", "abc"])
        sampling = Sampling(
            max_tokens=rng.choice([1, 2, rng.randint(3, 24), 40]),
            temperature=rng.choice([0.0, 1.0]),
            top_p=rng.choice([0.9, 1.0]),
            stop=rng.choice([(), (), (" t", "on")]),
            seed=i,
            n=rng.choice([1, 1, 3]),
            ignore_eos=rng.random() < 0.4,
        )
        trigger = rng.choice([None, None, " So the answer is"])
        choices = ("1", "10") if rng.random() < 0.2 and (trigger or sampling.n == 1) else ()
        requests.append(Request(prompt=prompt, sampling=sampling, answer_trigger=trigger, choices=choices))
    return requests


def shown(completions: list[Completion]) -> list[Any]:
    return [(c.tokens, c.text, c.finish_reason, c.parts) for c in completions]


@pytest.mark.parametrize("n", [1, 2, 5, 16, 64])
@pytest.mark.parametrize("options", [{}, {"adapt": False}, {"guess": "lookup"}, {"guess": "tail", "adapt": False}])
def test_the_fixed_point_is_what_ar_gives(make: Make, n: int, options: dict[str, Any]) -> None:
    requests = mixed()
    expected = make("ar").generate(requests)
    got = make("jacobi", n=n, **options).generate(requests)
    assert shown(got) == shown(expected)
    for one in got:
        assert one.usage.forwards <= len(one.tokens) + bool(one.choice_logprobs) + 1
        assert one.usage.accepted <= one.usage.drafted


def test_never_more_forwards_than_tokens(make: Make) -> None:
    request = Request(prompt=LONG, sampling=Sampling(max_tokens=40, temperature=1.0, ignore_eos=True, n=3))
    for one in make("jacobi", n=9, adapt=False).generate([request]):
        assert one.usage.forwards == 40 - one.usage.accepted


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_each_point_follows_from_the_one_before_by_equation_3(
    make: Make, make_model: Callable[..., Any], logits_alone: Callable[..., torch.Tensor], heat: float
) -> None:
    from tot.decoders.engine.sampling import Draw, read

    decoder = make("jacobi", n=6, adapt=False, trajectory=True)
    request = Request(prompt=LONG, sampling=Sampling(max_tokens=30, temperature=heat, seed=3, ignore_eos=True))
    (got,) = decoder.generate([request])
    plain = copy.deepcopy(decoder.model)
    plain.set_attn_implementation("sdpa")
    prompt = decoder.engine.codec.encode_prompt(LONG)
    assert len(got.trajectory) == got.usage.forwards
    windows = 0
    for (at, guesses), (later, corrected) in pairwise(got.trajectory):
        tokens = [*prompt, *got.tokens[:at], *guesses]
        logits = logits_alone(plain, tokens)[len(prompt) + at - 1 :]
        draws = [Draw(heat, 0, 1.0, 0.0, 3, 0, at + i) for i in range(len(logits))]
        drawn = [sampled.token for sampled in read(logits, draws)]
        assert tuple(drawn[: later - at]) == got.tokens[at:later]
        if later - at < len(guesses):  # else the window was fixed to its end, and another was begun
            assert corrected == tuple(drawn[later - at : len(guesses)])
            windows += bool(corrected)
    assert windows > 5


def test_a_window_shrinks_until_it_is_fixed(make: Make) -> None:
    decoder = make("jacobi", n=8, adapt=False, trajectory=True)
    (got,) = decoder.generate([Request(prompt=LONG, sampling=Sampling(max_tokens=40, ignore_eos=True))])
    begun = [at for at, guesses in got.trajectory if len(guesses) == 8]
    assert begun[0] == 0
    assert all(later - at in (8, 9) for at, later in pairwise(begun))


def test_a_model_that_repeats_itself_is_guessed_by_its_own_tail(make: Make) -> None:
    """A constant model: whatever the window holds, every place is drawn right at once."""
    decoder = make("jacobi", n=4, adapt=False, guess="tail")
    decoder.model.lm_head.weight.data.zero_()
    decoder.model.lm_head.bias.data.zero_()
    decoder.model.lm_head.bias.data[60] = 5.0
    (got,) = decoder.generate([Request(prompt="abc", sampling=Sampling(max_tokens=41, ignore_eos=True))])
    assert set(got.tokens) == {60}
    assert got.usage.forwards <= 12


def test_a_window_is_cut_where_it_does_not_pay(make: Make) -> None:
    request = Request(prompt=LONG, sampling=Sampling(max_tokens=120, temperature=1.0, ignore_eos=True, n=8))
    whole = make("jacobi", n=16, adapt=False).generate([request])
    cut = make("jacobi", n=16).generate([request])
    assert shown(cut) == shown(whole)
    assert sum(one.usage.drafted for one in cut) < 0.7 * sum(one.usage.drafted for one in whole)


@pytest.mark.parametrize("options", [{"n": 0}, {"n": 500}, {"guess": "luck"}, {"k": 3}])
def test_options_that_make_no_sense_are_refused(make: Make, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"decoder jacobi, option {next(iter(options))}"):
        make("jacobi", **options)
