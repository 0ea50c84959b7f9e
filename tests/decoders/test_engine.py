"""The engine: what a request returns depends on nothing but the request, and nobody's trouble is anybody else's."""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from scipy import stats
from torch import Tensor

from tot.decoders import (
    Budget,
    Completion,
    Engine,
    LocalDecoder,
    Message,
    Meter,
    ModelError,
    OptionError,
    Request,
    RequestError,
    Sampling,
    Usage,
    load_decoder,
    load_model,
)
from tot.decoders.autoregressive import Autoregressive
from tot.decoders.engine.job import Handle, Job
from tot.decoders.engine.runner import Feed
from tot.decoders.engine.sampling import Draw, Sampled, read

END = 2
LONG = "The sum of 10 and 11 is in the range on and on, and the other one: " * 4
Serve = Callable[..., LocalDecoder]


@pytest.fixture
def model(make_model: Callable[..., Any]) -> Any:
    """A tiny Llama that writes readable text."""
    return make_model(readable=True)


@pytest.fixture
def serve(model: Any, tokenizer: Any) -> Iterator[Serve]:
    """Decoders on engines of any size. When all is done, every slot has to be free again."""
    engines: list[Engine] = []

    def start(model: Any = model, kv_budget: int = 3000, chunk: int = 512) -> LocalDecoder:
        loaded = load_model(copy.deepcopy(model), tokenizer=tokenizer)
        engines.append(Engine(loaded, kv_budget, chunk))
        return load_decoder("ar", engine=engines[-1])

    yield start
    for engine in engines:
        engine.close()
        assert engine.tree.live == 0


@pytest.fixture
def decoder(serve: Serve) -> LocalDecoder:
    return serve()


class Alone:
    """What a request has to return: each token from the untouched model, run over the whole text so far."""

    def __init__(self, model: Any, decoder: LocalDecoder, logits_alone: Callable[..., Tensor]) -> None:
        self._model = copy.deepcopy(model)
        self._codec = decoder.engine.codec
        self._run = logits_alone

    def logprobs(self, ids: Sequence[int]) -> Tensor:
        return self._run(self._model, list(ids)).log_softmax(-1)

    def total(self, context: Sequence[int], ids: Sequence[int]) -> float:
        """Log-probability of ids after the context."""
        rows = self.logprobs([*context, *ids])[len(context) - 1 : -1]
        return float(rows[range(len(ids)), list(ids)].sum())

    def tokens(
        self, context: Sequence[int], sampling: Sampling, count: int, sample: int = 0, first: int = 0
    ) -> list[int]:
        """Up to `count` tokens after the context, up to an end token; stop strings are not looked at."""
        s, drawn = sampling, list[int]()
        for position in range(first, first + count):
            how = (s.temperature, s.top_k, s.top_p, s.min_p, s.seed, sample, position)
            drawn.append(read(self._run(self._model, [*context, *drawn])[-1:], [Draw(*how)])[0].token)
            if drawn[-1] in self._codec.end_ids and not s.ignore_eos:
                break
        return drawn

    def check(self, request: Request, completions: Sequence[Completion]) -> None:
        """A request without trigger or choices: its tokens, text, log-probability and end."""
        prompt, s = self._codec.encode_prompt(request.prompt), request.sampling
        assert len(completions) == s.n
        for sample, completion in enumerate(completions):
            drawn = self.tokens(prompt, s, s.max_tokens, sample)
            if completion.finish_reason == "stop":
                drawn = drawn[: len(completion.tokens)]
                text = self._codec.decode(drawn)
                cut = min(text.find(stop) for stop in s.stop if stop in text)
                assert completion.text == text[:cut]
            else:
                assert completion.text == self._codec.decode(drawn)
                assert not any(stop in completion.text for stop in s.stop)
                ended = drawn[-1] in self._codec.end_ids and not s.ignore_eos
                assert completion.finish_reason == ("eos" if ended else "length")
            assert list(completion.tokens) == drawn
            assert completion.logprob == pytest.approx(self.total(prompt, drawn), abs=1e-3)


@pytest.fixture
def alone(model: Any, decoder: LocalDecoder, logits_alone: Callable[..., Tensor]) -> Alone:
    return Alone(model, decoder, logits_alone)


