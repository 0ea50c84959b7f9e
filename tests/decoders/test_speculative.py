"""Speculative decoding gives, token for token, what `ar` gives: only the number of forwards may differ."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tot.decoders import (
    Budget,
    Completion,
    Engine,
    LocalDecoder,
    Meter,
    Request,
    RequestError,
    Sampling,
    load_decoder,
    load_model,
)
from tot.decoders.decoder import make_drafter
from tot.decoders.drafters import Drafter, DrafterChain, ModelDrafter

LONG = "The sum of 10 and 11 is in the range on and on, and the other one: " * 2
SD = [("sd", {"k": k}) for k in range(1, 7)]
MCSD = [("mcsd", {"k_config": config}) for config in ((2, 2, 1), (4, 2, 1, 1), (1,), (3,))]
SEED: list[tuple[str, dict[str, Any]]] = [
    ("seed", {}),
    ("seed", {"adapt": False, "k_config": (2, 2, 1)}),
    ("seed", {"policy": "rounds"}),
    ("seed", {"policy": "rounds", "overlap": False}),
    ("seed", {"policy": "rounds", "adapt": False, "k_config": (2, 2, 1)}),
]
METHODS = [*SD, *MCSD, *SEED]
DRAFTS = ["lookup", "same", "near", "far", "chain"]

named = pytest.mark.parametrize(("name", "options"), METHODS, ids=lambda value: str(value).strip("{}"))


@dataclass
class Bench:
    """One target; decoders for it by method and draft, each on a copy of its own. All slots must be free at the end."""

    target: Any
    tokenizer: Any
    engines: list[Engine] = field(default_factory=list)
    drafters: list[Drafter] = field(default_factory=list)
    decoders: list[LocalDecoder] = field(default_factory=list)

    def engine(self, kv_budget: int = 3000, chunk: int = 512) -> Engine:
        loaded = load_model(copy.deepcopy(self.target), tokenizer=self.tokenizer)
        self.engines.append(Engine(loaded, kv_budget, chunk))
        return self.engines[-1]

    def ar(self, engine: Engine | None = None) -> LocalDecoder:
        return load_decoder("ar", engine=engine or self.engine())

    def speculative(
        self, name: str, draft: Any, engine: Engine | None = None, kv_budget: int | None = None, **options: Any
    ) -> LocalDecoder:
        """`draft` is one of DRAFTS, or a model. `kv_budget` is the draft's."""
        engine = engine or self.engine()
        drafter = self.drafter(draft, engine, kv_budget)
        decoder = load_decoder(name, engine=engine, draft=drafter, **options)
        self.decoders.append(decoder)
        return decoder

    def drafter(self, draft: Any, engine: Engine, kv_budget: int | None) -> Drafter:
        if draft == "chain":
            return DrafterChain([self.drafter("lookup", engine, None), self.drafter("near", engine, kv_budget)])
        model = self.model(draft) if isinstance(draft, str) else draft
        if model is None or kv_budget is None:
            self.drafters.append(make_drafter(model, engine))
        else:
            self.drafters.append(ModelDrafter(load_model(model, tokenizer=self.tokenizer), kv_budget))
        return self.drafters[-1]

    def model(self, draft: str) -> Any:
        """A draft model: a copy of the target, one that is often right, or one that knows nothing of it."""
        if draft == "lookup":
            return None
        model = copy.deepcopy(self.target)
        generator = torch.Generator().manual_seed(5)
        for weight in model.parameters() if draft != "same" else ():
            noise = torch.randn(weight.shape, generator=generator)
            weight.data = weight + noise * 0.02 if draft == "near" else noise * 0.3
        return model

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
            assert engine.tree.live == 0
        for decoder in self.decoders:
            decoder.close()
        for drafter in self.drafters:
            if isinstance(drafter, ModelDrafter):
                assert drafter.runner.tree.live == 0


@pytest.fixture
def bench(request: pytest.FixtureRequest, make_model: Callable[..., Any], tokenizer: Any) -> Iterator[Bench]:
    family = getattr(request, "param", "llama")
    made = Bench(make_model(family, readable=True), tokenizer)
    yield made
    made.close()


families = pytest.mark.parametrize("bench", ["llama", "qwen2"], indirect=True)


