"""SEED: the queue of drafts and its order, who drafts where, and how much is drafted as it pays."""

from __future__ import annotations

import copy
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tot.decoders import (
    Completion,
    Engine,
    LocalDecoder,
    ModelError,
    OptionError,
    Request,
    RequestError,
    Sampling,
    load_decoder,
    load_model,
)
from tot.decoders.drafters import Context, Draft, LookupDrafter, ModelDrafter
from tot.decoders.engine.timeline import Timeline
from tot.decoders.outlook import Costs
from tot.decoders.seed import Rounds, Scheduled, SEEDOptions

LONG = "The sum of 10 and 11 is in the range on and on, and the other one: "
ROUNDS: dict[str, Any] = {"policy": "rounds", "adapt": False, "k_config": (2, 1)}


class Watched(LookupDrafter):
    """Looks up, and keeps who asked for what in which thread. Fails or waits where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, list[int]]] = []
        """(key, text), draft by draft."""
        self.ended: list[int] = []
        self.threads: set[str] = set()
        self.fails = False
        self.go_on = threading.Event()
        self.go_on.set()
        self.closed = False

    def draft(self, contexts: Sequence[Context], outlook: Any = None) -> list[Draft]:
        self.threads.add(threading.current_thread().name)
        self.asked += [(context.key, list(context.tokens)) for context in contexts]
        self.go_on.wait(30)
        if self.fails:
            raise ZeroDivisionError("no draft today")
        return super().draft(contexts, outlook)

    def end(self, key: int) -> None:
        self.threads.add(threading.current_thread().name)
        self.ended.append(key)
        super().end(key)

    def close(self) -> None:
        self.closed = True


@dataclass
class Bench:
    """One target; engines on copies of it. All slots must be free at the end, a draft's too."""

    target: Any
    tokenizer: Any
    engines: list[Engine] = field(default_factory=list)
    drafters: list[ModelDrafter] = field(default_factory=list)
    decoders: list[LocalDecoder] = field(default_factory=list)

    def engine(self, kv_budget: int = 4000) -> Engine:
        self.engines.append(Engine(load_model(copy.deepcopy(self.target), tokenizer=self.tokenizer), kv_budget))
        return self.engines[-1]

    def model_drafter(self, noise: float = 0.0) -> ModelDrafter:
        """Drafts with the target itself, or with what some noise leaves of it."""
        model = copy.deepcopy(self.target)
        generator = torch.Generator().manual_seed(5)
        for weight in model.parameters():
            weight.data = weight + torch.randn(weight.shape, generator=generator) * noise
        self.drafters.append(ModelDrafter(load_model(model, tokenizer=self.tokenizer), 4000))
        return self.drafters[-1]

    def seed(self, draft: Any = None, engine: Engine | None = None, **options: Any) -> LocalDecoder:
        decoder = load_decoder("seed", engine=engine or self.engine(), draft=draft, **options)
        self.decoders.append(decoder)
        return decoder

    def expected(self, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        return [completion.tokens for completion in load_decoder(engine=self.engine()).generate(requests)]

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
            assert engine.tree.live == 0
        for decoder in self.decoders:
            decoder.close()
        for drafter in self.drafters:
            assert drafter.runner.tree.live == 0


@pytest.fixture
def bench(make_model: Callable[..., Any], tokenizer: Any) -> Iterator[Bench]:
    made = Bench(make_model(readable=True), tokenizer)
    yield made
    made.close()


def plain(prompt: str = "abc", **settings: Any) -> Request:
    return Request(prompt=prompt, sampling=Sampling(**{"ignore_eos": True, **settings}))


def branches(count: int, tokens: int = 20) -> list[Request]:
    return [plain(LONG + str(i), max_tokens=tokens, temperature=0.6, seed=i) for i in range(count)]


def drafted(completions: Sequence[Completion]) -> int:
    return sum(completion.usage.drafted for completion in completions)


def accepted(completions: Sequence[Completion]) -> int:
    return sum(completion.usage.accepted for completion in completions)


def results(handles: Sequence[Any]) -> list[Completion]:
    return [completion for handle in handles for completion in handle.result(30)]


# -- first come, first served, by a scripted clock -------------------------------------------------


class Script(Executor):
    """Drafts take scripted times, on a clock that a verification moves on by one.

    It sees a verification by what comes after it: the next draft of the same text, or the text's end. Where nothing is
    left to verify, time passes until the next draft is finished.
    """

    def __init__(self, seconds: Callable[[int, int], float]) -> None:
        self._seconds = seconds
        """By text and draft, both counted from 0."""
        self.now = 0.0
        self.drafting: dict[int, tuple[float, Callable[[], None]]] = {}
        """By key: when its draft will be finished, and what finishes it."""
        self.queued: list[int] = []
        self.finished: list[int] = []
        """Keys, in the order in which their drafts were finished."""
        self.number: dict[int, int] = {}
        self._drafts: Counter[int] = Counter()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        key, is_draft = args[0], len(args) == 2
        if key in self.queued:  # it was verified
            self.queued.remove(key)
            self.now += 1.0
        if is_draft:
            assert key not in self.drafting, "a second draft of a text whose first is not finished"
            number = self.number.setdefault(key, len(self.number))
            self.drafting[key] = (
                self.now + self._seconds(number, self._drafts[key]),
                lambda: future.set_result(fn(*args)),
            )
            self._drafts[key] += 1
        else:
            assert key not in self.drafting
            future.set_result(fn(*args))
        self._finish()
        return future

    def _finish(self) -> None:
        while self.drafting:
            key = min(self.drafting, key=lambda key: self.drafting[key][0])
            due, finish = self.drafting[key]
            if due > self.now and self.queued:
                return
            self.now = max(self.now, due)
            del self.drafting[key]
            self.finished.append(key)
            self.queued.append(key)
            finish()


def scripted(bench: Bench, requests: Sequence[Request], script: Script, drafter: Any) -> tuple[list[int], Any]:
    """The keys in the order in which their drafts were verified, and the tokens decoded."""
    engine = bench.engine()
    engine.timeline = Timeline(clock=lambda: script.now)
    rounds = Rounds(drafter, SEEDOptions(**ROUNDS), engine, executor=script)
    handles = engine.submit_all(requests, [partial(Scheduled, companion=rounds)] * len(requests))
    tokens = [completion.tokens for completion in results(handles)]
    rounds.close()
    spans = [span for span in engine.timeline.spans if span.branch is not None and span.kind == "verify"]
    return [span.branch for span in spans if span.branch is not None], tokens


def one_slow(text: int, draft: int) -> float:
    return 200.0 if text == 2 else 0.1


def slower_and_slower(text: int, draft: int) -> float:
    return 0.3 * (text + 1) * (draft + 1)


def any_time(text: int, draft: int) -> float:
    return random.Random(100 * text + draft).expovariate(0.3)


def all_at_once(text: int, draft: int) -> float:
    return 0.0


@pytest.mark.parametrize("seconds", [one_slow, slower_and_slower, any_time, all_at_once])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_drafts_are_verified_in_the_order_in_which_they_were_finished(
    bench: Bench, seconds: Callable[[int, int], float], noise: float
) -> None:
    script = Script(seconds)
    requests = branches(5)
    verified, tokens = scripted(bench, requests, script, bench.model_drafter(noise))
    assert verified == script.finished
    assert tokens == bench.expected(requests)
    assert len({*verified}) == 5


@pytest.mark.parametrize("seconds", [one_slow, any_time, all_at_once])
def test_no_draft_waits_for_more_verifications_than_there_are_other_branches(
    bench: Bench, seconds: Callable[[int, int], float]
) -> None:
    script = Script(seconds)
    finished_after: dict[int, list[int]] = {}
    verifications: list[int] = []
    engine = bench.engine()
    rounds = Rounds(bench.model_drafter(0.02), SEEDOptions(**ROUNDS), engine, executor=script)

    class Seen(Scheduled):
        def take(self, strand: Any, rows: Any) -> None:
            verifications.append(self.keys[strand.output.index])
            super().take(strand, rows)

    enqueue = rounds._enqueue

    def noted(key: int, future: Any) -> None:
        finished_after.setdefault(key, []).append(len(verifications))
        enqueue(key, future)

    rounds._enqueue = noted  # type: ignore[method-assign]
    requests = [plain(LONG, max_tokens=18, temperature=1.0, n=2), *branches(4)]
    results(engine.submit_all(requests, [partial(Seen, companion=rounds)] * len(requests)))
    rounds.close()
    waits = []
    for key, finished in finished_after.items():
        turns = [turn for turn, whose in enumerate(verifications) if whose == key]
        waits += [turn - after for turn, after in zip(turns, finished, strict=True)]
    assert min(waits) >= 0
    assert max(waits) <= 5  # of six branches
    assert max(waits) >= 3  # there was something to wait for


def test_a_slow_branch_keeps_no_other_from_its_end(bench: Bench) -> None:
    script = Script(one_slow)
    verified, _ = scripted(bench, branches(4), script, bench.model_drafter(0.3))
    slow = next(key for key, number in script.number.items() if number == 2)
    first = verified.index(slow)
    assert verified[first:] == [slow] * (len(verified) - first)
    assert set(verified[:first]) == set(script.number) - {slow}


def test_a_branch_never_drafts_past_what_is_not_verified(bench: Bench) -> None:
    """Every text that is drafted for is one that the target has written, longer than when it was last asked for."""
    for overlap in (False, True):
        watched = Watched()
        requests = branches(6)
        got = bench.seed(watched, **ROUNDS, overlap=overlap).generate(requests)
        written = [tuple(bench.engines[-1].codec.encode_prompt(request.prompt)) for request in requests]
        texts = [prompt + one.tokens for prompt, one in zip(written, got, strict=True)]
        asked: dict[int, list[list[int]]] = {}
        for key, text in watched.asked:
            asked.setdefault(key, []).append(text)
        assert len(asked) == 6
        for (key, growing), whole in zip(sorted(asked.items()), texts, strict=True):
            assert all(tuple(text) == whole[: len(text)] for text in growing), key
            assert all(len(before) < len(after) for before, after in itertools.pairwise(growing))


# -- threads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("overlap", "thread"), [(True, "tot-draft_0"), (False, "tot-engine")])
def test_who_drafts(bench: Bench, overlap: bool, thread: str) -> None:
    watched = Watched()
    decoder = bench.seed(watched, **ROUNDS, overlap=overlap)
    decoder.generate(branches(3))
    decoder.close()
    assert watched.threads == {thread}
    assert len({*watched.ended}) == 3


def test_finished_drafts_queue_up_while_the_target_is_at_work(bench: Bench) -> None:
    decoder = bench.seed(Watched(), **ROUNDS)
    timeline = decoder.engine.timeline = Timeline()
    requests = branches(8, tokens=40)
    assert [completion.tokens for completion in decoder.generate(requests)] == bench.expected(requests)
    decoder.close()
    lengths = [length for _, length in timeline.queue]
    assert 1 < max(lengths) <= 8
    assert min(lengths) == 0
    verified = [span for span in timeline.spans if span.branch is not None and span.kind == "verify"]
    drafts = [span for span in timeline.spans if span.kind == "draft"]
    assert len({span.branch for span in verified}) == len({span.branch for span in drafts}) == 8
    assert any(draft.began < one.ended and one.began < draft.ended for draft in drafts for one in verified)
    assert all(after.began >= before.ended for before, after in itertools.pairwise(verified))  # one at a time


def test_without_overlap_nothing_is_drafted_while_the_target_is_at_work(bench: Bench) -> None:
    decoder = bench.seed(Watched(), **ROUNDS, overlap=False)
    timeline = decoder.engine.timeline = Timeline()
    decoder.generate(branches(4))
    forwards = [span for span in timeline.spans if span.lane == "target"]
    drafts = [span for span in timeline.spans if span.kind == "draft"]
    assert not any(draft.began < one.ended and one.began < draft.ended for draft in drafts for one in forwards)


# -- ends, cancelling, failing, closing ------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_requests_that_end_at_different_times_leave_the_others_alone(bench: Bench, overlap: bool) -> None:
    requests = [plain(max_tokens=size, n=2, temperature=1.0, seed=4) for size in range(1, 12)]
    got = bench.seed(bench.model_drafter(0.02), **ROUNDS, overlap=overlap).generate(requests)
    assert [completion.tokens for completion in got] == bench.expected(requests)
    assert len({completion.usage.forwards for completion in got}) > 3


def test_a_forward_counts_for_those_whose_turn_it_was(bench: Bench) -> None:
    decoder = bench.seed(Watched(), **ROUNDS)
    got = decoder.generate(branches(5))
    for usage in (completion.usage for completion in got):
        assert usage.forwards + usage.accepted == usage.new_tokens == 20
    assert decoder.engine.forwards == sum(completion.usage.forwards for completion in got)


@pytest.mark.parametrize("overlap", [True, False])
def test_cancelling_leaves_the_others_alone(bench: Bench, overlap: bool) -> None:
    decoder = bench.seed(bench.model_drafter(0.02), **ROUNDS, overlap=overlap)
    endless = plain(LONG, max_tokens=800, n=3, temperature=1.0)
    (cancelled,) = decoder.submit([endless], stream=True)
    kept = decoder.submit(branches(3, tokens=40))
    next(iter(cancelled))
    cancelled.cancel()
    assert {completion.finish_reason for completion in cancelled.result(30)} == {"cancelled"}
    assert 0 < sum(len(completion.tokens) for completion in cancelled.result()) < 3 * 800
    assert [completion.tokens for completion in results(kept)] == bench.expected(branches(3, tokens=40))


def test_cancelling_a_request_whose_draft_is_being_made(bench: Bench) -> None:
    watched = Watched()
    watched.go_on.clear()
    decoder = bench.seed(watched, **ROUNDS)
    cancelled = decoder.submit(branches(3))
    while not watched.asked:
        time.sleep(0.001)
    for handle in cancelled:
        handle.cancel()
    watched.go_on.set()
    assert {completion.finish_reason for completion in results(cancelled)} == {"cancelled"}
    again = [completion.tokens for completion in decoder.generate(branches(3))]
    assert again == bench.expected(branches(3))


@pytest.mark.parametrize("options", [ROUNDS, {**ROUNDS, "overlap": False}, {"policy": "packed"}])
def test_a_drafter_that_fails_fails_its_requests_only(bench: Bench, options: dict[str, Any]) -> None:
    watched = Watched()
    decoder = bench.seed(watched, **options)
    other = load_decoder(engine=decoder.engine)
    running = other.submit(branches(2, tokens=100))
    watched.fails = True
    for handle in decoder.submit(branches(3)):
        with pytest.raises(ModelError, match="decoding failed: ZeroDivisionError: no draft today"):
            handle.result(30)
    assert [completion.tokens for completion in results(running)] == bench.expected(branches(2, tokens=100))
    watched.fails = False
    assert [one.tokens for one in results(decoder.submit(branches(3)))] == bench.expected(branches(3))


def test_closing_ends_the_thread_and_the_drafter(bench: Bench) -> None:
    watched = Watched()
    decoder = bench.seed(watched, **ROUNDS)
    decoder.generate(branches(2))
    decoder.close()
    assert watched.closed
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("tot-draft")]
    with pytest.raises(RequestError, match="this decoder is closed: make a new one"):
        results(decoder.submit(branches(1)))


