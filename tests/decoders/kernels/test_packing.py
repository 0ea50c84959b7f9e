"""Memory of packed weights: weights loaded from files are held once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from tot.decoders import Request, Sampling, load_decoder, load_model
from tot.decoders.kernels.native.forward import NativeForward
from tot.decoders.kernels.native.packed_file import pack_model
from tot.decoders.models.loaded import LoadedModel
from tot.decoders.models.loading import open_model
from tot.decoders.models.weights import hash_weights
from tot.decoders.training.cllm.trajectories import identity
from tot.evaluation.fingerprint import hash_model

SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 6}
REQUEST = Request(prompt="the rain", sampling=Sampling(max_tokens=12, ignore_eos=True))


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_has_one_identity_in_every_form(
    make_model: Callable[..., Any], save_model: Callable[..., Path], tokenizer: Any, tied: bool
) -> None:
    model = make_model("qwen2", tie_word_embeddings=tied, **SHAPE)
    folder = save_model(model)
    known = identity(LoadedModel.of(model, tokenizer))["weights"]
    for dtype in ("fp32", "bf16"):
        read = open_model(folder, dtype=dtype)
        assert identity(read)["weights"] == known
        assert read.module is None
        assert identity(load_model(folder, dtype=dtype))["weights"] == known
    assert hash_weights(open_model(folder, dtype="fp32").weights) == hash_model(model)
    other = make_model("qwen2", seed=1, tie_word_embeddings=tied, **SHAPE)
    assert identity(LoadedModel.of(other, tokenizer))["weights"] != known


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
@pytest.mark.parametrize("tied", [False, True])
def test_the_weights_file_is_no_longer_mapped_after_packing(
    make_model: Callable[..., Any], save_model: Callable[..., Path], tied: bool
) -> None:
    """One remaining tensor of the file would keep all of it in memory. The C functions need not exist."""
    folder = save_model(make_model("llama", tie_word_embeddings=tied, **SHAPE).bfloat16())
    loaded = open_model(folder, dtype="bf16")
    native = NativeForward(loaded, pack_model(loaded, "bfloat16"), MagicMock())
    assert native.weights == "bfloat16"
    assert str(folder) not in Path("/proc/self/maps").read_text()


def test_a_module_is_built_on_first_access(make_model: Callable[..., Any], save_model: Callable[..., Path]) -> None:
    model = make_model("qwen2", **SHAPE).bfloat16()
    loaded = open_model(save_model(model), dtype="bf16")
    assert loaded.module is None
    assert loaded.size == sum(weight.numel() for weight in model.parameters())
    assert torch.equal(loaded.model.lm_head.weight, model.lm_head.weight)
    loaded.model.lm_head.weight.data[0, 0] = 7.0  # from now on the module's weights are used
    assert loaded.weights.array("lm_head.weight")[0, 0] == 7.0


def test_a_model_loaded_by_name_decodes_like_a_given_one_without_a_module(
    lab: Any, save_model: Callable[..., Path]
) -> None:
    lab.require_kernels()
    folder = save_model(**SHAPE)
    given = load_model(folder, dtype="fp32")
    with load_decoder("ar", given.model, tokenizer=given.tokenizer, kv_budget=100) as decoder:
        expected = decoder.generate([REQUEST])[0].tokens
    with load_decoder("ar", folder, dtype="fp32", kv_budget=100) as decoder:
        assert decoder.generate([REQUEST])[0].tokens == expected
        assert decoder.engine.loaded.module is None
        with load_decoder("sd", engine=decoder.engine, draft=str(folder)) as drafts:
            assert drafts.generate([REQUEST])[0].tokens == expected