def mixed_requests(count: int, seed: int) -> list[Request]:
    """Prompts that share beginnings or do not, of all lengths, with stops, several samples, triggers and choices."""
    rng = random.Random(seed)
    requests = []
    for i in range(count):
        prompt = rng.choice(["", LONG[: rng.randint(1, len(LONG))], LONG, "10 "]) + rng.choice(["and", " 10", "abc"])
        heat = rng.choice([0.0, 0.6, 1.0])
        kind = rng.choice(["plain", "plain", "plain", "trigger", "choices", "both"])
        sampling = Sampling(
            max_tokens=rng.choice([1, 2, rng.randint(3, 24), 40]),
            temperature=heat,
            top_p=rng.choice([0.9, 1.0]),
            top_k=rng.choice([0, 0, 5]),
            stop=rng.choice([(), (), (" t", "on"), ("a", "10", "e")]),
            seed=rng.choice([7, i]),
            n=1 if kind == "choices" else rng.choice([1, 1, 2, 3]),
            ignore_eos=rng.random() < 0.4,
        )
        more: dict[str, Any] = {}
        if kind in ("trigger", "both"):
            more |= {"answer_trigger": " So the answer is", "answer_tokens": rng.randint(1, 9)}
        if kind in ("choices", "both"):
            more |= {"choices": ("1", "10", " the"), "close_choices": rng.random() < 0.5}
        requests.append(Request(prompt=prompt, sampling=sampling, **more))
    return requests


def exact(completions: Sequence[Completion]) -> list[tuple[Any, ...]]:
    return [
        (c.tokens, c.text, c.finish_reason, c.parts, [score.tokens for score in c.choice_logprobs]) for c in completions
    ]


def scores(completions: Sequence[Completion]) -> list[float]:
    return [score for c in completions for score in (c.logprob, *(choice.total for choice in c.choice_logprobs))]


def assert_same(got: Sequence[Completion], expected: Sequence[Completion]) -> None:
    assert exact(got) == exact(expected)
    assert scores(got) == pytest.approx(scores(expected), abs=1e-4)


def plain(prompt: str = "abc", **settings: Any) -> Request:
    return Request(prompt=prompt, sampling=Sampling(**{"ignore_eos": True, **settings}))


def drafted(completions: Sequence[Completion]) -> int:
    return sum(completion.usage.drafted for completion in completions)


def accepted(completions: Sequence[Completion]) -> int:
    return sum(completion.usage.accepted for completion in completions)


# -- the same tokens -------------------------------------------------------------------------------


@families
@named
def test_all_drafts_equal_ar(bench: Bench, name: str, options: dict[str, Any]) -> None:
    requests = mixed_requests(16, seed=1)
    expected = bench.ar().generate(requests)
    for draft in DRAFTS:
        got = bench.speculative(name, draft, **options).generate(requests)
        assert_same(got, expected)
        assert accepted(got) < drafted(got) or draft == "same" or options.get("adapt", name == "seed")
    assert {completion.finish_reason for completion in expected} == {"stop", "eos", "length"}
    assert {len(completion.parts) for completion in expected} == {1, 3}


@pytest.mark.parametrize(("kv_budget", "chunk"), [(480, 512), (480, 9), (3000, 1)])
@pytest.mark.parametrize("draft", ["lookup", "near"])
def test_eviction_and_chunks_change_nothing(bench: Bench, draft: str, kv_budget: int, chunk: int) -> None:
    requests = mixed_requests(24, seed=2)
    roomy = bench.engine()
    expected = bench.ar(roomy).generate(requests)
    assert roomy.tree.stored > 480
    engine = bench.engine(kv_budget, chunk)
    decoder = bench.speculative("mcsd", draft, engine, k_config=(3, 2, 1))
    for _ in range(2):
        assert_same(decoder.generate(requests), expected)
    assert engine.tree.peak_live <= kv_budget


def test_alone_or_packed_in_any_order_a_request_gets_the_same(bench: Bench) -> None:
    requests = mixed_requests(16, seed=3)
    decoder = bench.speculative("mcsd", "near")
    alone = [decoder.generate([request]) for request in requests]
    for seed in range(3):
        order = random.Random(seed).sample(range(16), 16)
        handles = bench.speculative("mcsd", "near").submit([requests[i] for i in order])
        for i, handle in zip(order, handles, strict=True):
            assert_same(handle.result(30), alone[i])


@pytest.mark.parametrize(
    ("name", "draft", "options"), [("sd", "near", {}), ("sd", "lookup", {}), ("mcsd", "far", {"k_config": (5, 4, 1)})]
)
def test_the_least_store_that_admits_a_request_is_enough(
    bench: Bench, name: str, draft: str, options: dict[str, Any]
) -> None:
    short = plain("abc the and", max_tokens=12, n=3, temperature=1.0, seed=3)
    answered = short.model_copy(update={"answer_trigger": " So", "answer_tokens": 7})
    for request in (short, answered):
        with pytest.raises(RequestError, match="this request may need") as refused:
            bench.speculative(name, draft, bench.engine(9), **options).submit([request])
        engine = bench.engine(int(str(refused.value).split("may need ")[1].split()[0]))
        got = bench.speculative(name, draft, engine, **options).generate([request])
        assert_same(got, bench.ar().generate([request]))