class Score(float):
    """A sum of log-probabilities: equal up to what the shape of a forward changes in float32."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(float(self) - float(other)) < 1e-3

    __hash__ = float.__hash__


def outcome(completion: Completion) -> tuple[Any, ...]:
    """All that must not depend on company."""
    scores = [(Score(choice.total), choice.tokens) for choice in completion.choice_logprobs]
    drawn = (completion.tokens, Score(completion.logprob))
    return completion.text, drawn, completion.finish_reason, completion.parts, scores


def by_request(requests: Sequence[Request], completions: Sequence[Completion]) -> list[list[tuple[Any, ...]]]:
    rest = iter(completions)
    return [[outcome(next(rest)) for _ in range(request.sampling.n)] for request in requests]


def mixed_requests(count: int, seed: int, temperature: float | None = None, plain: bool = False) -> list[Request]:
    """Prompts that share beginnings or do not, of all lengths, with stops, several samples, triggers and choices."""
    rng = random.Random(seed)
    requests = []
    for i in range(count):
        start = rng.choice(["", LONG[: rng.randint(1, len(LONG))], LONG, "the other", "10 "])
        prompt: Any = start + rng.choice(["", "and", " 10", "abc"]) + rng.choice("0123456789")
        if rng.random() < 0.2:
            prompt = (Message(role="user", content=prompt),)
        heat = rng.choice([0.0, 0.7, 1.0]) if temperature is None else temperature
        sampling = Sampling(
            max_tokens=rng.randint(1, 20),
            temperature=heat,
            top_p=0.9 if heat == 0.7 else 1.0,
            stop=rng.choice([(), (), (" t", "on"), ("a", "10", "e")]),
            seed=rng.choice([7, i]),
            n=rng.choice([1, 1, 2, 3]),
            ignore_eos=rng.random() < 0.3,
        )
        kind = "plain" if plain else rng.choice(["plain", "plain", "trigger", "choices", "both"])
        more: dict[str, Any] = {}
        if kind in ("trigger", "both"):
            more |= {"answer_trigger": " So the answer is", "answer_tokens": rng.randint(1, 6)}
        if kind in ("choices", "both"):
            more |= {"choices": ("1", "10", " the"), "close_choices": rng.random() < 0.5}
        if kind == "choices":
            sampling = sampling.model_copy(update={"n": 1})
        requests.append(Request(prompt=prompt, sampling=sampling, **more))
    return requests


# -- packed equals alone ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_packed_equals_the_untouched_model_alone(
    serve: Serve, make_model: Callable[..., Any], logits_alone: Callable[..., Tensor], family: str, temperature: float
) -> None:
    model = make_model(family, readable=True)
    decoder = serve(model)
    alone = Alone(model, decoder, logits_alone)
    requests = mixed_requests(10, seed=1, temperature=temperature, plain=True)
    completions = iter(decoder.generate(requests))
    for request in requests:
        alone.check(request, [next(completions) for _ in range(request.sampling.n)])
    assert next(completions, None) is None


def test_packed_equals_alone_for_every_kind_of_request(serve: Serve) -> None:
    requests = mixed_requests(30, seed=2)
    packed = by_request(requests, serve().generate(requests))
    decoder = serve()
    assert packed == [by_request([request], decoder.generate([request]))[0] for request in requests]
    kinds = {(reason, bool(scores), len(parts)) for group in packed for _, _, reason, parts, scores in group}
    assert {reason for reason, _, _ in kinds} == {"stop", "eos", "length"}
    assert {parts for _, _, parts in kinds} == {1, 3}


@pytest.mark.parametrize(("kv_budget", "chunk"), [(420, 512), (420, 7), (3000, 1), (3000, 100)])
def test_packed_equals_alone_under_eviction_and_for_any_chunk(serve: Serve, kv_budget: int, chunk: int) -> None:
    requests = mixed_requests(20, seed=3)
    expected = by_request(requests, serve().generate(requests))
    decoder = serve(kv_budget=kv_budget, chunk=chunk)
    for turn in range(2):
        order = random.Random(turn).sample(range(len(requests)), len(requests))
        got = by_request([requests[i] for i in order], decoder.generate([requests[i] for i in order]))
        assert got == [expected[i] for i in order]
    tree = decoder.engine.tree
    assert tree.peak_live <= kv_budget
    if kv_budget == 420:
        assert tree.stored == kv_budget  # the cache filled, so slots were taken from it
        assert tree.peak_live > 300


def test_the_order_of_submission_changes_nothing(serve: Serve) -> None:
    requests = mixed_requests(12, seed=4)
    expected = by_request(requests, serve().generate(requests))
    for seed in range(4):
        order = random.Random(seed).sample(range(12), 12)
        got = by_request([requests[i] for i in order], serve(chunk=64).generate([requests[i] for i in order]))
        assert got == [expected[i] for i in order]


def test_temperature_zero_is_what_generate_gives(model: Any, make_model: Callable[..., Any], serve: Serve) -> None:
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
    assert np.abs(counts - independent).sum() / 2 / 6000 > 0.1  # the second token does depend on the first


# -- what ends a text ------------------------------------------------------------------------------


def greedy(decoder: LocalDecoder, prompt: str = "abc", **settings: Any) -> Completion:
    return decoder.generate([Request(prompt=prompt, sampling=Sampling(**settings))])[0]


def test_an_end_token_ends_a_text_unless_ignored(decoder: LocalDecoder) -> None:
    ended = greedy(decoder, max_tokens=200)
    assert (ended.finish_reason, ended.tokens[-1]) == ("eos", END)
    assert "<|im_end|>" not in ended.text
    longer = greedy(decoder, max_tokens=len(ended.tokens) + 5, ignore_eos=True)
    assert (longer.finish_reason, len(longer.tokens)) == ("length", len(ended.tokens) + 5)
    assert longer.tokens[: len(ended.tokens)] == ended.tokens
    assert longer.text.startswith(ended.text)


def test_every_end_token_of_the_generation_config_counts(model: Any, serve: Serve) -> None:
    tokens = greedy(serve(), max_tokens=8).tokens
    model.generation_config.eos_token_id = [END, tokens[5]]
    cut = greedy(serve(model), max_tokens=8)
    assert (cut.tokens, cut.finish_reason) == (tokens[: tokens.index(tokens[5]) + 1], "eos")


def inner_stop(decoder: LocalDecoder, prompt: str, **settings: Any) -> tuple[str, int, str]:
    """What the model will write from inside a token to two tokens later; that token's place, and its text."""
    tokens = greedy(decoder, prompt=prompt, **settings).tokens
    pieces = [decoder.engine.codec.decode([token]) for token in tokens]
    at = next(i for i, piece in enumerate(pieces) if i and len(piece) > 1)
    return pieces[at][1:] + "".join(pieces[at + 1 : at + 3]), at, pieces[at]


