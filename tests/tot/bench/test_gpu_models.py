"""Random models of published sizes, and drafts that are right as often as they are made to be."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tot.bench.gpu_models import SHAPES, build, build_draft, loaded, make_tokenizer, on_a_walk, twin
from tot.decoders import Engine, Request, Sampling, load_decoder
from tot.decoders.drafting.opening import make_drafter

pytestmark = pytest.mark.benches

TINY = SHAPES["tiny"]
CPU = torch.device("cpu")


@pytest.fixture
def target() -> Any:
    return build(TINY.family, TINY.sizes, CPU)


@pytest.mark.parametrize(
    ("name", "family", "parameters"), [("llama-2-7b", "llama", 6_738_415_616), ("qwen2.5-7b", "qwen2", 7_615_616_512)]
)
def test_shapes_have_the_published_numbers_of_parameters(name: str, family: str, parameters: int) -> None:
    model = build(SHAPES[name].family, SHAPES[name].sizes, torch.device("meta"))
    assert sum(weight.numel() for weight in model.parameters()) == parameters
    assert model.config.model_type == family
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert {weight.device.type for weight in model.parameters()} == {"meta"}


def test_the_draft_beside_llama_has_68_million_parameters() -> None:
    shape = SHAPES["llama-2-7b"]
    draft = build("llama", {**shape.draft, "vocab_size": shape.sizes["vocab_size"]}, torch.device("meta"))
    assert sum(weight.numel() for weight in draft.parameters()) == 68_030_208


def test_a_twin_has_the_same_weights_and_keeps_its_own_attention(target: Any) -> None:
    other = twin(target)
    ids = torch.arange(20)[None]
    before = other(input_ids=ids).logits
    with Engine(loaded(target, make_tokenizer(512), "tiny"), kv_budget=100):
        assert torch.equal(other(input_ids=ids).logits, before)
    places = [weight.data_ptr() for weight in target.parameters()]
    assert [weight.data_ptr() for weight in other.parameters()] == places


def test_every_token_has_a_text_of_its_own() -> None:
    tokenizer = make_tokenizer(512)
    assert len(tokenizer) == 512
    assert len({tokenizer.convert_ids_to_tokens(i) for i in range(512)}) == 512
    assert tokenizer("a b")["input_ids"] == [tokenizer.convert_tokens_to_ids(text) for text in ("a", "Ġ", "b")]


def test_on_a_walk_token_follows_token_and_after_it_the_weights_are_back(target: Any) -> None:
    before = [weight.clone() for weight in target.parameters()]
    sampling = Sampling(max_tokens=8, temperature=1.0, ignore_eos=True)
    with on_a_walk(target), Engine(loaded(target, make_tokenizer(512), "tiny"), kv_budget=100) as engine:
        (done,) = load_decoder("ar", engine=engine).generate([Request(prompt=(9, 70, 508), sampling=sampling)])
    assert done.tokens == (509, 510, 511, 0, 1, 2, 3, 4)
    assert all(torch.equal(a, b) for a, b in zip(before, target.parameters(), strict=True))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_draft_is_right_as_often_as_stated_and_what_comes_out_does_not_change(target: Any, share: float) -> None:
    sampling = Sampling(max_tokens=200, temperature=1.0, ignore_eos=True)
    requests = [Request(prompt=(7, start), sampling=sampling) for start in (0, 128, 256, 384)]
    with on_a_walk(target), Engine(loaded(target, make_tokenizer(512), "tiny"), kv_budget=2000) as engine:
        drafter = make_drafter(build_draft(TINY, CPU, share), engine, ExitStack())
        with load_decoder("sd", engine=engine, draft=drafter, k=2) as decoder:
            done = decoder.generate(requests)
        account = engine.accounts["generate"]
    assert [one.tokens[:3] for one in done] == [(1, 2, 3), (129, 130, 131), (257, 258, 259), (385, 386, 387)]
    assert account.acceptance_rate == pytest.approx(share, abs=0.08 if share == 0.5 else 0.0)
    assert account.drafted > 300
