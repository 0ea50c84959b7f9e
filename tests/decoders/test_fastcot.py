"""FastCoT: equations 2, 4 and 5 against a naive loop, exact without a cap, with parts that report every cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tot.decoders import Completion, LocalDecoder, Message, Request, Sampling
from tot.decoders.engine.sampling import Draw, read
from tot.decoders.methods.fastcot import _question
from tot.decoders.request import Part

HEAD = "One of the others and so on, in the range.\n\n"
QUESTION = "The sum of 10 and 11 is in the"
TRIGGER = " So the answer is"
Make = Callable[..., LocalDecoder]


def make_request(**changes: Any) -> Request:
    given = {"max_tokens": 30, "ignore_eos": True, "seed": 5, **changes.pop("sampling", {})}
    return Request(
        **{
            "prompt": HEAD + QUESTION,
            "answer_trigger": TRIGGER,
            "answer_tokens": 5,
            "sampling": Sampling(**given),
            **changes,
        }
    )


def outcomes(completions: list[Completion]) -> list[Any]:
    return [(c.tokens, c.text, c.finish_reason, c.parts) for c in completions]


class Naive:
    """The paper's loop over one text, without a cache, a batch or an engine."""

    def __init__(self, decoder: LocalDecoder, logits_alone: Callable[..., torch.Tensor], request: Request) -> None:
        plain = copy.deepcopy(decoder.model)
        plain.set_attn_implementation("sdpa")
        codec = decoder.engine.codec
        self.sampling = request.sampling
        self.prompt = codec.encode_prompt(request.prompt)
        self.logits = lambda tokens: logits_alone(plain, tokens)
        question = codec.encode(QUESTION, continues=False)
        self.buffer = [question[j % len(question)] for j in range(200)]
        self.computed = 0
        self.exact: list[int] = []

    def iterate(self, window: int, sample: int) -> None:
        start = len(self.exact)
        window = min(window, self.sampling.max_tokens - start - 1)
        fed = [*self.prompt, *self.exact, *self.buffer[start : start + window]]
        rows = self.logits(fed)[len(self.prompt) + start - 1 :]
        s = self.sampling
        draws = [Draw(s.temperature, s.top_k, s.top_p, s.min_p, s.seed, sample, start + i) for i in range(window + 1)]
        drawn = [one.token for one in read(rows, draws)]
        matched = 0  # K
        while matched < window and self.buffer[start + matched] == drawn[matched]:
            matched += 1
        self.buffer[start : start + window + 1] = drawn
        self.exact += drawn[: matched + 1]
        self.computed = start + window + 1

    @property
    def glimpse(self) -> list[int]:
        return self.buffer[len(self.exact) : self.computed]


@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize(("window", "cap"), [(0, 4), (3, 1), (7, 2), (7, 9), (25, 6)])
def test_results_equal_a_naive_loop(
    make: Make, mixed: list[Request], logits_alone: Callable[..., torch.Tensor], heat: float, window: int, cap: int
) -> None:
    request = make_request(sampling={"temperature": heat, "n": 2})
    decoder = make("fastcot", window=window, cap=cap)
    crowd = [one for one in mixed if one.sampling.stop]
    got = decoder.generate([request, *crowd])[:2]
    codec = decoder.engine.codec
    for sample, completion in enumerate(got):
        naive = Naive(decoder, logits_alone, request)
        for _ in range(cap):
            naive.iterate(window, sample)
        parts = {part.kind: part for part in completion.parts[:-1]}
        assert list(completion.tokens[: parts["exact"].tokens]) == naive.exact
        assert parts["exact"].text == codec.decode(naive.exact)
        glimpse = parts.get("approximate", Part("approximate", ""))
        assert glimpse.tokens == len(naive.glimpse)
        assert glimpse.text == codec.decode(naive.glimpse)
        assert parts.get("undecoded", Part("undecoded", "")).tokens == 30 - len(naive.exact) - len(naive.glimpse)
        # The answer follows exact tokens, glimpse and trigger.
        answer = completion.tokens[parts["exact"].tokens :]
        before = [*naive.prompt, *naive.exact, *naive.glimpse, *codec.encode(TRIGGER)]
        rows = naive.logits([*before, *answer])[len(before) - 1 : -1]
        draws = [Draw(heat, 0, 1.0, 0.0, 5, sample, len(naive.exact) + i) for i in range(5)]
        assert [one.token for one in read(rows, draws)] == list(answer)