def test_a_stop_string_may_span_tokens_and_begin_inside_one(decoder: LocalDecoder) -> None:
    free = greedy(decoder, prompt="the an in", max_tokens=15)
    stop, at, piece = inner_stop(decoder, "the an in", max_tokens=15)
    cut = greedy(decoder, prompt="the an in", max_tokens=15, stop=("never written", stop))
    assert cut.text == free.text[: free.text.index(stop)]
    assert cut.text.endswith(piece[:1])
    assert (cut.finish_reason, cut.tokens) == ("stop", free.tokens[: at + 3])


def test_the_context_bounds_a_text(decoder: LocalDecoder) -> None:
    prompt = tuple(random.Random(0).choices(range(3, 270), k=1000))
    sampling = Sampling(max_tokens=100, ignore_eos=True)
    (completion,) = decoder.generate([Request(prompt=prompt, sampling=sampling)])
    assert (len(completion.tokens), completion.finish_reason) == (24, "length")


# -- usage -----------------------------------------------------------------------------------------


def test_a_second_call_computes_one_token_of_its_prompt(decoder: LocalDecoder) -> None:
    request = Request(prompt=LONG, sampling=Sampling(max_tokens=4, n=2, temperature=1.0))
    first, twin = decoder.generate([request])
    again, _ = decoder.generate([request])
    size = len(decoder.engine.codec.encode_prompt(LONG))
    spent = [(c.usage.prompt_tokens, c.usage.reused_prompt_tokens, c.usage.new_tokens) for c in (first, twin, again)]
    assert spent == [(size, 0, len(first.tokens)), (0, 0, len(twin.tokens)), (size, size - 1, len(again.tokens))]
    assert outcome(first) == outcome(again)


def test_packed_twins_share_one_computation(decoder: LocalDecoder) -> None:
    request = Request(prompt=LONG, sampling=Sampling(max_tokens=2))
    completions = decoder.generate([request] * 3)
    size = completions[0].usage.prompt_tokens
    assert [size - completion.usage.reused_prompt_tokens for completion in completions] == [size, 0, 0]


def test_a_series_on_shared_prompts_computes_each_token_of_the_trie_once(decoder: LocalDecoder) -> None:
    """Few-shot prefix, four problems, three calls on each: tokens computed = nodes of the trie + one a repeat."""
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


def test_what_was_generated_is_found_as_a_prompt(decoder: LocalDecoder) -> None:
    first = greedy(decoder, prompt=LONG, max_tokens=10, ignore_eos=True)
    prompt = (*decoder.engine.codec.encode_prompt(LONG), *first.tokens, 50)
    (second,) = decoder.generate([Request(prompt=prompt, sampling=Sampling(max_tokens=1))])
    assert second.usage.prompt_tokens - second.usage.reused_prompt_tokens == 2  # the last drawn was never fed


def test_usage_counts_forwards_and_sums_up(decoder: LocalDecoder) -> None:
    sampling = Sampling(max_tokens=6, ignore_eos=True, n=2)
    completions = decoder.generate([Request(prompt="abc", sampling=sampling)])
    assert decoder.engine.forwards == 6
    total = sum((completion.usage for completion in completions), Usage())
    assert (total.prompt_tokens, total.new_tokens, total.forwards, total.drafted) == (1, 12, 12, 0)
    assert 0 < completions[0].usage.seconds < 60


def test_prompts_are_read_in_chunks_beside_running_branches(serve: Serve) -> None:
    decoder = serve(chunk=100)
    call, rows = decoder.engine.runner.call, list[int]()
    decoder.engine.runner.call = lambda ids, *rest: rows.append(ids.shape[1]) or call(ids, *rest)  # type: ignore
    rng = random.Random(0)
    prompts = [tuple(rng.choices(range(3, 270), k=size)) for size in (31, 251, 51)]
    decoder.generate([Request(prompt=p, sampling=Sampling(max_tokens=5, ignore_eos=True)) for p in prompts])
    # 30 + 70 of the prompts with the first's token; 100; 80 + 20; the last 30: and a row for each that decodes.
    assert rows == [101, 101, 102, 33, 3, 2, 2, 1]
    assert decoder.engine.forwards == 8


class Watched(Autoregressive):
    """Notes before each forward how many slots are live, and how many its rationales need."""

    def __init__(self, job: Job, seen: list[tuple[int, int]]) -> None:
        super().__init__(job)
        self._seen = seen

    def propose(self) -> list[Feed]:
        feeds, job = super().propose(), self._job
        texts = [(*job.prompt, *output.tokens) for output in job.running]
        needed = {text[:length] for text in texts for length in range(1, len(text) + 1)}
        if not any(output.parts for output in job.running):
            self._seen.append((job.tree.live, len(needed)))
        return feeds