def test_closing_while_requests_run_cancels_them(bench: Bench, make_model: Callable[..., Any]) -> None:
    watched = Watched()
    decoder = load_decoder("seed", make_model(), tokenizer=bench.tokenizer, kv_budget=4000, draft=watched, **ROUNDS)
    handles = decoder.submit([plain(LONG, max_tokens=900, seed=i) for i in range(3)], stream=True)
    next(iter(handles[0]))
    decoder.close()
    assert {completion.finish_reason for completion in results(handles)} == {"cancelled"}
    assert decoder.engine.tree.live == 0
    assert len({*watched.ended}) == 3
    assert watched.closed
    with pytest.raises(RequestError, match="closed"):
        decoder.submit(branches(1))


@pytest.mark.parametrize("overlap", [True, False])
def test_closing_a_decoder_leaves_a_shared_engine_to_the_others(bench: Bench, overlap: bool) -> None:
    """Its own requests that run can't go on; those of other decoders can."""
    engine = bench.engine()
    decoder = bench.seed(Watched(), engine, **ROUNDS, overlap=overlap)
    other = load_decoder(engine=engine)
    kept = other.submit(branches(2, tokens=150))
    lost = decoder.submit([plain(LONG, max_tokens=900)], stream=True)
    next(iter(lost[0]))
    decoder.close()
    with pytest.raises((RequestError, ModelError), match=r"this decoder is closed|after shutdown"):
        lost[0].result(30)
    assert [completion.tokens for completion in results(kept)] == bench.expected(branches(2, tokens=150))
    assert [completion.tokens for completion in other.generate(branches(2))] == bench.expected(branches(2))