def test_samples_that_end_at_different_times_leave_the_others_alone(bench: Bench) -> None:
    requests = [plain(max_tokens=size, n=2, temperature=1.0, seed=4) for size in range(1, 16)]
    expected = bench.ar().generate(requests)
    decoder = bench.speculative("sd", "near", k=3)
    got = decoder.generate(requests)
    assert_same(got, expected)
    assert len({completion.usage.forwards for completion in got}) > 4


# -- what ends a text inside a draft ---------------------------------------------------------------


def rationale(bench: Bench, at: int, **settings: Any) -> tuple[str, Completion]:
    """Two characters that the model writes first from about token `at` on, and the text without that stop."""
    (free,) = bench.ar().generate([plain(max_tokens=24, **settings)])
    head = len(bench.engines[0].codec.decode(free.tokens[:at]))
    begins = next(i for i in range(head, len(free.text) - 1) if free.text.find(free.text[i : i + 2]) == i)
    return free.text[begins : begins + 2], free


@pytest.mark.parametrize("at", range(8, 15))
@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_a_stop_string_inside_an_accepted_draft_cuts_the_text(bench: Bench, at: int, heat: float) -> None:
    stop, free = rationale(bench, at, temperature=heat)
    request = plain(max_tokens=24, temperature=heat, stop=(stop,))
    expected = bench.ar().generate([request])
    got = bench.speculative("sd", "same", k=6).generate([request])
    assert_same(got, expected)
    assert got[0].finish_reason == "stop"
    assert got[0].text == free.text[: free.text.index(stop)]
    ended_inside = len(got[0].tokens) % 7 != 0
    assert (accepted(got) < drafted(got)) == ended_inside
    with_answer = request.model_copy(update={"answer_trigger": " So", "answer_tokens": 9})
    assert_same(bench.speculative("sd", "same", k=6).generate([with_answer]), bench.ar().generate([with_answer]))


def test_stops_are_met_inside_drafts_at_every_depth(bench: Bench) -> None:
    """The test above would say nothing if every text ended with its draft."""
    lengths = set()
    for at in range(8, 15):
        stop, _ = rationale(bench, at)
        lengths |= {len(one.tokens) % 7 for one in bench.ar().generate([plain(max_tokens=24, stop=(stop,))])}
    assert len(lengths - {0}) >= 3


@pytest.mark.parametrize("k", range(1, 7))
def test_an_end_token_inside_a_draft_ends_the_text_unless_ignored(bench: Bench, k: int) -> None:
    prompts = ("abc", "the", "10 and", LONG)
    requests = [plain(p, max_tokens=200, ignore_eos=False, temperature=1.0, seed=2) for p in prompts]
    expected = bench.ar().generate(requests)
    got = bench.speculative("sd", "same", k=k).generate(requests)
    assert_same(got, expected)
    assert [completion.finish_reason for completion in got] == ["eos"] * 4
    assert [c.usage.accepted < c.usage.drafted for c in got] == [len(c.tokens) % (k + 1) != 0 for c in got]
    size = len(expected[0].tokens) + 9
    ignoring = plain(max_tokens=size, temperature=1.0, seed=2)
    (longer,) = bench.speculative("sd", "same", k=k).generate([ignoring])
    assert (longer.finish_reason, longer.tokens[: size - 9]) == ("length", expected[0].tokens)
    assert_same([longer], bench.ar().generate([ignoring]))


@named
def test_one_token_is_not_drafted(bench: Bench, name: str, options: dict[str, Any]) -> None:
    (got,) = bench.speculative(name, "same", **options).generate([plain(max_tokens=1)])
    assert (got.usage.drafted, got.usage.accepted, got.usage.forwards) == (0, 0, 1)
    assert_same([got], bench.ar().generate([plain(max_tokens=1)]))


def test_a_draft_may_reach_the_end_of_the_context(bench: Bench) -> None:
    prompt = tuple(random.Random(0).choices(range(3, 270), k=1000))
    request = Request(prompt=prompt, sampling=Sampling(max_tokens=100, ignore_eos=True))
    (got,) = bench.speculative("sd", "same", k=4).generate([request])
    assert (len(got.tokens), got.finish_reason, got.usage.forwards) == (24, "length", 5)
    assert_same([got], bench.ar().generate([request]))


# -- how many forwards -----------------------------------------------------------------------------


@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize(
    ("name", "options"),
    [(name, options) for name, options in METHODS if "k" in options or "k_config" in options],
    ids=lambda value: str(value).strip("{}"),
)
def test_a_perfect_draft_is_accepted_whole(bench: Bench, name: str, options: dict[str, Any], heat: float) -> None:
    depth = options.get("k") or len(options["k_config"])
    decoder = bench.speculative(name, "same", **options)
    (got,) = decoder.generate([plain(LONG, max_tokens=23, temperature=heat)])
    assert got.usage.forwards == decoder.engine.forwards == math.ceil(23 / (depth + 1))
    assert got.usage.accepted == 23 - got.usage.forwards
    if name == "sd":
        assert got.usage.drafted == got.usage.accepted