@pytest.mark.parametrize("more", [{}, {"answer_trigger": " So", "choices": ("yes", "no")}])
def test_a_sample_that_ended_holds_no_slots(decoder: LocalDecoder, more: dict[str, Any]) -> None:
    seen: list[tuple[int, int]] = []
    request = Request(prompt="abc", sampling=Sampling(max_tokens=80, temperature=1.0, n=4, seed=5), **more)
    completions = decoder.engine.submit(request, partial(Watched, seen=seen)).result(30)
    ends = sorted(completion.usage.forwards for completion in completions)
    assert ends[0] + 10 < ends[-1]
    assert len(seen) > ends[0] + 10
    assert [live for live, _ in seen] == [needed for _, needed in seen]


# -- budgets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "tokens"),
    [(Budget(tokens=5), 5), (Budget(forwards=3), 3), (Budget(seconds=0), 0), (Budget(tokens=0), 0)],
)
def test_a_reached_limit_ends_a_text_as_budget(decoder: LocalDecoder, budget: Budget, tokens: int) -> None:
    meter = Meter(budget)
    sampling = Sampling(max_tokens=50, ignore_eos=True)
    requests = [Request(prompt="abc", sampling=sampling)]
    (metered,) = decoder.submit(requests, meter)
    free = decoder.generate(requests)[0]
    (completion,) = metered.result(30)
    assert (completion.finish_reason, len(completion.tokens)) == ("budget", tokens)
    assert completion.tokens == free.tokens[:tokens]
    assert completion.text == decoder.engine.codec.decode(completion.tokens)
    assert (meter.new_tokens, meter.forwards) == (tokens, tokens)
    assert len(free.tokens) == 50


def test_a_meter_is_shared_by_all_requests_of_a_search(decoder: LocalDecoder) -> None:
    meter = Meter(Budget(tokens=20))
    requests = [Request(prompt=p, sampling=Sampling(max_tokens=50, ignore_eos=True)) for p in ("abc", "the", "in")]
    handles = decoder.submit(requests, meter)
    spent = [len(handle.result(30)[0].tokens) for handle in handles]
    assert spent == [7, 7, 7]
    assert (meter.new_tokens, meter.forwards) == (21, 7)


# -- streaming, waiting, cancelling ----------------------------------------------------------------


def streamed(handle: Handle) -> dict[int, str]:
    texts: dict[int, str] = {}
    for sample, piece in handle:
        assert piece
        texts[sample] = texts.get(sample, "") + piece
    return texts


def test_streamed_pieces_are_the_text(serve: Serve, make_model: Callable[..., Any]) -> None:
    for tiny in (make_model(readable=True), make_model()):  # the second writes broken characters
        decoder = serve(tiny)
        requests = mixed_requests(15, seed=6)
        for handle in decoder.submit(requests, stream=True):
            texts = streamed(handle)
            assert [texts.get(i, "") for i in range(len(handle.result()))] == [c.text for c in handle.result()]


def test_a_stop_string_is_never_streamed_not_even_its_beginning(decoder: LocalDecoder) -> None:
    text = greedy(decoder, max_tokens=12).text
    stop = text[4:9]
    (handle,) = decoder.submit([Request(prompt="abc", sampling=Sampling(max_tokens=12, stop=(stop,)))], stream=True)
    pieces = [piece for _, piece in handle]
    assert "".join(pieces) == text[:4] == handle.result()[0].text
    (handle,) = decoder.submit(
        [Request(prompt="abc", sampling=Sampling(max_tokens=12, stop=(stop + "~~",)))], stream=True
    )
    assert streamed(handle) == {0: text}


def test_text_comes_while_it_is_written(decoder: LocalDecoder) -> None:
    request = Request(prompt="abc", sampling=Sampling(max_tokens=900, ignore_eos=True))
    (handle,) = decoder.submit([request], stream=True)
    next(iter(handle))
    assert not handle.future.done()
    handle.cancel()


def test_iterating_takes_a_streaming_request(decoder: LocalDecoder) -> None:
    (handle,) = decoder.submit([Request(prompt="abc", sampling=Sampling(max_tokens=1))])
    with pytest.raises(RequestError, match=r"submit\(\.\.\., stream=True\)"):
        next(iter(handle))


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_cancelling_gives_the_slots_back_and_leaves_others_alone(decoder: LocalDecoder) -> None:
    tree = decoder.engine.tree
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
    assert outcome(kept.result(30)[0]) == outcome(expected)
    wait_until(lambda: tree.live == 0)


def test_a_waiting_request_can_be_cancelled(serve: Serve) -> None:
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


def test_cancelling_what_is_done_does_nothing(decoder: LocalDecoder) -> None:
    (handle,) = decoder.submit([Request(prompt="abc", sampling=Sampling(max_tokens=3))])
    done = handle.result(30)
    handle.cancel()
    assert handle.result(30) is done
    assert greedy(decoder, max_tokens=3).tokens == done[0].tokens


def test_handles_are_awaited_from_asyncio(decoder: LocalDecoder) -> None:
    requests = mixed_requests(6, seed=7)

    async def main() -> list[Completion]:
        done = await asyncio.gather(*decoder.submit(requests))
        return [completion for completions in done for completion in completions]

    assert by_request(requests, asyncio.run(main())) == by_request(requests, decoder.generate(requests))


