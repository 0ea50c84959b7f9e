"""The engine: reported usage, and tokens saved by shared prompts."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from tot.decoders import LocalDecoder, Request, Sampling
from tot.decoders.engine.runner import Chunk
from tot.decoders.engine.sequence import Job
from tot.decoders.methods.autoregressive import Autoregressive

LONG = "The sum of 10 and 11 is in the range on and on, and the other one: " * 4
Serve = Callable[..., LocalDecoder]


def test_a_second_call_computes_one_token_of_its_prompt(helpers: Any, decoder: LocalDecoder) -> None:
    request = Request(prompt=LONG, sampling=Sampling(max_tokens=4, n=2, temperature=1.0))
    first, twin = decoder.generate([request])
    again, _ = decoder.generate([request])
    size = len(decoder.engine.codec.encode_prompt(LONG))
    spent = [(c.usage.prompt_tokens, c.usage.reused_prompt_tokens, c.usage.new_tokens) for c in (first, twin, again)]
    assert spent == [(size, 0, len(first.tokens)), (0, 0, len(twin.tokens)), (size, size - 1, len(again.tokens))]
    assert helpers.outcome(first) == helpers.outcome(again)


def test_a_series_on_shared_prompts_computes_each_token_of_the_trie_once(decoder: LocalDecoder) -> None:
    """Count computed tokens over a few-shot prefix with four problems and three calls on each.

    The count is the number of trie nodes, plus one for each repeated prompt.
    """
    rng = random.Random(5)
    prefix = rng.choices(range(3, 270), k=120)
    problems = [rng.choices(range(3, 270), k=20) for _ in range(4)]
    nodes: set[tuple[int, ...]] = set()
    computed = repeats = 0
    for call in range(12):
        prompt = (*prefix, *problems[call % 4], *rng.choices(range(3, 270), k=5 if call % 3 else 0))
        (completion,) = decoder.generate([Request(prompt=prompt, sampling=Sampling(max_tokens=3))])
        before = len(nodes)
        nodes |= {prompt[:length] for length in range(1, len(prompt) + 1)}
        repeats += len(nodes) == before
        computed += completion.usage.prompt_tokens - completion.usage.reused_prompt_tokens
    assert repeats >= 1
    assert computed == len(nodes) + repeats


def test_generated_tokens_are_reused_as_a_prompt(helpers: Any, decoder: LocalDecoder) -> None:
    first = helpers.greedy(decoder, prompt=LONG, max_tokens=10, ignore_eos=True)
    prompt = (*decoder.engine.codec.encode_prompt(LONG), *first.tokens, 50)
    (second,) = decoder.generate([Request(prompt=prompt, sampling=Sampling(max_tokens=1))])
    assert second.usage.prompt_tokens - second.usage.reused_prompt_tokens == 2  # the last sampled token was never fed


def test_prompts_are_prefilled_in_chunks_beside_running_branches(serve: Serve) -> None:
    decoder = serve(chunk=100)
    backend, rows = decoder.engine.runner.backend, list[int]()
    forward = backend.forward
    backend.forward = lambda ids, *rest: rows.append(ids.shape[1]) or forward(ids, *rest)  # type: ignore
    rng = random.Random(0)
    prompts = [tuple(rng.choices(range(3, 270), k=size)) for size in (31, 251, 51)]
    decoder.generate([Request(prompt=p, sampling=Sampling(max_tokens=5, ignore_eos=True)) for p in prompts])
    # 30 + 70 of the prompts with the first's token; 50 of the short one + 50 of the long one; 100; the last 30: and one
    # row for each decoding request.
    assert rows == [101, 102, 102, 33, 3, 2, 1, 1]
    assert decoder.engine.forwards == 8


class Watched(Autoregressive):
    """A policy that records the live slots and the slots that its rationales need, before each forward."""

    def __init__(self, job: Job, seen: list[tuple[int, int]]) -> None:
        super().__init__(job)
        self._seen = seen

    def propose(self) -> list[Chunk]:
        chunks, job = super().propose(), self._job
        texts = [(*job.prompt, *output.tokens) for output in job.running]
        needed = {text[:length] for text in texts for length in range(1, len(text) + 1)}
        self._seen.append((job.cache.live, len(needed)))
        return chunks


def test_a_finished_sample_holds_no_slots(helpers: Any, decoder: LocalDecoder) -> None:
    seen: list[tuple[int, int]] = []
    request = Request(prompt="abc", sampling=Sampling(max_tokens=80, temperature=1.0, n=4, seed=5))
    completions = helpers.submit(decoder.engine, [request], partial(Watched, seen=seen))[0].result(30)
    ends = sorted(completion.usage.forwards for completion in completions)
    assert ends[0] + 10 < ends[-1]
    assert len(seen) > ends[0] + 10
    assert [live for live, _ in seen] == [needed for _, needed in seen]
