"""The engine: the result of a request depends only on the request, not on the rest of its batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from tot.decoders import LocalDecoder, Request, Sampling
from tot.decoders.engine.runner import Chunk
from tot.decoders.engine.sampling import Sampled
from tot.decoders.engine.sequence import Job, Policy
from tot.decoders.methods.autoregressive import Autoregressive

END = 2
LONG = "The sum of 10 and 11 is in the range on and on, and the other one: " * 4
Serve = Callable[..., LocalDecoder]


def test_packed_equals_alone_for_every_kind_of_request(
    serve: Serve, mixed_requests: Callable[..., list[Request]], by_request: Callable[..., list[list[tuple[Any, ...]]]]
) -> None:
    requests = mixed_requests(30, seed=2)
    packed = by_request(requests, serve().generate(requests))
    decoder = serve()
    assert packed == [by_request([request], decoder.generate([request]))[0] for request in requests]
    kinds = {(reason, bool(scores), len(parts)) for group in packed for _, _, reason, parts, scores in group}
    assert {reason for reason, _, _ in kinds} == {"stop", "eos", "length"}
    assert {parts for _, _, parts in kinds} == {1, 3}


@pytest.mark.parametrize(("kv_budget", "chunk"), [(420, 512), (420, 7), (3000, 1), (3000, 100)])
def test_packed_equals_alone_under_eviction_and_for_any_chunk(
    serve: Serve,
    kv_budget: int,
    chunk: int,
    mixed_requests: Callable[..., list[Request]],
    by_request: Callable[..., list[list[tuple[Any, ...]]]],
) -> None:
    requests = mixed_requests(20, seed=3)
    expected = by_request(requests, serve().generate(requests))
    decoder = serve(kv_budget=kv_budget, chunk=chunk)
    for turn in range(2):
        order = random.Random(turn).sample(range(len(requests)), len(requests))
        got = by_request([requests[i] for i in order], decoder.generate([requests[i] for i in order]))
        assert got == [expected[i] for i in order]
    cache = decoder.engine.cache
    assert cache.peak_live <= kv_budget
    if kv_budget == 420:
        assert cache.stored == kv_budget  # the cache was full, so entries were evicted
        assert cache.peak_live > 300


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


class Pairs(Policy):
    """A policy that writes a given text, two tokens a step."""

    def __init__(self, job: Job, script: Sequence[int]) -> None:
        self._job, self._script = job, list(script)
        self._branch: Any = None

    def growth(self) -> int:
        return 2 + self._job.outputs[0].room

    def propose(self) -> list[Chunk]:
        (output,), cache = self._job.outputs, self._job.cache
        if self._branch is None:
            self._branch = cache.fork(self._job.branch)
        output.forwards += 1
        at, start = len(output.tokens), len(self._branch)
        known = [*self._job.prompt, *self._script]
        cache.extend(self._branch, known[start : start + 2])
        return [Chunk(self._branch, start, start + 2, self._script[at : at + 2])]

    def commit(self, reads: list[list[Sampled]]) -> None:
        for sampled in reads[0]:
            if self._job.outputs[0].add(sampled):
                return

    def release(self) -> None:
        if self._branch is not None:
            self._job.cache.release(self._branch)


def test_two_methods_share_every_forward(decoder: LocalDecoder, alone: Any) -> None:
    engine = decoder.engine
    script = random.Random(1).choices(range(30, 90), k=12)
    requests = [Request(prompt=LONG, sampling=Sampling(max_tokens=12, ignore_eos=True))] * 2
    decoded, written = engine.submit_all(requests, [Autoregressive, partial(Pairs, script=script)])
    (one,), (two,) = decoded.result(30), written.result(30)
    assert engine.forwards == 12
    assert (one.usage.forwards, two.usage.forwards) == (12, 6)
    alone.check(requests[0], [one])
    assert list(two.tokens) == script
    assert two.logprob == pytest.approx(alone.total(engine.codec.encode_prompt(LONG), script), abs=1e-3)


def test_a_short_prompt_does_not_wait_for_a_long_one(
    serve: Serve, alone_with: Any, logits_alone: Callable[..., Tensor], model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = serve(chunk=40)
    steps: list[list[int]] = []
    forward = decoder.engine.runner.forward

    def record(chunks: list[Any]) -> Any:
        steps.append([chunk.stop - chunk.start for chunk in chunks])
        return forward(chunks)

    monkeypatch.setattr(decoder.engine.runner, "forward", record)
    prompts = ["x" * 200, "the other one", "y" * 30]
    requests = [Request(prompt=prompt, sampling=Sampling(max_tokens=2, ignore_eos=True)) for prompt in prompts]
    rows = [len(decoder.engine.codec.encode_prompt(prompt)) - 1 for prompt in prompts]
    assert rows[1] <= 20 < rows[2] < rows[0]
    completions = decoder.generate(requests)
    assert steps[0] == [rows[1], 40 - rows[1], 1]  # the short prompt, the first part of the long one, the first token
    for request, completion in zip(requests, completions, strict=True):
        alone_with(model, decoder, logits_alone).check(request, [completion])