def test_pieces_can_be_awaited(decoder: LocalDecoder) -> None:
    async def main() -> tuple[str, list[Completion]]:
        (handle,) = decoder.submit([Request(prompt="abc", sampling=Sampling(max_tokens=9))], stream=True)
        return "".join([piece async for _, piece in handle]), await handle

    text, (completion,) = asyncio.run(main())
    assert text == completion.text == greedy(decoder, max_tokens=9).text


def test_an_error_reaches_whoever_awaits(decoder: LocalDecoder) -> None:
    async def main() -> None:
        await decoder.engine.submit(Request(prompt="abc"), partial(Faulty, where="commit"))

    with pytest.raises(ModelError, match="ZeroDivisionError"):
        asyncio.run(main())


class Held(Autoregressive):
    """Decodes, but not before it is let go."""

    def __init__(self, job: Job, let_go: threading.Event) -> None:
        super().__init__(job)
        self._let_go = let_go

    def propose(self) -> list[Feed]:
        self._let_go.wait(20)
        return super().propose()


@pytest.mark.parametrize("loop_ends_first", [False, True])
def test_cancelling_the_task_that_awaits_cancels_the_request(
    decoder: LocalDecoder, caplog: pytest.LogCaptureFixture, loop_ends_first: bool
) -> None:
    let_go = threading.Event()
    sampling = Sampling(max_tokens=900, ignore_eos=True)
    handle = decoder.engine.submit(Request(prompt="abc", sampling=sampling), partial(Held, let_go=let_go))
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
            let_go.set()
            assert len((await brief)[0].tokens) == 5

    asyncio.run(main())
    let_go.set()
    (completion,) = handle.result(30)
    assert completion.finish_reason == "cancelled"
    assert len(completion.tokens) < 900
    assert len(brief.result(30)[0].tokens) == 5
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.DEBUG] == []


# -- choices and answers ---------------------------------------------------------------------------


@pytest.mark.parametrize("close", [False, True])
def test_choices_score_as_the_text_run_alone(decoder: LocalDecoder, alone: Alone, close: bool) -> None:
    codec = decoder.engine.codec
    choices = ("1", "10", "102", " the other", "the <|im_end|>", "z")
    request = Request(prompt=LONG, choices=choices, close_choices=close)
    (completion,), _ = decoder.generate([request]), decoder.generate([request])
    prompt = codec.encode_prompt(LONG)
    for choice, score in zip(choices, completion.choice_logprobs, strict=True):
        ids = [*codec.encode(choice), *([END] if close else [])]
        assert score.total == pytest.approx(alone.total(prompt, ids), abs=1e-3)
        assert score.tokens == len(ids)
        assert score.mean == score.total / len(ids)
    assert (completion.text, completion.tokens, completion.finish_reason) == ("", (), "stop")
    assert completion.usage.new_tokens == 0
    assert completion.usage.forwards == 1


def test_scoring_runs_beside_decoding(decoder: LocalDecoder) -> None:
    scored = Request(prompt=LONG, choices=("yes", "no"))
    decoded = Request(prompt=LONG, sampling=Sampling(max_tokens=10, n=2, temperature=1.0))
    expected = decoder.generate([scored])[0], *decoder.generate([decoded])
    got = decoder.generate([decoded, scored, decoded, scored])
    assert [outcome(got[i]) for i in (2, 5)] == [outcome(expected[0])] * 2
    assert [outcome(got[i]) for i in (0, 1, 3, 4)] == [outcome(one) for one in expected[1:]] * 2


TRIGGER = " So the answer is"


def ended_by(decoder: LocalDecoder, ended: str, settings: dict[str, Any]) -> Sampling:
    """Settings under which "abc" goes on to the given end; a stop string spans tokens that were fed already."""
    sampling = Sampling(seed=3, **settings)
    if ended == "stop":
        sampling = Sampling(seed=3, stop=(inner_stop(decoder, "abc", **settings)[0],), **settings)
    return sampling


def answered(
    decoder: LocalDecoder, ended: str, choices: tuple[str, ...] = (), **settings: Any
) -> tuple[Completion, list[int]]:
    """A request whose rationale ends in the given way, checked up to its trigger; and the ids it went on from."""
    codec = decoder.engine.codec
    sampling = ended_by(decoder, ended, settings)
    plain = decoder.generate([Request(prompt="abc", sampling=sampling)])[0]
    assert plain.finish_reason == ended
    request = Request(prompt="abc", sampling=sampling, answer_trigger=TRIGGER, answer_tokens=7, choices=choices)
    (completion,) = decoder.generate([request])
    rationale, trigger, answer = completion.parts
    assert [part.kind for part in completion.parts] == ["exact", "trigger", "exact"]
    assert (rationale.text, trigger.text) == (plain.text, TRIGGER)
    assert completion.text == plain.text + TRIGGER + answer.text
    assert completion.answer == answer.text
    assert completion.tokens[: len(plain.tokens)] == plain.tokens
    kept = max(n for n in range(len(plain.tokens) + 1) if plain.text.startswith(codec.decode(plain.tokens[:n])))
    if ended == "eos":
        kept -= 1
    rest = plain.text[len(codec.decode(plain.tokens[:kept])) :] + TRIGGER
    return completion, [*codec.encode_prompt("abc"), *plain.tokens[:kept], *codec.encode(rest)]