def test_more_candidates_are_accepted_more_often(bench: Bench) -> None:
    requests = [plain(max_tokens=60, temperature=1.0, seed=seed) for seed in range(4)]
    shares = []
    for config in ((1, 1), (2, 1), (4, 1), (8, 2)):
        got = bench.speculative("mcsd", "near", k_config=config).generate(requests)
        shares.append(accepted(got))
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]


@pytest.mark.parametrize("draft", DRAFTS)
def test_each_forward_gives_the_accepted_tokens_and_one_more(bench: Bench, draft: str) -> None:
    requests = [plain(p, max_tokens=40, temperature=t, n=2) for p in ("abc", LONG) for t in (0.0, 0.6, 1.0)]
    decoder = bench.speculative("sd", draft)
    got = decoder.generate(requests)
    for usage in (completion.usage for completion in got):
        assert usage.new_tokens == usage.forwards + usage.accepted == 40
        assert usage.accepted <= usage.drafted <= 4 * usage.forwards
    assert decoder.engine.forwards == max(completion.usage.forwards for completion in got)
    share = accepted(got) / drafted(got)
    bounds = {"lookup": (0.01, 0.9), "same": (1, 1), "near": (0.1, 0.9), "far": (0, 0.1), "chain": (0.05, 0.9)}
    assert bounds[draft][0] <= share <= bounds[draft][1]


# -- in company ------------------------------------------------------------------------------------


def test_methods_that_share_an_engine_share_its_forwards_too(bench: Bench) -> None:
    requests = [plain(p, max_tokens=30, temperature=t, n=2) for p in ("abc", LONG) for t in (0.0, 1.0)]
    requests += mixed_requests(8, seed=5)
    expected = bench.ar().generate(requests)
    engine = bench.engine(6000)
    decoders = [
        bench.ar(engine),
        bench.speculative("sd", "near", engine),
        bench.speculative("mcsd", "far", engine),
        bench.speculative("sd", "lookup", engine, k=6),
    ]
    handles = [decoder.submit(requests) for decoder in decoders]
    results = [[completion for handle in some for completion in handle.result(60)] for some in handles]
    for got in results:
        assert_same(got, expected)
    assert [drafted(got) > 0 for got in results] == [False, True, True, True]
    assert engine.forwards < 2 * max(completion.usage.forwards for completion in expected)


@pytest.mark.parametrize("draft", ["same", "near", "lookup"])
def test_streamed_pieces_are_the_text(bench: Bench, draft: str) -> None:
    requests = mixed_requests(12, seed=6)
    expected = iter(bench.ar().generate(requests))
    for request, handle in zip(requests, bench.speculative("sd", draft).submit(requests, stream=True), strict=True):
        texts = [""] * request.sampling.n
        for sample, piece in handle:
            texts[sample] += piece
        assert texts == [next(expected).text for _ in texts]


@pytest.mark.parametrize("draft", ["near", "lookup"])
def test_cancelling_gives_all_slots_back_and_leaves_others_alone(bench: Bench, draft: str) -> None:
    endless = plain(LONG + "x", max_tokens=800, n=2, temperature=1.0)
    other = plain(LONG + "y", max_tokens=60, temperature=1.0)
    decoder = bench.speculative("mcsd", draft)
    (cancelled,), (kept,) = decoder.submit([endless], stream=True), decoder.submit([other])
    next(iter(cancelled))
    cancelled.cancel()
    completions = cancelled.result(30)
    assert [completion.finish_reason for completion in completions] == ["cancelled"] * 2
    free = bench.ar().generate([endless, other])
    for got, whole in zip(completions, free, strict=False):
        assert 0 < len(got.tokens) < 800
        assert got.tokens == whole.tokens[: len(got.tokens)]
    assert_same(kept.result(30), free[2:])  # the fixture sees that no slot is left in either tree


@pytest.mark.parametrize(
    ("budget", "tokens"), [(Budget(tokens=11), 15), (Budget(forwards=3), 15), (Budget(tokens=0), 0)]
)
def test_a_reached_limit_ends_a_text_as_budget(bench: Bench, budget: Budget, tokens: int) -> None:
    """Limits are looked at between forwards: the one that reaches it still gives all of its five tokens."""
    meter = Meter(budget)
    (handle,) = bench.speculative("sd", "same", k=4).submit([plain(max_tokens=50)], meter)
    (got,) = handle.result(30)
    assert (got.finish_reason, len(got.tokens)) == ("budget", tokens)
    assert got.tokens == bench.ar().generate([plain(max_tokens=50)])[0].tokens[:tokens]
    assert (meter.new_tokens, meter.forwards) == (tokens, tokens // 5)
