"""What weights take once they are packed: a model that is the engine's own holds each of them once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tot.decoders import ModelError, Request, Sampling, load_decoder, load_model
from tot.decoders.drafting.early_exit import first_layers
from tot.decoders.kernels.native.forward import NativeForward
from tot.decoders.kernels.native.library import lanes, library
from tot.decoders.kernels.native.packing import packed
from tot.decoders.kernels.native.tiles import kernels_run
from tot.decoders.training.cllm.trajectories import identity
from tot.evaluation.fingerprint import hash_model

SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 6}
REQUEST = Request(prompt="the rain", sampling=Sampling(max_tokens=12, ignore_eos=True))


def held(*roots: Any) -> int:
    """Bytes of all tensors that can be reached from some objects, each storage once."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    waiting = list(roots)
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            if not one.is_meta:
                storage = one.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(one, Mapping):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set):
            waiting += one
        elif isinstance(one, partial):
            waiting += [one.func, one.args, one.keywords]
        else:
            waiting += [getattr(one, "__self__", None), getattr(one, "__dict__", None)]
    return sum(found.values())


def stores(model: Any) -> tuple[list[Tensor], list[Tensor]]:
    shape = (model.config.num_key_value_heads, 10, 32)
    keys, values = ([torch.zeros(shape, dtype=model.dtype) for _ in model.model.layers] for _ in range(2))
    return keys, values


@pytest.fixture
def model(make_model: Callable[..., Any]) -> Any:
    made = make_model("qwen2", **SHAPE).bfloat16()
    assert held(made) < 1.01 * sum(weight.nbytes for weight in made.parameters())
    return made


@pytest.mark.parametrize(
    ("weights", "owned", "least", "most"),
    [
        *[("int8-dynamic", True, 0.55, 0.7), ("bfloat16", True, 0.99, 1.05)],
        *[("int8-dynamic", False, 1.5, 1.65), ("bfloat16", False, 1.9, 2.0)],
    ],
)
def test_eight_bits_hold_less_than_bfloat16_does(
    model: Any, weights: Any, owned: bool, least: float, most: float
) -> None:
    """Times the model alone. A model that is somebody else's stays as it was."""
    alone = held(model)
    keys, values = stores(model)
    native = NativeForward(model, keys, values, weights, owned)
    assert least < (held(model, native) - held(keys, values)) / alone < most
    assert (held(model) < 0.2 * alone) == owned


def test_the_first_layers_draft_with_what_the_target_has_packed(model: Any, tokenizer: Any) -> None:
    keys, values = stores(model)
    loaded = load_model(model, tokenizer=tokenizer)
    whole = NativeForward(model, keys, values, "int8-dynamic", owned=True)
    before = held(model, whole)
    shallow = first_layers(loaded, 2).model
    draft = NativeForward(shallow, keys[:2], values[:2], "int8-dynamic", shared=whole)
    assert held(model, whole, shallow, draft) < 1.02 * before


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_without_its_weights_is_known_to_be_the_same(
    make_model: Callable[..., Any], tokenizer: Any, tied: bool
) -> None:
    model = make_model("qwen2", tie_word_embeddings=tied, **SHAPE)
    known = identity(load_model(model, tokenizer=tokenizer))
    NativeForward(model, *stores(model), "int8-dynamic", owned=True)
    assert identity(load_model(model, tokenizer=tokenizer)) == known
    other = make_model("qwen2", seed=1, tie_word_embeddings=tied, **SHAPE)
    assert identity(load_model(other, tokenizer=tokenizer))["weights"] != known["weights"]


def test_tied_weights_are_kept_for_the_embedding(make_model: Callable[..., Any]) -> None:
    model = make_model("llama", tie_word_embeddings=True, **SHAPE)
    table = model.model.embed_tokens.weight
    assert model.lm_head.weight is table
    NativeForward(model, *stores(model), "int8-dynamic", owned=True)
    assert model.lm_head.weight is not table
    assert model.model.embed_tokens.weight is table
    assert table.is_contiguous()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
@pytest.mark.parametrize("tied", [False, True])
def test_the_file_that_weights_were_mapped_from_is_let_go(
    make_model: Callable[..., Any], tokenizer: Any, tmp_path: Path, tied: bool
) -> None:
    """One tensor of it left holds what was read of all of it."""
    make_model("llama", tie_word_embeddings=tied, **SHAPE).bfloat16().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model: Any = load_model(tmp_path, dtype="bf16").model
    expected = model.model.embed_tokens.weight.clone()
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    native = NativeForward(model, *stores(model), "bfloat16", owned=True)
    assert native.weights == "bfloat16"
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert torch.equal(model.model.embed_tokens.weight, expected)


def test_a_model_without_its_weights_says_why_it_computes_nothing(model: Any) -> None:
    numbers, identity = sum(weight.numel() for weight in model.parameters()), hash_model(model)
    native = NativeForward(model, *stores(model), "int8-dynamic", owned=True)
    assert native.weights == "int8-dynamic"
    assert sum(weight.numel() for weight in model.parameters()) == numbers
    assert hash_model(model) == identity
    with pytest.raises(
        ModelError, match="held only as the engine that loaded it has packed them: load the model again"
    ):
        model.model.layers[0].mlp.down_proj(torch.zeros(1, 256).bfloat16())


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8-dynamic"])
def test_many_outputs_are_packed_as_few_are(weights: Any) -> None:
    """So many at a time."""
    weight = torch.randn(2 * 2048 + 40, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[:, 0] = 8.0  # the largest, which says in what units steps are kept
    strips = packed(weight, weights).strips
    assert len(strips) == -(-len(weight) // (2 * lanes()))
    for first, count in ((0, 32), (2048, 32), (4096, 32)):
        assert torch.equal(strips[first // (2 * lanes())], packed(weight[first : first + count], weights).strips[0])
    assert torch.equal(strips[-1], packed(weight[-8:], weights).strips[0])


# -- with the kernels ---------------------------------------------------------------------------------------------


@pytest.fixture
def folder(make_model: Callable[..., Any], tokenizer: Any, tmp_path: Path) -> Path:
    able = kernels_run(32, 2, torch.float32, torch.device("cpu"))
    if not (able and library("sampling", "-O3", "-fopenmp")):
        pytest.skip("needs a C compiler, and a processor with AVX2")
    make_model("llama", **SHAPE).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("quantize", ["none", "int8-dynamic"])
def test_a_model_loaded_by_name_is_held_once_and_decodes_as_one_that_was_given(folder: Path, quantize: Any) -> None:
    given = load_model(folder, dtype="fp32")
    alone = held(given.model)
    with load_decoder("ar", given.model, tokenizer=given.tokenizer, kv_budget=100, quantize=quantize) as decoder:
        expected = decoder.generate([REQUEST])[0].tokens
    assert held(given.model) == alone
    with load_decoder("ar", folder, dtype="fp32", kv_budget=100, quantize=quantize) as decoder:
        runner = decoder.engine.runner
        stored = held(runner._keys, runner._values)
        assert decoder.generate([REQUEST])[0].tokens == expected
        assert held(decoder.engine) - stored < (1.2 if quantize == "none" else 0.6) * alone
        with load_decoder("sd", engine=decoder.engine, draft="early-exit:2") as drafts:
            assert drafts.generate([REQUEST])[0].tokens == expected
        with load_decoder("sd", engine=decoder.engine, draft=str(folder)) as drafts:
            assert drafts.generate([REQUEST])[0].tokens == expected