ENDS = pytest.mark.parametrize(
    ("ended", "settings"),
    [
        ("length", {"max_tokens": 9}),
        ("eos", {"max_tokens": 200}),
        ("stop", {"max_tokens": 20}),
        ("length", {"max_tokens": 9, "temperature": 1.0}),
    ],
)


@ENDS
def test_an_answer_follows_its_trigger(
    decoder: LocalDecoder, alone: Alone, ended: str, settings: dict[str, Any]
) -> None:
    completion, context = answered(decoder, ended, **settings)
    sampling = ended_by(decoder, ended, settings)
    first = len(decoder.generate([Request(prompt="abc", sampling=sampling)])[0].tokens)
    expected = alone.tokens(context, sampling, 7, first=first)
    text = decoder.engine.codec.decode(expected)
    cut = min((text.find(stop) for stop in sampling.stop if stop in text), default=len(text))
    answer = list(completion.tokens[first:])
    assert answer == expected[: len(answer)]
    assert completion.answer == text[:cut]
    assert len(answer) == 7 or completion.finish_reason in ("eos", "stop")


@ENDS
def test_choices_after_a_trigger_are_scored_after_it(
    decoder: LocalDecoder, alone: Alone, ended: str, settings: dict[str, Any]
) -> None:
    choices = (" 1", " 10", "z")
    completion, context = answered(decoder, ended, choices, **settings)
    assert completion.answer == ""
    for choice, score in zip(choices, completion.choice_logprobs, strict=True):
        ids = decoder.engine.codec.encode(choice)
        assert score.total == pytest.approx(alone.total(context, ids), abs=1e-3)


def test_a_completion_without_a_trigger_is_its_own_answer(decoder: LocalDecoder) -> None:
    completion = greedy(decoder, max_tokens=5)
    assert completion.answer == completion.text
    assert [(part.kind, part.text) for part in completion.parts] == [("exact", completion.text)]


def test_the_trigger_and_answer_still_to_come_keep_their_room(serve: Serve) -> None:
    """Between a rationale's end and its trigger's forward, nobody may be let in on the trigger's slots."""
    decoder = serve(kv_budget=80)
    sampling = Sampling(max_tokens=4, ignore_eos=True)
    trigger = "0123456789012345678901234567890123456789"
    answered = Request(prompt="0123456789", sampling=sampling, answer_trigger=trigger, answer_tokens=10)
    wide = Request(prompt="abc", sampling=Sampling(max_tokens=9, n=5, ignore_eos=True, temperature=1.0))
    first, second = decoder.submit([answered, wide])
    assert len(first.result(30)[0].tokens) == 14
    assert [len(completion.tokens) for completion in second.result(30)] == [9] * 5


# -- faults ----------------------------------------------------------------------------------------


class Faulty(Autoregressive):
    """Decodes, and fails in its third step."""

    def __init__(self, job: Job, where: str) -> None:
        super().__init__(job)
        self._where = where
        self._steps = 0

    def propose(self) -> list[Feed]:
        self._steps += 1
        feeds = super().propose()
        if self._where == "propose" and self._steps == 3:
            raise ZeroDivisionError("a fault of mine")
        return feeds

    def commit(self, reads: list[list[Sampled]]) -> None:
        super().commit(reads)
        if self._where == "commit" and self._steps == 3:
            raise ZeroDivisionError("a fault of mine")


@pytest.mark.parametrize("where", ["propose", "commit"])
def test_a_policys_fault_fails_its_request_only(decoder: LocalDecoder, where: str) -> None:
    engine = decoder.engine
    request = Request(prompt=LONG, sampling=Sampling(max_tokens=12, temperature=1.0, n=2))
    expected = [outcome(one) for one in decoder.generate([request])]
    policies = [Autoregressive, partial(Faulty, where=where), Autoregressive]
    sound, faulty, also_sound = engine.submit_all([request] * 3, policies, stream=True)
    with pytest.raises(ModelError, match="decoding failed: ZeroDivisionError: a fault of mine"):
        faulty.result(30)
    with pytest.raises(ModelError, match="a fault of mine"):
        list(faulty)
    assert [outcome(one) for one in sound.result(30)] == expected
    assert [outcome(one) for one in also_sound.result(30)] == expected
    wait_until(lambda: engine.tree.live == 0)
    assert [outcome(one) for one in decoder.generate([request])] == expected


@pytest.mark.parametrize("weight", ["lm_head.weight", "model.layers.0.self_attn.v_proj.weight", "model.norm.weight"])
def test_weights_of_nan_fail_a_request_and_not_the_engine(decoder: LocalDecoder, weight: str) -> None:
    request = Request(prompt=LONG, sampling=Sampling(max_tokens=4, temperature=1.0, n=2))
    other = Request(prompt="abc", sampling=Sampling(max_tokens=4))
    expected = [outcome(one) for one in decoder.generate([other])]
    tensor = decoder.model.get_parameter(weight)
    whole = tensor.clone()
    tensor[...] = torch.nan
    for handle in decoder.submit([request, request]):
        with pytest.raises(ModelError, match=r"not finite .* try dtype=fp32"):
            handle.result(30)
    tensor.copy_(whole)
    damaged = decoder.generate([request])  # nothing computed with the damaged weights may be left in the cache
    assert len(damaged) == 2
    assert [outcome(one) for one in decoder.generate([other])] == expected


