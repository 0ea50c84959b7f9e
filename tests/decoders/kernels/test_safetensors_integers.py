"""Quantized layers of safetensors files: written here by the documented layouts, read exactly, and multiplied."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import Tensor, nn

from tot.decoders import ModelError, Request, Sampling, load_decoder
from tot.decoders.engine.runner import Runner
from tot.decoders.kernels.native.forward import NativeForward
from tot.decoders.models.gguf_numbers import Whole
from tot.decoders.models.loading import open_model
from tot.decoders.models.safetensors_integers import layout_of
from tot.decoders.models.shapes import Array

SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
Tensors = dict[str, Array]


class Integers(NamedTuple):
    """A quantized matrix: (number - zero) * scale."""

    numbers: Array
    """(outputs, inputs)"""
    scales: Array
    """(outputs, groups), float16"""
    zeros: Array
    bits: int

    def floats(self) -> Array:
        repeats = self.numbers.shape[1] // self.scales.shape[1]
        scales, zeros = (part.repeat(repeats, axis=1) for part in (self.scales.astype(np.float32), self.zeros))
        product: Array = (self.numbers - zeros).astype(np.float32) * scales
        return product


def integers(shape: tuple[int, int], group: int, bits: int, symmetric: bool, seed: int) -> Integers:
    random, groups = np.random.default_rng(seed), shape[1] // group
    zeros = np.full((shape[0], groups), 2 ** (bits - 1))
    if not symmetric:
        zeros += random.integers(-2, 3, zeros.shape)
        zeros[:2] = [[0], [2**bits - 1]]
    scales = random.uniform(0.5, 1.5, zeros.shape) * 0.6 / 2**bits
    return Integers(random.integers(0, 2**bits, shape), scales.astype(np.float16), zeros, bits)


def words(numbers: Array, bits: int, places: tuple[int, ...] | None = None) -> Array:
    """Pack numbers along the last dimension into 32-bit words. The number `places[i]` of a word is at i * bits."""
    word = 32 // bits
    by_word, packed = numbers.reshape(*numbers.shape[:-1], -1, word), np.int64(0)
    for i, place in enumerate(places or range(word)):
        packed = packed | by_word[..., place].astype(np.int64) << i * bits
    return packed.astype(np.uint32).view(np.int32)


def awq(layer: Integers) -> Tensors:
    numbers, zeros = (words(part.T, 4, (0, 2, 4, 6, 1, 3, 5, 7)) for part in (layer.numbers, layer.zeros))
    return {"qweight": numbers, "qzeros": zeros, "scales": layer.scales.T}


def gptq(layer: Integers, less: int = 1) -> Tensors:
    groups, inputs = layer.scales.shape[1], layer.numbers.shape[1]
    return {
        "qweight": words(layer.numbers, layer.bits).T,
        "qzeros": words((layer.zeros.T - less) % 2**layer.bits, layer.bits),
        "scales": layer.scales.T,
        "g_idx": (np.arange(inputs) // (inputs // groups)).astype(np.int32),
    }


def gptq_2(layer: Integers) -> Tensors:
    return gptq(layer, 0)


def packed(layer: Integers) -> Tensors:
    stored = {"weight_packed": words(layer.numbers, layer.bits), "weight_scale": layer.scales}
    if (layer.zeros != 2 ** (layer.bits - 1)).any():
        stored["weight_zero_point"] = words(layer.zeros.T, layer.bits).T
    return {**stored, "weight_shape": np.array(layer.numbers.shape)}


def plain(layer: Integers) -> Tensors:
    stored = {"weight": (layer.numbers - 128).astype(np.int8), "weight_scale": layer.scales}
    if (layer.zeros != 128).any():
        stored["weight_zero_point"] = (layer.zeros - 128).astype(np.int8)
    return stored


def compressed(form: str, **scheme: Any) -> dict[str, Any]:
    known = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "actorder": None}
    groups = {"group_0": {"targets": ["Linear"], "weights": {**known, **scheme}}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
INT8 = {"num_bits": 8, "strategy": "channel", "group_size": None}
LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[Integers], Tensors], bool]] = {
    "awq": (AWQ, awq, False),
    "awq-32": ({**AWQ, "group_size": 32}, awq, True),
    "gptq": (GPTQ, gptq, True),
    "gptq-8": ({**GPTQ, "bits": 8, "group_size": 32}, gptq, False),
    "gptq-rows": ({**GPTQ, "group_size": -1}, gptq, False),
    "gptq-v2": ({**GPTQ, "checkpoint_format": "gptq_v2", "group_size": 64}, gptq_2, False),
    "w4": (compressed("pack-quantized"), packed, True),
    "w4-asymmetric": (compressed("pack-quantized", symmetric=False, group_size=128), packed, False),
    "w8": (compressed("pack-quantized", **INT8), packed, True),
    "w8a8": (compressed("int-quantized", **INT8), plain, True),
    "w8a8-asymmetric": (compressed("int-quantized", **INT8, symmetric=False), plain, False),
}


def settings_of(quantization: dict[str, Any]) -> tuple[int, int]:
    """Return the bits, and the group; 0 for rows."""
    scheme = quantization.get("config_groups", {}).get("group_0", {}).get("weights", quantization)
    size = scheme["group_size"]
    return scheme.get("bits", scheme.get("num_bits")), 0 if size in (None, -1) else size


def save(model: Any, tokenizer: Any, folder: Path, kind: str) -> dict[str, Array]:
    """Save a model whose linear layers have random integers. Returns their floats, which the model gets, too."""
    quantization, store, symmetric = LAYOUTS[kind]
    bits, group = settings_of(quantization)
    tensors = {name: weight.numpy() for name, weight in model.state_dict().items()}
    floats = {}
    for seed, (name, layer) in enumerate(model.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head":
            outputs, inputs = layer.weight.shape
            whole = integers((outputs, inputs), group or inputs, bits, symmetric, seed)
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{part}": np.ascontiguousarray(value) for part, value in store(whole).items()}
            floats[f"{name}.weight"] = whole.floats()
            layer.weight = nn.Parameter(torch.from_numpy(whole.floats()))
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return floats


@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_layers_of_every_layout_are_read_and_multiplied(
    known: Callable[..., Any],
    text: Callable[..., Any],
    computed: Callable[..., Any],
    logits_alone: Callable[..., Tensor],
    rounding: type[nn.Linear],
    tokenizer: Any,
    tmp_path: Path,
    kind: str,
) -> None:
    model = known("qwen2", **SHAPE)
    floats = save(model, tokenizer, tmp_path, kind)
    loaded = open_model(tmp_path, dtype="fp32")
    for name, expected in floats.items():
        whole = loaded.weights[name]
        assert isinstance(whole, Whole)
        assert whole.group == 32
        np.testing.assert_allclose(whole.floats(), expected, rtol=1e-6, atol=1e-6)
    reference = copy.deepcopy(model)
    for layer in reference.modules():
        if isinstance(layer, nn.Linear):
            layer.__class__ = rounding
    runner = Runner(loaded, 3000)
    assert isinstance(runner.backend, NativeForward)
    texts = [text(20 + 9 * i, seed=i) for i in range(3)]
    for tokens, logits in zip(texts, computed(runner, texts), strict=True):
        expected = logits_alone(reference, tokens)[-1]
        assert (logits[0] - expected).pow(2).mean().sqrt() < 0.1 * expected.std()
    runner.close()


@pytest.mark.parametrize("kind", ["gptq", "w4"])
def test_the_experts_of_a_layer_are_read(known: Callable[..., Any], tokenizer: Any, tmp_path: Path, kind: str) -> None:
    """Each expert is stored as linear layers of its own."""
    model = known("qwen3_moe", **SHAPE, moe_intermediate_size=128, num_local_experts=4)
    quantization, store, symmetric = LAYOUTS[kind]
    bits, group = settings_of(quantization)
    save(model, tokenizer, tmp_path, kind)
    from safetensors.numpy import load_file

    tensors, expected = load_file(tmp_path / "model.safetensors"), {}
    for name in [name for name in tensors if ".mlp.experts." in name]:
        del tensors[name]
    for number in range(2):
        for part, shape in (("gate_proj", (128, 128)), ("up_proj", (128, 128)), ("down_proj", (128, 128))):
            stem = f"model.layers.{number}.mlp.experts."
            experts = [integers(shape, group, bits, symmetric, 9 * number + seed) for seed in range(4)]
            for expert, whole in enumerate(experts):
                tensors |= {
                    f"{stem}{expert}.{part}.{key}": np.ascontiguousarray(value) for key, value in store(whole).items()
                }
            expected[f"{stem}{part}.weight"] = np.concatenate([whole.floats() for whole in experts])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = open_model(tmp_path, dtype="fp32")
    for name, floats in expected.items():
        whole = loaded.weights[name]
        assert isinstance(whole, Whole)
        np.testing.assert_allclose(whole.floats(), floats, rtol=1e-6, atol=1e-6)


@pytest.fixture
def folder(known: Callable[..., Any], tokenizer: Any, tmp_path: Path) -> Path:
    save(known("llama", **SHAPE), tokenizer, tmp_path, "gptq")
    return tmp_path


def test_a_decoder_opens_a_quantized_folder(folder: Path) -> None:
    request = Request(prompt="the rain", sampling=Sampling(max_tokens=5, ignore_eos=True))
    with load_decoder("ar", folder, dtype="fp32", kv_budget=100) as decoder:
        assert len(decoder.generate([request])[0].tokens) == 5
        assert decoder.engine.runner.backend.weight_bytes < 0.8


def test_only_the_c_engine_reads_a_quantized_folder(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"are computed by the C engine only, .*--decoder openai"):
        _ = open_model(folder).model


def change(folder: Path, **tensors: Any) -> None:
    from safetensors.numpy import load_file

    found = load_file(folder / "model.safetensors")
    for name, value in tensors.items():
        key = f"model.layers.1.mlp.down_proj.{name}"
        found.pop(key)
        if value is not None:
            found[key] = value
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"qzeros": None}, r"lack model\.layers\.1\.mlp\.down_proj\.qzeros: download it again"),
        ({"scales": np.ones((4, 128), np.float16)}, r"shape of model\.layers\.1\.mlp\.down_proj\.scales is \(4, 128\)"),
        ({"g_idx": np.arange(256, dtype=np.int32) % 2}, r"GPTQ with reordered inputs \(desc_act\) can't be read here"),
        ({"g_idx": np.full(256, -1, np.int32)}, r"GPTQ with reordered inputs"),
    ],
)
def test_damaged_and_reordered_layers_are_refused_when_opened(folder: Path, tensors: Tensors, message: str) -> None:
    change(folder, **tensors)
    with pytest.raises(ModelError, match=message):
        open_model(folder)


def test_integers_of_another_type_are_refused(folder: Path) -> None:
    change(folder, qweight=np.ones((32, 128), np.float32))
    with pytest.raises(ModelError, match=r"have the type float32, not int32: download it again"):
        load_decoder("ar", folder, dtype="fp32", kv_budget=100)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        *(({"quant_method": name}, f"by the method {name!r}") for name in ("bitsandbytes", "fp8", "mxfp4", "eetq")),
        ({}, "by the method None"),
        ({**AWQ, "version": "gemv"}, "by AWQ in 4 bits in the layout 'gemv'"),
        ({**AWQ, "bits": 3}, "by AWQ in 3 bits"),
        ({**AWQ, "group_size": 48}, "in groups of 48 inputs"),
        ({**AWQ, "group_size": "x"}, "in groups of 'x' inputs"),
        ({**GPTQ, "bits": 2}, "by GPTQ in 2 bits"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "in the layout 'marlin'"),
        ({**GPTQ, "dynamic": {"-:lm_head": {}}}, "by layer"),
        (compressed("nvfp4-pack-quantized", type="float"), "float4 by group in the format 'nvfp4-pack-quantized'"),
        (compressed("pack-quantized", num_bits=2), "int2 by group"),
        (compressed("int-quantized", num_bits=8, strategy="tensor"), "int8 by tensor"),
        (compressed("pack-quantized", actorder="group"), "with reordered inputs"),
        ({**compressed("pack-quantized"), "transform_config": {"u": {}}}, "transforms"),
        ({**compressed("pack-quantized"), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "several schemes"),
        ({"quant_method": "compressed-tensors"}, "several schemes"),
    ],
)
def test_other_methods_are_refused_by_name_before_weights_are_read(
    folder: Path, quantization: dict[str, Any], message: str
) -> None:
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    with pytest.raises(ModelError) as error:
        load_decoder("ar", folder, kv_budget=100)
    assert message in str(error.value)
    assert "use a .gguf file of the model, or run it in a server" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_config_without_quantization_has_no_layout() -> None:
    assert layout_of(None) is None