# -- in company ------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_choices_and_answers_in_rounds_beside_other_methods(bench: Bench, overlap: bool) -> None:
    choices = ("1", "10", " the")
    sampling = Sampling(max_tokens=12, temperature=1.0, ignore_eos=True)
    requests = [
        Request(prompt="abc", choices=choices),
        Request(prompt="abc", sampling=sampling, answer_trigger=" So", answer_tokens=6),
        Request(prompt=LONG, sampling=sampling.model_copy(update={"n": 3}), answer_trigger=" So", choices=choices),
        *branches(3),
    ]
    expected = load_decoder(engine=bench.engine()).generate(requests)
    engine = bench.engine(8000)
    decoders = [
        bench.seed(bench.model_drafter(0.02), engine, **ROUNDS, overlap=overlap),
        load_decoder(engine=engine),
        bench.seed(None, engine),
        bench.seed(Watched(), engine, **ROUNDS, overlap=overlap),
        load_decoder("mcsd", engine=engine),
    ]
    handles = [decoder.submit(requests) for decoder in decoders]
    for some in handles:
        got = results(some)
        assert [one.tokens for one in got] == [one.tokens for one in expected]
        assert [one.text for one in got] == [one.text for one in expected]
        for one, like in zip(got, expected, strict=True):
            scores = [[choice.total for choice in which.choice_logprobs] for which in (one, like)]
            assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_choices_alone_need_no_draft(bench: Bench) -> None:
    watched = Watched()
    requests = [Request(prompt=prompt, choices=("1", "10")) for prompt in ("abc", LONG)]
    got = results(bench.seed(watched, **ROUNDS).submit(requests))
    assert [len(one.choice_logprobs) for one in got] == [2, 2]
    assert watched.asked == []


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k_config": (2, 0)}, "option k_config: .*greater than or equal to 1"),
        ({"k_config": "2,-1"}, "option k_config: .*greater than or equal to 1"),
        ({"k_config": ()}, "option k_config: .*at least 1 item"),
        ({"k_config": "two"}, "option k_config: .*valid integer"),
        ({"k_config": (65,)}, "option k_config: .*less than or equal to 64"),
        ({"k_config": 3}, "option k_config: .*valid tuple"),
        ({"rule": "leviathan"}, "knows one candidate a position: give k_config=1,1,1, or rule=mcsd"),
        ({"rule": "leviathan", "k_config": (1, 2)}, "knows one candidate a position"),
        ({"rule": "leviathan", "k_config": (1,), "replacement": True}, "knows one candidate a position"),
        ({"rule": "strict"}, "option rule: .*'coupled', 'leviathan' or 'mcsd'"),
        ({"policy": "all"}, "option policy: .*'packed' or 'rounds'"),
        ({"overlap": False}, "overlap is for policy=rounds: leave it out"),
        ({"replacement": True}, "replacement is for rejection rules: .*give a rule other than coupled"),
        ({"draft_temperature": 0.5}, "draft_temperature is for rejection rules"),
        ({"draft_temperature": -1, "rule": "mcsd"}, "option draft_temperature: .*greater than or equal to 0"),
        ({"k": 3}, r"option k: .* \(its options: .*policy, overlap, adapt, k_config"),
    ],
)
def test_bad_options_are_named(bench: Bench, options: dict[str, Any], message: str) -> None:
    engine = bench.engine()
    with pytest.raises(OptionError, match=f"decoder seed.*{message}"):
        load_decoder("seed", engine=engine, **options)