def test_a_request_that_meets_nan_spoils_no_other(decoder: LocalDecoder) -> None:
    good = Request(prompt=LONG, sampling=Sampling(max_tokens=10))
    expected = outcome(decoder.generate([good])[0])
    decoder.model.model.embed_tokens.weight[200] = torch.nan
    bad = Request(prompt=(*decoder.engine.codec.encode_prompt(LONG), 200, 5))
    first, broken, last = decoder.submit([good, bad, good])
    with pytest.raises(ModelError, match="not finite"):
        broken.result(30)
    assert [outcome(handle.result(30)[0]) for handle in (first, last)] == [expected] * 2


def test_a_forward_that_fails_loses_its_step_and_not_the_engine(
    decoder: LocalDecoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    request = Request(prompt="abc", sampling=Sampling(max_tokens=5))
    expected = outcome(decoder.generate([request])[0])

    def no_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory left")

    with monkeypatch.context() as patch:
        patch.setattr(decoder.engine.runner, "call", no_memory)
        for handle in decoder.submit([request, request]):
            with pytest.raises(ModelError, match="OutOfMemoryError: no memory left"):
                handle.result(30)
    assert "a forward pass failed" in caplog.text
    assert outcome(decoder.generate([request])[0]) == expected


class Ruinous(Autoregressive):
    """Fails where the engine can't tell whose slots are whose any more."""

    def release(self) -> None:
        raise ZeroDivisionError("slots lost")


def test_an_engine_that_breaks_lets_nobody_wait(model: Any, tokenizer: Any) -> None:
    tokens = torch.tensor([[5, 6, 7]])
    before = model(tokens).logits
    engine = Engine(load_model(model, tokenizer=tokenizer), 1000)
    requests = [Request(prompt=p, sampling=Sampling(max_tokens=n, ignore_eos=True)) for p, n in (("a", 3), ("b", 700))]
    waiting = Request(prompt="c", sampling=Sampling(max_tokens=700))
    handles = engine.submit_all([*requests, waiting], [Ruinous, Autoregressive, Autoregressive], stream=True)
    for handle in handles:
        with pytest.raises(ModelError, match=r"engine has failed \(ZeroDivisionError: slots lost\): make a new one"):
            handle.result(30)
    with pytest.raises(ModelError, match="engine has failed"):
        engine.submit(requests[0], Autoregressive)
    engine.close()
    assert torch.equal(model(tokens).logits, before)


# -- two methods in one forward --------------------------------------------------------------------


class Pairs:
    """Writes a given text, two tokens a step."""

    companion = None

    def __init__(self, job: Job, script: Sequence[int]) -> None:
        self._job, self._script = job, list(script)
        self._branch: Any = None

    def growth(self) -> int:
        return 2 + self._job.outputs[0].room

    def propose(self) -> list[Feed]:
        (output,), tree = self._job.outputs, self._job.tree
        if self._branch is None:
            self._branch = tree.fork(self._job.branch)
        output.forwards += 1
        at, start = len(output.tokens), len(self._branch)
        known = [*self._job.prompt, *self._script]
        tree.extend(self._branch, known[start : start + 2])
        return [Feed(self._branch, start, start + 2, self._script[at : at + 2])]

    def commit(self, reads: list[list[Sampled]]) -> None:
        for sampled in reads[0]:
            if self._job.outputs[0].add(sampled):
                return

    def release(self) -> None:
        if self._branch is not None:
            self._job.tree.release(self._branch)


def test_two_methods_share_every_forward(decoder: LocalDecoder, alone: Alone) -> None:
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


# -- what is refused -------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(decoder: LocalDecoder) -> None:
    with pytest.raises(RequestError, match="prompt has 1024 tokens and the model's context holds 1024, 1025 being"):
        decoder.submit([Request(prompt=(5,) * 1024)])
    trigger = Request(prompt=(5,) * 1000, answer_trigger="01234", answer_tokens=20)
    with pytest.raises(RequestError, match="1026 being the least this request needs: shorten the prompt"):
        decoder.submit([trigger])


def test_a_request_larger_than_the_store_is_refused_with_the_numbers(serve: Serve) -> None:
    decoder = serve(kv_budget=50)
    fits = Request(prompt=(5,) * 10, sampling=Sampling(max_tokens=20, n=2, ignore_eos=True, temperature=1.0))
    assert len(decoder.generate([fits])) == 2
    request = fits.model_copy(update={"sampling": fits.sampling.model_copy(update={"max_tokens": 21})})
    with pytest.raises(
        RequestError, match=r"may need 52 .*\(10 of prompt, .* n=2 samples\) .* holds 50: raise kv_budget"
    ):
        decoder.submit([request])


@pytest.mark.parametrize(("tokens", "fits"), [(40, True), (41, False)])
def test_what_just_fits_the_store_runs(serve: Serve, tokens: int, fits: bool) -> None:
    request = Request(prompt=(5,) * 10, sampling=Sampling(max_tokens=tokens, ignore_eos=True))
    decoder = serve(kv_budget=50)
    if fits:
        assert len(decoder.generate([request])[0].tokens) == tokens
    else:
        with pytest.raises(RequestError, match=r"may need 51 .* holds 50"):
            decoder.submit([request])


@pytest.mark.parametrize("prompt", ["", (), []])
def test_an_empty_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(ValidationError, match="the prompt is empty: give text, chat messages or token ids"):
        Request(prompt=prompt)


def test_a_prompt_without_tokens_is_refused(decoder: LocalDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder.tokenizer, "chat_template", "{{ messages[0].content }}")
    with pytest.raises(RequestError, match="the prompt has no tokens: give some text"):
        decoder.submit([Request(prompt=(Message(role="user", content=""),))])


def test_a_token_id_outside_the_vocabulary_is_refused(decoder: LocalDecoder) -> None:
    with pytest.raises(RequestError, match="token id 279 is outside the vocabulary of 279"):
        decoder.submit([Request(prompt=(5, 279))])


def test_one_refused_request_queues_none(decoder: LocalDecoder) -> None:
    with pytest.raises(RequestError):
        decoder.submit([Request(prompt="abc"), Request(prompt=(5, 279))])
    assert decoder.engine.forwards == 0


# -- the front door, and closing it ----------------------------------------------------------------


def test_a_decoder_is_loaded_from_a_model_object(model: Any, tokenizer: Any, alone: Alone) -> None:
    tokens = torch.tensor([[5, 6, 7]])
    before = model(tokens).logits
    with load_decoder("ar", model=model, tokenizer=tokenizer, kv_budget="1MiB") as decoder:
        assert decoder.model is model
        assert decoder.tokenizer is tokenizer
        request = Request(prompt=LONG, sampling=Sampling(max_tokens=8))
        alone.check(request, decoder.generate([request]))
    assert torch.equal(model(tokens).logits, before)
    generated = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=3, pad_token_id=0)
    assert generated.shape[1] > 3


