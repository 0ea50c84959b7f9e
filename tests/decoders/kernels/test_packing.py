"""Memory of packed weights: weights loaded from files are held once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from tot.decoders import Request, Sampling, load_decoder, load_model
from tot.decoders.kernels.native.forward import NativeForward
from tot.decoders.kernels.native.library import lanes, library
from tot.decoders.kernels.native.packed_file import pack_model
from tot.decoders.kernels.native.packing import packed
from tot.decoders.kernels.native.tiles import kernels_run
from tot.decoders.models.loaded import LoadedModel
from tot.decoders.models.loading import open_model
from tot.decoders.models.weights import Weights, hash_weights
from tot.decoders.training.cllm.trajectories import identity
from tot.evaluation.fingerprint import hash_model

SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 6}
REQUEST = Request(prompt="the rain", sampling=Sampling(max_tokens=12, ignore_eos=True))


def held(*roots: Any) -> int:
    """Return the bytes of all tensors and arrays reachable from some objects, counting each storage once."""
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
        elif isinstance(one, np.ndarray):
            while isinstance(one.base, np.ndarray):
                one = one.base
            if not isinstance(one.base, Tensor):  # then the tensor counts
                found[one.ctypes.data] = one.nbytes
        elif isinstance(one, Mapping) and not isinstance(one, Weights):  # Weights are read on demand, not held
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set):
            waiting += one
        elif isinstance(one, partial):
            waiting += [one.func, one.args, one.keywords]
        else:
            waiting += [getattr(one, "__self__", None), getattr(one, "__dict__", None)]
    return sum(found.values())


def packed_backend(loaded: LoadedModel, kind: Any) -> NativeForward:
    """Pack the weights of a model for the C functions, which need not exist."""
    return NativeForward(loaded, pack_model(loaded, kind, None), MagicMock())


@pytest.fixture
def model(make_model: Callable[..., Any]) -> Any:
    made = make_model("qwen2", **SHAPE).bfloat16()
    assert held(made) < 1.01 * sum(weight.nbytes for weight in made.parameters())
    return made


@pytest.fixture
def saved(model: Any, tokenizer: Any, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("weights", "low", "high"), [("int8-dynamic", 0.55, 0.7), ("bfloat16", 0.99, 1.05)])
def test_weights_of_files_are_held_once_and_weights_of_a_module_twice(
    model: Any, saved: Path, weights: Any, low: float, high: float
) -> None:
    """Bounds are multiples of the model's own size."""
    alone = held(model)
    loaded = open_model(saved, dtype="bf16")
    native = packed_backend(loaded, weights)
    assert low < held(loaded, native) / alone < high
    assert loaded.module is None
    beside = packed_backend(LoadedModel.of(model), weights)  # its embedding is the module's own
    assert 1 + low - 0.15 < held(model, beside) / alone < 1 + high
    assert held(model) == alone


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_has_one_identity_in_every_form(
    make_model: Callable[..., Any], tokenizer: Any, tmp_path: Path, tied: bool
) -> None:
    model = make_model("qwen2", tie_word_embeddings=tied, **SHAPE)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    known = identity(LoadedModel.of(model, tokenizer))["weights"]
    for dtype in ("fp32", "bf16"):
        read = open_model(tmp_path, dtype=dtype)
        assert identity(read)["weights"] == known
        assert read.module is None
        assert identity(load_model(tmp_path, dtype=dtype))["weights"] == known
    assert hash_weights(open_model(tmp_path, dtype="fp32").weights) == hash_model(model)
    other = make_model("qwen2", seed=1, tie_word_embeddings=tied, **SHAPE)
    assert identity(LoadedModel.of(other, tokenizer))["weights"] != known


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
@pytest.mark.parametrize("tied", [False, True])
def test_the_weights_file_is_no_longer_mapped_after_packing(
    make_model: Callable[..., Any], tokenizer: Any, tmp_path: Path, tied: bool
) -> None:
    """One remaining tensor of the file would keep all of it in memory."""
    make_model("llama", tie_word_embeddings=tied, **SHAPE).bfloat16().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    native = packed_backend(open_model(tmp_path, dtype="bf16"), "bfloat16")
    assert native.weights == "bfloat16"
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_module_is_built_on_first_access(model: Any, saved: Path) -> None:
    loaded = open_model(saved, dtype="bf16")
    assert loaded.module is None
    assert loaded.size == sum(weight.numel() for weight in model.parameters())
    assert torch.equal(loaded.model.lm_head.weight, model.lm_head.weight)
    loaded.model.lm_head.weight.data[0, 0] = 7.0  # from now on the module's weights are used
    assert loaded.weights.array("lm_head.weight")[0, 0] == 7.0


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8-dynamic"])
def test_large_matrices_are_packed_like_small_ones(weights: Any) -> None:
    """Outputs are packed in parts of limited size."""
    weight = np.random.default_rng(0).standard_normal((2 * 256 + 40, 64)).astype(ml_dtypes.bfloat16)
    weight[:, 0] = 8.0  # the largest weight, which sets the unit of the scales
    strips = packed(weight, weights).strips
    assert len(strips) == -(-len(weight) // (2 * lanes()))
    for first, count in ((0, 32), (256, 32), (512, 32)):
        assert np.array_equal(strips[first // (2 * lanes())], packed(weight[first : first + count], weights).strips[0])
    assert np.array_equal(strips[-1], packed(weight[-8:], weights).strips[0])


# -- with the kernels ---------------------------------------------------------------------------------------------


@pytest.fixture
def folder(make_model: Callable[..., Any], tokenizer: Any, tmp_path: Path) -> Path:
    able = kernels_run(32, 2, np.dtype(np.float32), "cpu")
    if not (able and library("sampling", "-O3")):
        pytest.skip("needs a C compiler, and a processor with AVX2")
    make_model("llama", **SHAPE).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("quantize", ["none", "int8-dynamic"])
def test_a_model_loaded_by_name_is_held_once_and_decodes_like_a_given_one(folder: Path, quantize: Any) -> None:
    given = load_model(folder, dtype="fp32")
    alone = held(given.model)
    with load_decoder("ar", given.model, tokenizer=given.tokenizer, kv_budget=100, quantize=quantize) as decoder:
        expected = decoder.generate([REQUEST])[0].tokens
    assert held(given.model) == alone
    with load_decoder("ar", folder, dtype="fp32", kv_budget=100, quantize=quantize) as decoder:
        runner = decoder.engine.runner
        stored = held(runner.backend._store)
        assert decoder.generate([REQUEST])[0].tokens == expected
        assert held(decoder.engine) - stored < (1.2 if quantize == "none" else 0.6) * alone
        with load_decoder("sd", engine=decoder.engine, draft=str(folder)) as drafts:
            assert drafts.generate([REQUEST])[0].tokens == expected
