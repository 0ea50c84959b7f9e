"""The engine: the result of a request depends only on the request, not on the rest of its batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from tot.decoders import LocalDecoder, Request, Sampling

END = 2
LONG = "The sum of 10 and 11 is in the range on and on, and the other one: " * 4
Serve = Callable[..., LocalDecoder]


@pytest.mark.parametrize(("kv_budget", "chunk"), [(3000, 512), (420, 512), (420, 7), (3000, 1), (3000, 100)])
def test_packed_equals_alone_for_every_kind_of_request(helpers: Any, serve: Serve, kv_budget: int, chunk: int) -> None:
    """This also holds under eviction and for any chunk."""
    requests, plain = helpers.mixed_requests(24, seed=2), serve()
    expected = [helpers.by_request([request], plain.generate([request]))[0] for request in requests]
    kinds = {(reason, len(parts)) for group in expected for _, _, reason, parts, _ in group}
    assert [{*values} for values in zip(*kinds, strict=True)] == [{"stop", "eos", "length"}, {1, 3}]
    decoder = serve(kv_budget=kv_budget, chunk=chunk)
    for turn in range(2):
        order = random.Random(turn).sample(range(len(requests)), len(requests))
        got = helpers.by_request([requests[i] for i in order], decoder.generate([requests[i] for i in order]))
        assert got == [expected[i] for i in order]
    cache = decoder.engine.cache
    assert cache.peak_live <= kv_budget
    if kv_budget == 420:
        assert cache.stored == kv_budget  # the cache was full, so entries were evicted
        assert cache.peak_live > 250


def test_temperature_zero_equals_transformers_generate(
    model: Any, make_model: Callable[..., Any], serve: Serve
) -> None:
    for tiny in (model, make_model("qwen2", seed=3)):
        decoder = serve(tiny)
        prompts = ["The sum of 10", LONG, "a", "abc abc abc"]
        completions = decoder.generate([Request(prompt=p, sampling=Sampling(max_tokens=30)) for p in prompts])
        for prompt, completion in zip(prompts, completions, strict=True):
            ids = torch.tensor([decoder.engine.codec.encode_prompt(prompt)])
            generated = tiny.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=30,
                do_sample=False,
                eos_token_id=END,
                pad_token_id=0,
            )
            assert list(completion.tokens) == generated[0, ids.shape[1] :].tolist()


def test_samples_of_two_tokens_follow_the_models_distribution(
    make_model: Callable[..., Any], serve: Serve, logits_alone: Callable[..., Tensor]
) -> None:
    model = make_model(vocab_size=10, seed=1)
    prompt = (3, 1, 4)
    sampling = Sampling(max_tokens=2, temperature=1.0, n=6000, ignore_eos=True, seed=11)
    completions = serve(model, kv_budget=20_000).generate([Request(prompt=prompt, sampling=sampling)])
    counts = np.zeros((10, 10))
    for completion in completions:
        counts[completion.tokens] += 1
    first = logits_alone(model, list(prompt))[-1].softmax(-1)
    second = torch.stack([logits_alone(model, [*prompt, token])[-1].softmax(-1) for token in range(10)])
    expected = (first[:, None] * second).double().numpy() * 6000
    often = expected >= 5
    observed = np.append(counts[often], counts[~often].sum())
    assert stats.chisquare(observed, np.append(expected[often], 6000 - expected[often].sum())).pvalue > 1e-3
    assert np.abs(counts - expected).sum() / 2 / 6000 < 0.05
    independent = (first[:, None] * (first @ second)[None]).double().numpy() * 6000
    assert np.abs(counts - independent).sum() / 2 / 6000 > 0.1  # the second token depends on the first


# -- two methods in one forward ----------------------------------------------------------------------
