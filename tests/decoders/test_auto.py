"""auto: the tokens equal ar with every plan. Drafts that pay are used, by purpose, and others are left out."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tot.decoders import Completion, Engine, LocalDecoder, OptionError, Request, Sampling, load_decoder, load_model
from tot.decoders.drafting.latency_model import LatencyModel

Make = Callable[..., LocalDecoder]
FREE = LatencyModel((1, 64), (0.01, 0.011))
"""Rows cost almost nothing."""
EXPENSIVE = LatencyModel((1, 64), (0.01, 0.64))
"""A row costs as much as a separate forward."""
LINEAR = LatencyModel((1, 11), (0.01, 0.02))
"""Nine milliseconds, plus one per row."""


@pytest.fixture
def costs(script_latency: Callable[..., None]) -> Callable[[LatencyModel], None]:
    """Script the cost of every target, because measured times of tiny models depend on the machine."""
    return script_latency


def requests(count: int, purpose: Any = "generate", temperature: float = 1.0, tokens: int = 60) -> list[Request]:
    rng = random.Random(count)
    return [
        Request(
            prompt="".join(rng.choices("the and 10 on in range", k=40)),
            sampling=Sampling(max_tokens=tokens, temperature=temperature, seed=i, ignore_eos=True),
            purpose=purpose,
        )
        for i in range(count)
    ]


def repeats_one_token(decoder: LocalDecoder) -> None:
    """Make the model write one token after any text, so that lookup drafts are always right."""
    _ignores_context(decoder)
    decoder.model.lm_head.bias.data[60] = 50.0


def cycles_five_tokens(decoder: LocalDecoder) -> None:
    """Make the model cycle through five tokens, each determined by the one before it.

    Lookup drafts are right. A guess after a wrong token is not.
    """
    _ignores_context(decoder)
    decoder.model.lm_head.bias.data[60] = 0.0
    for layer in decoder.model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    embedded = decoder.model.get_input_embeddings().weight.data
    for token in range(60, 65):
        after = 60 + (token - 59) % 5
        decoder.model.lm_head.weight.data[after] = 30.0 * embedded[token] / embedded[token].norm()
        decoder.model.lm_head.bias.data[after] = 0.0


def samples_by_position(decoder: LocalDecoder) -> None:
    """Make the sampled token depend only on the noise of its position.

    A Jacobi window is right once it was fed. No other draft ever is.
    """
    _ignores_context(decoder)
    decoder.model.lm_head.bias.data[40:240] = 5.0


def _ignores_context(decoder: LocalDecoder) -> None:
    decoder.model.lm_head.weight.data.zero_()
    decoder.model.lm_head.bias.data.fill_(-50.0)


def tokens(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.tokens for completion in completions]


def total(completions: Sequence[Completion], what: str) -> int:
    return sum(getattr(completion.usage, what) for completion in completions)


def statistics(auto: LocalDecoder) -> Any:
    """Return the acceptance statistics of drafts so far, by purpose."""
    policy: Any = auto.method.policy
    return policy.keywords["speculation"].statistics


# -- the same tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [FREE, LINEAR, EXPENSIVE])
def test_auto_equals_ar(
    make: Make, mixed: list[Request], costs: Callable[[LatencyModel], None], target: LatencyModel
) -> None:
    costs(target)
    purposes = ("generate", "evaluate", "answer")
    requests_ = [one.model_copy(update={"purpose": purposes[i % 3]}) for i, one in enumerate(mixed)]
    auto, expected = make("auto"), make("ar").generate(requests_)
    for _ in range(2):  # the second time everything can be looked up
        got = auto.generate(requests_)
        assert [(one.tokens, one.text, one.finish_reason) for one in got] == [
            (one.tokens, one.text, one.finish_reason) for one in expected
        ]
        assert [one.logprob for one in got] == pytest.approx([one.logprob for one in expected], abs=1e-3)
    assert (total(got, "accepted") > 0) == (target is not EXPENSIVE)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("change", [repeats_one_token, cycles_five_tokens, samples_by_position])
def test_auto_equals_ar_if_much_is_accepted(
    make: Make, costs: Callable[[LatencyModel], None], change: Callable[[LocalDecoder], None], temperature: float
) -> None:
    costs(FREE)
    auto, plain = make("auto"), make("ar")
    change(auto)
    change(plain)
    got = auto.generate(requests(4, temperature=temperature))
    assert tokens(got) == tokens(plain.generate(requests(4, temperature=temperature)))
    assert total(got, "accepted") > 0.5 * total(got, "new_tokens")


# -- drafts that pay -------------------------------------------------------------------------------


def test_repetitive_texts_are_looked_up(make: Make, costs: Callable[[LatencyModel], None]) -> None:
    costs(LINEAR)
    auto = make("auto")
    cycles_five_tokens(auto)
    got = auto.generate(requests(1, tokens=120))
    assert len(set(got[0].tokens)) == 5
    assert total(got, "forwards") < 60
    assert total(got, "accepted") > 0.5 * total(got, "drafted")
    assert statistics(auto)["generate"].chance(("lookup", 6, 3)) > 0.8


def test_tokens_that_are_right_once_fed_are_guessed_by_jacobi(
    make: Make, costs: Callable[[LatencyModel], None]
) -> None:
    """This is the case of a consistency LLM: texts without repetition, and windows that converge at once."""
    costs(FREE)
    auto = make("auto")
    samples_by_position(auto)
    got = auto.generate(requests(1, tokens=200))
    assert total(got, "forwards") < 60
    assert total(got, "accepted") > 0.5 * total(got, "new_tokens")
    assert statistics(auto)["generate"].chance(("jacobi", 8, False)) > 0.8


def test_drafts_that_are_never_accepted_become_rare(make: Make, costs: Callable[[LatencyModel], None]) -> None:
    """auto is at most a few percent slower than ar."""
    costs(LINEAR)
    auto = make("auto")
    for share, request in zip((0.95, 0.97), requests(2, tokens=200), strict=True):
        (got,) = auto.generate([request])
        taken = got.usage.forwards * LINEAR.of(1) + got.usage.drafted * LINEAR.slope(1)
        assert taken <= got.usage.new_tokens * LINEAR.of(1) / share


def test_with_expensive_rows_nothing_is_drafted(make: Make, costs: Callable[[LatencyModel], None]) -> None:
    costs(EXPENSIVE)
    auto = make("auto")
    repeats_one_token(auto)
    got = auto.generate(requests(4))
    assert (total(got, "drafted"), total(got, "forwards")) == (0, 4 * 60)


def test_each_purpose_is_learned_separately(make: Make, costs: Callable[[LatencyModel], None]) -> None:
    """Evaluations that cannot be looked up do not affect thoughts that can."""
    costs(LINEAR)
    auto = make("auto")
    hard = [one.model_copy(update={"purpose": "evaluate"}) for one in requests(1, tokens=100)]
    auto.generate(hard)
    cycles_five_tokens(auto)
    known = statistics(auto)
    before = known["evaluate"].chance(("lookup", 1, 0))
    assert before < 0.3
    assert known["generate"].chance(("lookup", 1, 0)) == 0.5
    (easy,) = auto.generate(requests(1, "generate", tokens=100))
    assert easy.usage.accepted > 0.5 * easy.usage.new_tokens
    assert known["generate"].chance(("lookup", 6, 3)) > 0.8
    assert known["evaluate"].chance(("lookup", 6, 3)) == 0.5
    assert known["evaluate"].chance(("lookup", 1, 0)) == before


def test_requests_of_one_batch_share_one_plan(make: Make, costs: Callable[[LatencyModel], None]) -> None:
    """Eight rows are free and more are expensive, so texts of one purpose leave less for the other."""
    costs(LatencyModel((1, 8, 9, 64), (0.01, 0.0101, 0.02, 0.2)))
    auto = make("auto")
    repeats_one_token(auto)
    requests_ = [*requests(4, tokens=40), *requests(5, "evaluate", tokens=40)[:4]]  # eight different texts
    requests_ = [one.model_copy(update={"prompt": str(one.prompt)[:12]}) for one in requests_]  # that fit into one step
    assert total(auto.generate(requests_), "drafted") == 0
    assert total(auto.generate(requests_[:2] + requests_[4:6]), "drafted") > 0
    assert total(auto.generate(requests_[:4] * 4), "drafted") > 0  # sixteen texts, four rows


# -- draft models ----------------------------------------------------------------------------------


@pytest.fixture
def engines(
    make_model: Callable[..., Any], tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Engine]]:
    """Create engines on a named model, with a separate cache folder."""
    monkeypatch.setenv("TOT_CACHE", str(tmp_path))
    made: list[Engine] = []

    def engine() -> Engine:
        model = make_model(readable=True)
        model.config.name_or_path = "tiny"
        made.append(Engine(load_model(model, tokenizer=tokenizer), 4000))
        return made[-1]

    yield engine
    for one in made:
        one.close()
        assert one.cache.live == 0


def test_a_draft_can_be_named(
    engines: Callable[[], Engine], costs: Callable[[LatencyModel], None], tmp_path: Path
) -> None:
    costs(FREE)
    engine, requests_ = engines(), requests(2, tokens=80)
    engine.loaded.model.save_pretrained(tmp_path)
    engine.loaded.tokenizer.save_pretrained(tmp_path)
    with load_decoder("auto", engine=engine, draft=str(tmp_path)) as auto:
        got = auto.generate(requests_)
        assert total(got, "accepted") > 0
        assert statistics(auto)["generate"].chance(("level", 0, 1.0)) != 0.8  # which is the prior
    assert tokens(got) == tokens(load_decoder(engine=engines()).generate(requests_))


def test_a_lookup_draft_is_refused_because_auto_looks_up_itself(engines: Callable[[], Engine]) -> None:
    with pytest.raises(OptionError, match="draft='lookup' is not a model: auto includes lookup"):
        load_decoder("auto", engine=engines(), draft="lookup")