def test_k_config_may_be_text(bench: Bench) -> None:
    (got,) = bench.seed(bench.model_drafter(), k_config="3,1,1", adapt=False).generate([plain(max_tokens=40)])
    assert (got.usage.forwards, got.usage.drafted) == (10, 90)


# -- drafting as it pays ---------------------------------------------------------------------------

CHEAP = (Costs((1, 64), (0.01, 0.03)), Costs((1, 64), (0.001, 0.002)))
"""Seconds of the target and of the draft by rows: what tiny models take on some machine is another matter."""


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every target and draft costs what CHEAP says, and drafting takes no longer than its forwards."""
    monkeypatch.setattr("tot.decoders.speculative.time", SimpleNamespace(perf_counter=lambda: 0.0))
    monkeypatch.setattr("tot.decoders.decoder.engine_costs", lambda engine: CHEAP[0])
    monkeypatch.setattr("tot.decoders.decoder.row_costs", lambda runner: CHEAP[1])


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("policy", ["packed", "rounds"])
def test_a_hopeless_draft_is_hardly_asked(bench: Bench, policy: str) -> None:
    requests = branches(4, tokens=60)
    got = {
        adapt: bench.seed(bench.model_drafter(0.5), policy=policy, adapt=adapt, k_config=(2, 1, 1, 1)).generate(
            requests
        )
        for adapt in (False, True)
    }
    assert drafted(got[False]) > 4 * 60 * 6
    assert drafted(got[True]) < drafted(got[False]) / 10
    assert [one.tokens for one in got[True]] == bench.expected(requests)


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("policy", ["packed", "rounds"])
def test_a_perfect_draft_is_trusted(bench: Bench, policy: str) -> None:
    requests = branches(4, tokens=80)
    got = bench.seed(bench.model_drafter(), policy=policy, k_config=(1,) * 4).generate(requests)
    assert accepted(got) == drafted(got)
    assert accepted(got) >= 0.6 * 4 * 80  # four of five tokens at best, once that is known
    assert [one.tokens for one in got] == bench.expected(requests)


@pytest.mark.usefixtures("measured")
def test_more_is_drafted_the_better_the_draft_is(bench: Bench) -> None:
    requests = branches(2, tokens=80)
    sizes = []
    for noise in (0.5, 0.02, 0.0):
        got = bench.seed(bench.model_drafter(noise)).generate(requests)
        sizes.append(drafted(got) / sum(completion.usage.forwards for completion in got))
    assert sizes == sorted(sizes)
    assert sizes[0] * 10 < sizes[2]


def test_packed_drafts_less_where_rows_are_dear(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = branches(6, tokens=60)
    counts = []
    for steep in (Costs((1, 64), (0.01, 0.011)), Costs((1, 64), (0.01, 0.64))):
        monkeypatch.setattr("tot.decoders.decoder.engine_costs", lambda engine, steep=steep: steep)
        monkeypatch.setattr("tot.decoders.decoder.row_costs", lambda runner: CHEAP[1])
        counts.append(drafted(bench.seed(bench.model_drafter(0.02)).generate(requests)))
    assert counts[0] > 100
    assert counts[1] == 0  # a row costs as much as a forward of its own


# -- the distribution ------------------------------------------------------------------------------

LENGTH = 2
HEAT = 0.7


@pytest.fixture(scope="module")
def words() -> Any:
    """A tokenizer of 16 words."""
    backend = Tokenizer(models.WordLevel({**{f"w{i}": i for i in range(15)}, "<end>": 15}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="w0")


@pytest.fixture(scope="module")
def llama() -> Callable[[int], Any]:
    """Makes a tiny random model, or what some noise leaves of it."""

    def make(noise: float = 0.0) -> Any:
        torch.manual_seed(0)
        shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = LlamaConfig(vocab_size=16, max_position_embeddings=32, initializer_range=0.6, **shape)
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
        for weight in model.parameters():
            weight += torch.randn(weight.shape) * noise
        return model

    return make


@pytest.fixture(scope="module")
def exact(llama: Any) -> dict[tuple[int, ...], float]:
    """The probability of every two tokens after "w1 w2", by the target alone."""
    model, pairs = llama(), list(itertools.product(range(16), repeat=LENGTH))
    ids = torch.tensor([[1, 2, *pair] for pair in pairs])
    with torch.inference_mode():
        logprobs = (model(ids).logits[:, 1:-1].double() / HEAT).log_softmax(-1)
    return dict(zip(pairs, logprobs.gather(2, ids[:, 2:, None])[..., 0].sum(1).exp().tolist(), strict=True))


def most(exact: dict[tuple[int, ...], float], draws: int) -> float:
    """How far an exact sampler may be from its own distribution after as many draws: mean and four deviations."""
    p = np.array(list(exact.values()))
    runs = np.random.default_rng(0).multinomial(draws, p / p.sum(), size=200)
    distances = np.abs(runs / draws - p).sum(1) / 2
    return float(distances.mean() + 4 * distances.std())


@pytest.mark.parametrize(
    ("policy", "rule", "k_config", "draws"),
    [
        ("packed", "leviathan", (1, 1), 4000),
        ("packed", "mcsd", (3, 2), 4000),
        ("rounds", "leviathan", (1, 1), 960),
        ("rounds", "mcsd", (3, 2), 960),
    ],
)
def test_drafting_as_it_pays_keeps_the_distribution(
    policy: str,
    rule: str,
    k_config: tuple[int, ...],
    draws: int,
    llama: Any,
    words: Any,
    exact: dict[tuple[int, ...], float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lengths and breadths of drafts follow from what was accepted; what comes out does not."""
    monkeypatch.setattr("tot.decoders.decoder.engine_costs", lambda engine: Costs((1, 64), (0.01, 0.013)))
    monkeypatch.setattr("tot.decoders.decoder.row_costs", lambda runner: Costs((1,), (0.001,)))
    counts: Counter[tuple[int, ...]] = Counter()
    asked = {"policy": policy, "rule": rule, "k_config": k_config, "draft": llama(0.3)}
    sampling = Sampling(max_tokens=3, temperature=HEAT, n=16, ignore_eos=True)
    sizes = set()
    with load_decoder("seed", llama(), tokenizer=words, kv_budget=40_000, **asked) as decoder:
        for seed in range(draws // sampling.n):
            request = Request(prompt="w1 w2", sampling=sampling.model_copy(update={"seed": seed}))
            got = decoder.generate([request])
            counts.update(completion.tokens[:LENGTH] for completion in got)
            sizes |= {completion.usage.drafted for completion in got}
    assert sum(abs(counts[pair] / draws - p) for pair, p in exact.items()) / 2 < most(exact, draws)
    assert len(sizes) > 1