@pytest.mark.parametrize("options", [{"window": 0}, {"window": 5}, {"window": 64}, {}])
def test_without_a_cap_the_text_equals_ar(make: Make, mixed: list[Request], options: dict[str, Any]) -> None:
    requests = mixed
    assert outcomes(make("fastcot", **options).generate(requests)) == outcomes(make("ar").generate(requests))


def test_requests_without_a_trigger_and_whole_rationales_are_exact(make: Make, mixed: list[Request]) -> None:
    requests = [one.model_copy(update={"whole_rationale": True}) if one.answer_trigger else one for one in mixed]
    assert outcomes(make("fastcot", window=4, cap=2).generate(requests)) == outcomes(make("ar").generate(requests))


def test_a_cap_of_0_answers_without_a_rationale(make: Make) -> None:
    request = make_request(sampling={"n": 2})
    got = make("fastcot", cap=0).generate([request])
    direct = Request(prompt=HEAD + QUESTION + TRIGGER, sampling=Sampling(max_tokens=5, ignore_eos=True))
    (expected,) = make("ar").generate([direct])
    for one in got:
        assert [part.kind for part in one.parts] == ["exact", "undecoded", "trigger", "exact"]
        assert one.parts[1].tokens == 30
        assert one.tokens == expected.tokens
        assert one.answer == expected.text
        assert one.usage.forwards == 5


def test_choices_after_a_cut_rationale_are_scored_after_its_parts(make: Make) -> None:
    decoder = make("fastcot", window=6, cap=5, trajectory=True)
    (got,) = decoder.generate([make_request(choices=("1", "10", "abc"))])
    codec = decoder.engine.codec
    exact, glimpse = got.trajectory[-1]
    assert (len(got.trajectory), exact) == (5, len(got.tokens))
    assert len(glimpse) == next(part for part in got.parts if part.kind == "approximate").tokens > 0
    ids = (*codec.encode_prompt(HEAD + QUESTION), *got.tokens, *glimpse, *codec.encode(TRIGGER))
    (expected,) = make("ar").generate([Request(prompt=ids, choices=("1", "10", "abc"))])
    for ours, theirs in zip(got.choice_logprobs, expected.choice_logprobs, strict=True):
        assert ours.total == pytest.approx(theirs.total, abs=1e-4)


def test_without_the_glimpse_the_answer_follows_the_exact_tokens(make: Make) -> None:
    (with_it,) = make("fastcot", window=6, cap=4).generate([make_request()])
    (without,) = make("fastcot", window=6, cap=4, glimpse=False).generate([make_request()])
    assert without.parts[0] == with_it.parts[0]
    assert [part.kind for part in without.parts] == ["exact", "undecoded", "trigger", "exact"]


def test_a_glimpse_ends_before_a_stop_string_and_an_end_token(make: Make) -> None:
    (free,) = make("fastcot", window=10, cap=3).generate([make_request()])
    approximate = free.parts[1].text
    stop = approximate[len(approximate) // 2 :][:2]
    (cut,) = make("fastcot", window=10, cap=3).generate([make_request(sampling={"stop": (stop,)})])
    assert cut.parts[0] == free.parts[0]
    assert stop not in "".join(part.text for part in cut.parts if part.kind in ("exact", "approximate"))
    assert sum(part.tokens for part in cut.parts if part.kind == "approximate") < free.parts[1].tokens


def test_the_question_is_the_users_last_paragraph(make: Make) -> None:
    """The first window starts with the tokens of the question."""
    decoder = make("fastcot", window=4, cap=2)
    codec = decoder.engine.codec

    def question(prompt: Any) -> list[int]:
        return _question(SimpleNamespace(request=Request(prompt=prompt), codec=codec, prompt=[7, 8]))  # type: ignore[arg-type]

    expected = codec.encode(QUESTION, continues=False)
    chat = (Message(role="user", content=HEAD + QUESTION), Message(role="assistant", content="Well,"))
    assert question(HEAD + QUESTION) == expected
    assert question(chat) == expected
    assert question((7, 8)) == [7, 8]
    assert question("\n\n \n\n") == [7, 8]


def test_a_small_kv_budget_queues_requests_and_cancelled_ones_free_their_slots(make: Make) -> None:
    decoder = make("fastcot", window=8, cap=5, kv_budget=160)
    requests = [make_request(sampling={"seed": i}, choices=("1", "10") if i % 2 else ()) for i in range(6)]
    alone = [make("fastcot", window=8, cap=5).generate([one])[0] for one in requests]
    assert outcomes(decoder.generate(requests)) == outcomes(alone)
    handles = decoder.submit(requests)
    for handle in handles:
        handle.cancel()
    for handle in handles:
        assert handle.result(60)[0].finish_reason in ("cancelled", "length", "stop")
