"""The quantized integers of GGUF files: unpacked as by the `gguf` package, and multiplied without conversion."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import nn

from tot.decoders import OptionError, Request, Sampling, load_decoder
from tot.decoders.kernels.native.packed_file import PackedWeights
from tot.decoders.models.gguf_quants import FORMATS, Array, QuantizedMatrix, unpack

FIXED: dict[str, tuple[int, ...]] = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),
}
"""Offsets of a block's 16-bit floats. Other formats have them at the start."""


def stored(kind: str, outputs: int, inputs: int, seed: int = 0) -> Any:
    """Return a tensor of random blocks, as the `gguf` package reads it."""
    random, quantization = np.random.default_rng(seed), gguf.GGMLQuantizationType[kind]
    size, taken = gguf.GGML_QUANT_SIZES[quantization]
    blocks = random.integers(0, 256, (outputs * inputs // size, taken), dtype=np.uint8)
    for place in FIXED.get(kind, (0,)):
        halves = random.uniform(0.0003, 0.0006, (len(blocks), 1)).astype(np.float16)
        blocks[:, place : place + 2] = halves.view(np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = random.integers(118, 122, len(blocks))  # the exponent of a scale
    return SimpleNamespace(tensor_type=quantization, data=blocks.reshape(outputs, -1))


@pytest.mark.parametrize(
    ("kind", "outputs", "exponent"),
    [
        *((kind, outputs, None) for kind in FORMATS for outputs in (6, 2 * 256 + 3)),
        *(("MXFP4", 4, e) for e in (0, 1, 2, 250)),
    ],
)
def test_unpacked_numbers_scales_and_minimums_equal_ggufs(
    floats: Callable[[QuantizedMatrix], Array], kind: str, outputs: int, exponent: int | None
) -> None:
    """Experts are unpacked one below the other."""
    tensor = stored(kind, outputs, 512)
    if exponent is not None:
        tensor.data.reshape(outputs * 512 // 32, -1)[:, 0] = exponent
    expected = gguf.dequantize(tensor.data, tensor.tensor_type)
    for experts in (1, 2) if outputs % 2 == 0 else (1,):
        tensor.data = tensor.data.reshape(experts, outputs // experts, -1) if experts > 1 else tensor.data
        matrix = unpack(tensor)
        assert matrix is not None
        assert np.array_equal(floats(matrix), expected)
        assert int(matrix.integers.max()) < 2**matrix.bits
        assert matrix.bits == (8 if kind in ("Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0") else 4)


LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head")
KINDS = {
    "llama": ("Q4_K", "Q6_K", "Q8_0", "Q4_0", "Q8_0", "Q4_1", "Q6_K", "Q6_K", ""),
    "qwen2": ("IQ4_NL", "Q2_K", "MXFP4", "Q3_K", "IQ4_XS", "IQ4_NL", "Q2_K", "IQ4_XS", "MXFP4"),
}
"""The format of each layer, by family."""


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen2", marks=pytest.mark.families)])
def test_a_files_quantized_numbers_are_multiplied_without_conversion(lab: Any, vectors: None, family: str) -> None:
    """Cover mixed formats in one product, four and eight bits, codebooks, groups of 32 and 16, one row and many.

    The embedding is quantized too, alone or as the tied head.
    """
    tied = family == "llama"
    model = lab.known(family, hidden_size=256, intermediate_size=256, head_dim=64, tie_word_embeddings=tied)
    reference, numbers = copy.deepcopy(model), {}
    for name, other in reference.named_modules():
        if isinstance(other, nn.Linear | nn.Embedding) and not (tied and name == "lm_head"):
            kind = KINDS[family][LAYERS.index(name.rpartition(".")[2])]
            tensor = stored(kind, *other.weight.shape, seed=len(numbers))
            numbers[f"{name}.weight"] = unpack(tensor)
            other.weight = nn.Parameter(torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)))
        if isinstance(other, nn.Linear):
            other.__class__ = lab.rounding
    if tied:
        reference.lm_head.weight = reference.model.embed_tokens.weight
    loaded = lab.integers(model, numbers)
    runner = lab.open(loaded, 3000)
    assert isinstance(loaded.stored, PackedWeights)
    assert 0.7 < runner.backend.weight_bytes < 1.2
    for count in (1, 3, 8, 13):
        for logits, expected in lab.both(runner, reference, lab.texts(count)):
            assert expected.std() > 0.05
            assert (logits - expected).pow(2).mean().sqrt() < 0.03 * expected.std()


def test_a_model_without_a_gguf_file_cannot_use_gguf_quantization(lab: Any, tokenizer: Any) -> None:
    with pytest.raises(OptionError, match=r"quantize=gguf uses the integers of a \.gguf file"):
        load_decoder("ar", lab.known(), tokenizer=tokenizer, kv_budget=100, quantize="gguf")


@pytest.mark.real
def test_the_embedded_model_decodes_with_its_files_quantized_numbers(lab: Any) -> None:
    """The text equals float32 decoding while its tokens are clearly the most likely.

    Inputs are rounded, so two nearly equally likely tokens can swap places between processors.
    """
    lab.require_kernels()
    ask = Request(prompt="The capital of France is", sampling=Sampling(max_tokens=3))
    written = []
    for quantize in ("none", "gguf"):
        with load_decoder("ar", "smollm2-135m", kv_budget=500, dtype="fp32", quantize=quantize) as decoder:
            written.append(decoder.generate([ask])[0].text)
            if quantize == "gguf":
                assert decoder.engine.runner.backend.name == "C, weights kept in gguf"
                assert decoder.engine.runner.backend.weight_bytes < 0.75
    assert written[0] == written[1]
