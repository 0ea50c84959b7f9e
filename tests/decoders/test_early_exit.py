"""Early exit: a model's first layers as its draft, with shared weights. Also other names of drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tot.decoders import Completion, OptionError, Request, Sampling, load_decoder, load_model
from tot.decoders.drafting.draft_model import ModelDrafter
from tot.decoders.drafting.drafters import DrafterChain
from tot.decoders.drafting.early_exit import first_layers
from tot.decoders.drafting.lookup import LookupDrafter
from tot.decoders.drafting.opening import make_drafter
from tot.decoders.engine.engine import Engine

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi3"]
REQUESTS = [
    Request(prompt=prompt, sampling=Sampling(max_tokens=20, temperature=heat, top_p=0.9, n=2, seed=3))
    for prompt in ("The sum of 10 and 11 is", "on and on and")
    for heat in (0.0, 0.6, 1.0)
]


@pytest.fixture
def engine(make_model: Callable[..., Any], tokenizer: Any) -> Iterator[Engine]:
    with Engine(load_model(make_model("llama", readable=True), tokenizer=tokenizer), 3000) as engine:
        yield engine


@pytest.fixture
def stack(engine: Engine) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def outcomes(completions: list[Completion]) -> list[tuple[Any, ...]]:
    return [(completion.tokens, completion.text, completion.finish_reason) for completion in completions]


@pytest.mark.parametrize("family", FAMILIES)
def test_drafting_with_the_first_layer_changes_nothing_but_forwards(
    family: str, make_model: Callable[..., Any], tokenizer: Any
) -> None:
    with load_decoder("ar", make_model(family, readable=True), tokenizer=tokenizer, kv_budget=3000) as decoder:
        expected = outcomes(decoder.generate(REQUESTS))
        options = {"draft": "early-exit:1", "k_config": (2, 1)}
        with load_decoder("mcsd", engine=decoder.engine, **options) as drafting:
            completions = drafting.generate(REQUESTS)
        assert outcomes(completions) == expected
        assert sum(completion.usage.drafted for completion in completions) > 0
        assert outcomes(decoder.generate(REQUESTS)) == expected  # closing the draft does not change the target


def test_the_first_layers_share_the_targets_weights_and_give_its_intermediate_logits(
    make_model: Callable[..., Any], tokenizer: Any
) -> None:
    loaded = load_model(make_model("llama", num_hidden_layers=3), tokenizer=tokenizer)
    shallow: Any = first_layers(loaded, 2).model
    whole: Any = loaded.model
    assert {id(weight) for weight in shallow.parameters()} <= {id(weight) for weight in whole.parameters()}
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        after_two = whole.model(ids, output_hidden_states=True).hidden_states[2]
        expected = whole.lm_head(whole.model.norm(after_two))
        assert torch.allclose(shallow(ids).logits, expected, atol=1e-5)


@pytest.mark.parametrize("layers", [0, 2, 99])
def test_a_number_of_layers_out_of_range_is_refused(engine: Engine, stack: ExitStack, layers: int) -> None:
    with pytest.raises(OptionError, match=rf"early-exit:{layers}: the target has 2 layers; give from 1 to 1"):
        make_drafter(f"early-exit:{layers}", engine, stack)


def test_drafts_are_named_by_words_models_and_lists_of_both(engine: Engine, stack: ExitStack) -> None:
    assert isinstance(make_drafter(None, engine, stack), LookupDrafter)
    assert isinstance(make_drafter("lookup", engine, stack), LookupDrafter)
    exiting = make_drafter("early-exit", engine, stack)
    assert isinstance(exiting, ModelDrafter)
    assert exiting.loaded.model.config.num_hidden_layers == 1
    chain = make_drafter("lookup, early-exit:1", engine, stack)
    assert isinstance(chain, DrafterChain)
    assert make_drafter(chain, engine, stack) is chain
    with pytest.raises(
        OptionError, match="draft=3 is not a model: give a name, a path, a model object, lookup, trained or early"
    ):
        make_drafter(3, engine, stack)