def test_a_shared_engine_outlives_its_decoders(decoder: LocalDecoder) -> None:
    with load_decoder("ar", engine=decoder.engine) as second:
        assert second.model is decoder.model
        first = greedy(second, max_tokens=3)
    assert greedy(decoder, max_tokens=3).tokens == first.tokens


def test_bad_names_and_options_are_named(decoder: LocalDecoder) -> None:
    with pytest.raises(OptionError, match=r"unknown decoder 'arr' \(did you mean ar\?\)"):
        load_decoder("arr", engine=decoder.engine)
    with pytest.raises(OptionError, match="decoder ar, option width"):
        load_decoder("ar", engine=decoder.engine, width=3)


def test_a_model_is_held_by_one_engine_at_a_time(decoder: LocalDecoder) -> None:
    """A second one would take the first one's attention away when it closes, and the first would go on, wrongly."""
    with pytest.raises(ModelError, match="held by another Engine: close that one, or share it by engine="):
        Engine(decoder.engine.loaded)
    decoder.engine.close()
    with Engine(decoder.engine.loaded, 100) as second:
        assert greedy(load_decoder("ar", engine=second), max_tokens=3).finish_reason == "length"


def test_a_closed_engine_refuses(decoder: LocalDecoder) -> None:
    greedy(decoder, max_tokens=1)
    decoder.engine.close()
    decoder.engine.close()
    with pytest.raises(RequestError, match="this engine is closed: make a new one"):
        decoder.submit([Request(prompt="abc")])


def test_closing_cancels_what_runs_and_what_waits(serve: Serve) -> None:
    decoder = serve(kv_budget=1000)
    requests = [Request(prompt=p, sampling=Sampling(max_tokens=700, ignore_eos=True)) for p in ("abc", "the", "in")]
    handles = decoder.submit(requests, stream=True)
    next(iter(handles[0]))
    decoder.engine.close()
    completions = [handle.result(1)[0] for handle in handles]
    assert [completion.finish_reason for completion in completions] == ["cancelled"] * 3
    assert len(completions[0].tokens) >= 1
    assert [completion.tokens for completion in completions[1:]] == [(), ()]


def test_fifty_threads_may_submit_at_once(decoder: LocalDecoder) -> None:
    requests = mixed_requests(50, seed=8)
    expected = by_request(requests, decoder.generate(requests))
    start = threading.Barrier(50)

    def call(request: Request) -> list[Completion]:
        start.wait()
        return decoder.generate([request])

    with ThreadPoolExecutor(50) as threads:
        got = list(threads.map(call, requests))
    assert [by_request([request], one)[0] for request, one in zip(requests, got, strict=True)] == expected


def test_an_engine_that_nobody_holds_is_collected_once_idle(
    make_model: Callable[..., Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tot.decoders.engine.engine._IDLE_SECONDS", 0.02)
    decoder = load_decoder("ar", make_model(), tokenizer=tokenizer, kv_budget=200)
    first = greedy(decoder, max_tokens=2).tokens
    thread = decoder.engine._thread
    assert thread is not None
    thread.join(10)
    assert greedy(decoder, max_tokens=2).tokens == first  # a thread that has gone is started again
    assert decoder.engine._thread is not None
    decoder.engine._thread.join(10)
    engine = weakref.ref(decoder.engine)
    del decoder
    gc.collect()
    assert engine() is None


class Stalled(Autoregressive):
    """A policy that never has anything to run."""

    def propose(self) -> list[Feed]:
        return []


def test_a_policy_with_nothing_to_run_fails_instead_of_being_asked_for_ever(decoder: LocalDecoder) -> None:
    handle = decoder.engine.submit(Request(prompt="abc"), Stalled)
    with pytest.raises(ModelError, match="Stalled has nothing to run and has not ended"):
        handle.result(30)
