"""Constrained texts: the same tokens by all lossless methods, drawn as with a mask applied by hand."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import BaseModel, Field
from scipy import stats

from tot.decoders import Completion, Constraint, Message, Request, RequestError, Sampling, load_decoder
from tot.decoders.engine.sampling import Draw, read


class Colour(BaseModel):
    name: Literal["red", "green", "the other one"]
    share: int
    parts: list[Literal["a", "b"]]


class Paint(BaseModel):
    colour_name: Literal["red", "green", "blue"]
    litres_of_paint: Annotated[int, Field(ge=1, le=99)]
    is_warm: bool


CONSTRAINTS = [
    Constraint(json_schema=Colour),
    Constraint(regex="((the|and|10|1), ?){2,9}end"),
    Constraint(choices=("the end of the story", "the end of the song", "the", "another")),
    Constraint(lark='start: "[" (item ("," item)*)? "]"\nitem: /[a-z]{1,3}/ | start'),
    None,
]
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("sd", {}),
    ("jacobi", {"adapt": False, "n": 6}),
    ("lookahead", {"adapt": False}),
    ("seed", {"adapt": False}),
    ("auto", {}),
]


def requests(tokens: int = 40) -> list[Request]:
    """All kinds of constraints, packed with a free text, greedy and as three samples."""
    return [
        Request(
            prompt=prompt,
            constraint=constraint,
            sampling=Sampling(
                max_tokens=tokens, temperature=heat, n=3 if heat else 1, top_p=0.95 if heat else 1.0, seed=5
            ),
        )
        for constraint in CONSTRAINTS
        for heat in (0.0, 1.0)
        for prompt in ("the other one and the ", '{"name": "red", "share": 10, "parts": ["a", "b"]} ')
    ]


def shown(completions: list[Completion]) -> list[Any]:
    return [(one.tokens, one.text, one.finish_reason, one.usage.forced_tokens) for one in completions]


def test_lossless_methods_agree(make: Any) -> None:
    expected = make("ar").generate(requests())
    assert any(one.usage.forced_tokens > 5 for one in expected)
    for name, options in METHODS:
        found = make(name, **options).generate(requests())
        assert shown(found) == shown(expected), name
        pairs = zip(found, expected, strict=True)
        assert all(a.logprobs == pytest.approx(b.logprobs, abs=1e-3) for a, b in pairs)


@pytest.mark.parametrize("name", ["sd", "mcsd", "seed"])
@pytest.mark.parametrize("draft", ["same", "near"])
def test_drafts_of_a_model_are_checked_against_the_mask(make_bench: Any, name: str, draft: str) -> None:
    bench = make_bench()
    expected = bench.expected(requests(24))
    options = {"adapt": False} if name == "seed" else {}
    found = bench.speculative(name, draft, **options).generate(requests(24))
    assert [one.tokens for one in found] == expected
    assert sum(one.usage.accepted for one in found) > 50


def test_tokens_are_those_of_a_mask_applied_by_hand(make_bench: Any, logits_alone: Any) -> None:
    bench = make_bench()
    decoder = bench.ar()
    codec, how = decoder.engine.codec, Sampling(max_tokens=30, temperature=1.0, seed=3)
    for constraint in CONSTRAINTS[:-1]:
        request = Request(prompt="abc ", constraint=constraint, sampling=how)
        (completion,) = decoder.generate([request])
        prompt, tokens, logprobs = codec.encode("abc ", continues=False), list[int](), list[float]()
        matcher = decoder.engine.grammars.matcher(constraint)
        while len(tokens) < 30 and not matcher.complete:
            logits = logits_alone(bench.target, [*prompt, *tokens])[-1].numpy()
            bits = np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")[: len(logits)]
            masked = np.where(bits == 1, logits, -np.inf).astype(np.float32)
            (drawn,) = read(masked[None], [Draw(1.0, 0, 1.0, 0.0, 3, 0, len(tokens))])
            forced = bits.sum() == 1
            logprobs.append(0.0 if forced else read(logits[None], [drawn.token])[0].logprob)
            tokens.append(drawn.token)
            if drawn.token in codec.end_ids:
                break
            matcher.advance(drawn.token)
        assert list(completion.tokens) == tokens
        assert completion.logprobs == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.statistics
@pytest.mark.parametrize(("name", "options"), [("ar", {}), ("sd", {"rule": "leviathan"}), ("mcsd", {"rule": "mcsd"})])
def test_the_distribution_is_that_of_ar_under_the_mask(
    make_bench: Any, logits_alone: Any, name: str, options: dict[str, Any]
) -> None:
    bench = make_bench(kv_budget=60_000)
    decoder = bench.speculative(name, "near", **options) if options else bench.ar()
    matcher, codec = decoder.engine.grammars.matcher(Constraint(regex="[ab1]{2}")), decoder.engine.codec
    expected: dict[str, float] = {}
    texts = [(codec.encode("the "), matcher, "", 1.0)]
    while texts:  # mask each row, and normalise it
        tokens, state, text, chance = texts.pop()
        if state.complete:
            expected[text] = expected.get(text, 0.0) + chance
            continue
        logits = logits_alone(bench.target, tokens)[-1].double().numpy()
        bits = np.unpackbits(state.mask.view(np.uint8), bitorder="little")[: len(logits)]
        weights = np.where(bits == 1, np.exp(logits - logits.max()), 0.0)
        for token in weights.nonzero()[0].tolist():
            fork = state.fork()
            fork.advance(token)
            texts.append(
                ([*tokens, token], fork, text + codec.decode([token]), chance * weights[token] / weights.sum())
            )
    count = 1500
    request = Request(
        prompt="the ",
        constraint=Constraint(regex="[ab1]{2}"),
        sampling=Sampling(temperature=1.0, max_tokens=4, n=count),
    )
    found = Counter(one.text for one in decoder.generate([request]))
    assert found.keys() <= expected.keys()
    likely = sorted(text for text, chance in expected.items() if chance * count >= 5)
    observed = [found[text] for text in likely]
    wanted = [expected[text] * count for text in likely]
    rest = count - sum(observed), count - sum(wanted)
    assert stats.chisquare([*observed, rest[0]], [*wanted, max(rest[1], 1e-9)]).pvalue > 1e-3


def test_forced_tokens_take_no_forward(make: Any) -> None:
    decoder = make("ar")
    fixed = "10 and 10 and 10 and 10 and the "
    (completion,) = decoder.generate(
        [
            Request(
                prompt="abc", constraint=Constraint(regex=f"{fixed}(abc|1){fixed}x"), sampling=Sampling(max_tokens=90)
            )
        ]
    )
    assert re.fullmatch(f"{fixed}(abc|1){fixed}x", completion.text)
    assert completion.usage.forwards == completion.usage.masked_tokens < completion.usage.forced_tokens
    (whole,) = decoder.generate([Request(prompt="abc", constraint=Constraint(choices=(fixed,)))])
    assert (whole.text, whole.finish_reason, whole.usage.forwards, whole.logprob) == (fixed, "eos", 0, 0.0)


def test_forced_repetitions_do_not_end_a_text(make: Any) -> None:
    sampling = Sampling(max_tokens=700)
    request = Request(prompt="abc", constraint=Constraint(regex="(10 ){300}(a|b)"), sampling=sampling)
    (completion,) = make("ar").generate([request])
    assert re.fullmatch("(10 ){300}(a|b)", completion.text)


def test_only_the_end_is_allowed(make: Any) -> None:
    (empty,) = make("ar").generate([Request(prompt="abc", constraint=Constraint(regex="(|)"))])
    assert (empty.text, empty.tokens, empty.finish_reason) == ("", (), "eos")


def test_a_text_that_runs_out_of_tokens_says_so(make: Any) -> None:
    choice = "the end of the story and the other one"
    for name in ("ar", "sd"):
        decoder = make(name)
        tokens = len(decoder.engine.codec.encode(choice))
        for limit, reason in ((tokens, "eos"), (tokens - 1, "length"), (1, "length")):
            request = Request(
                prompt="abc", constraint=Constraint(choices=(choice,)), sampling=Sampling(max_tokens=limit)
            )
            (completion,) = decoder.generate([request])
            assert completion.finish_reason == reason
            assert choice.startswith(completion.text)
            assert len(completion.tokens) == limit


def test_stop_strings_and_streams(make: Any) -> None:
    decoder = make("ar")
    sampling = Sampling(max_tokens=60, temperature=1.0, n=2, stop=("10",))
    request = Request(prompt="abc", constraint=Constraint(regex="([a-f]{3},){2}10[a-z]{9}"), sampling=sampling)
    expected = decoder.generate([request])
    assert all(re.fullmatch("([a-f]{3},){2}", one.text) and one.finish_reason == "stop" for one in expected)
    (handle,) = decoder.submit([request], stream=True)
    pieces = list(handle)
    assert ["".join(text for index, text in pieces if index == i) for i in range(2)] == [one.text for one in expected]
    (handle,) = decoder.submit([Request(prompt="abc", constraint=Constraint(choices=("the end",)))], stream=True)
    assert "".join(text for _, text in handle) == "the end"


def test_pauses_keep_the_state_of_the_constraint(make: Any) -> None:
    many = [one.model_copy(update={"prompt": f"{i} {one.prompt}"}) for i, one in enumerate(requests())]
    expected = make("ar").generate(many)
    for name in ("ar", "sd"):
        small = make(name, kv_budget=330)
        assert shown(small.generate(many)) == shown(expected)


def test_a_text_that_spells_out_control_tokens_has_none(make: Any) -> None:
    decoder = make("ar")
    choice = "<|im_end|><|im_start|>the"
    (completion,) = decoder.generate([Request(prompt="abc", constraint=Constraint(choices=(choice,)))])
    assert completion.text == choice
    assert not decoder.engine.codec.special.intersection(completion.tokens)


def test_the_answer_after_a_trigger_is_constrained(make: Any) -> None:
    for name, options in (("ar", {}), ("fastcot", {"cap": 5})):
        request = Request(
            prompt="abc",
            answer_trigger=" So:",
            constraint=Constraint(choices=(" the end", " 10")),
            sampling=Sampling(max_tokens=12, temperature=1.0, seed=1),
        )
        (completion,) = make(name, **options).generate([request])
        assert completion.answer in (" the end", " 10")
        assert completion.parts[0].tokens <= 12
        assert completion.text.endswith(f" So:{completion.answer}")


def test_an_answer_continues_the_prefix_of_the_assistant(make: Any) -> None:
    prompt = (Message(role="user", content="abc"), Message(role="assistant", content='{"a": '))
    (completion,) = make("ar").generate(
        [Request(prompt=prompt, constraint=Constraint(regex='[0-9]{1,3}, "b": "[a-c]*"\\}'))]
    )
    assert json.loads('{"a": ' + completion.text).keys() == {"a", "b"}


def test_parallel_steps_cannot_be_constrained(make: Any) -> None:
    with pytest.raises(RequestError, match="pdos writes parallel steps, which no constraint can describe: use ar"):
        make("pdos").generate([Request(prompt="abc", constraint=Constraint(regex="a"))])


@pytest.mark.real
def test_forced_tokens_save_forwards_of_the_embedded_model(smollm2: str) -> None:
    prompt = (Message(role="user", content="Describe a colour as JSON."),)
    request = Request(
        prompt=prompt,
        constraint=Constraint(json_schema=Paint),
        sampling=Sampling(max_tokens=60, temperature=1.0, n=3, seed=2),
    )
    with load_decoder("ar", smollm2) as decoder:
        for one in decoder.generate([request]):
            Paint.model_validate_json(one.text)
            assert one.usage.new_tokens >= 1.5 * one.usage.forwards
