"""Weights in eight bits: their rounding, and the native forward in C that multiplies them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tot.decoders import OptionError, load_decoder
from tot.decoders.kernels.native.packing import quantized
from tot.decoders.models.families import FAMILIES


def stored(weight: Tensor) -> Tensor:
    """Return a weight in eight bits, whose scales and minimums are rounded to their stored 16 bits."""
    matrix = quantized(weight.numpy())
    scales, minimums = (
        (part * 2**10).astype(np.float16) / np.float32(2**10) for part in (matrix.scales, matrix.minimums)
    )
    return torch.from_numpy(replace(matrix, scales=scales, minimums=minimums).floats())


def test_weights_are_rounded_to_the_nearest_multiple_of_the_scale() -> None:
    weight = np.random.default_rng(0).standard_normal((40, 96), np.float32)
    matrix = quantized(weight)
    assert matrix.scales.shape == matrix.minimums.shape == (40, 3)
    scale = np.ptp(weight.reshape(40, -1, 32), -1) / 255
    error = np.abs(matrix.floats() - weight).reshape(40, -1, 32)
    assert bool((error <= 0.501 * scale[..., None]).all())
    assert int(matrix.integers.max()) == 255
    assert int(matrix.integers.min()) == 0
    equal = np.full((32, 64), -0.25, np.float32)
    assert np.array_equal(quantized(equal).floats(), equal)


@pytest.fixture
def off(lab: Any) -> Callable[[str, Any], float]:
    """Return the largest error of the native forward against rounded weights, relative to the logits' spread."""

    def furthest(family: str, quantize: Any) -> float:
        model = lab.known(family)
        reference, runner = copy.deepcopy(model), lab.open(model, quantize=quantize)
        for layer in reference.modules():
            if isinstance(layer, nn.Linear) and quantize is not None:
                layer.weight = nn.Parameter(stored(layer.weight.data))
                layer.__class__ = lab.rounding
        found = []
        for count in (1, 3, 8, 13):
            for logits, expected in lab.both(runner, reference, lab.texts(count)):
                assert expected.std() > 0.5
                found.append(float((logits - expected).pow(2).mean().sqrt() / expected.std()))
        return max(found)

    return furthest


@pytest.mark.parametrize("family", FAMILIES)
def test_eight_bit_logits_are_close_to_the_rounded_weights(off: Callable[[str, Any], float], family: str) -> None:
    assert off(family, "int8-dynamic") < 0.1


@pytest.mark.families
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize(("quantize", "bound"), [(None, 1e-4), ("int8-dynamic", 0.1)])
def test_vectors_of_every_length_give_close_logits(
    vectors: None, off: Callable[[str, Any], float], family: str, quantize: Any, bound: float
) -> None:
    assert off(family, quantize) < bound


@pytest.mark.parametrize(
    ("quantize", "changes", "message"),
    [
        ("int4", {}, "quantization 'int4'"),
        ("int8-dynamic", {"hidden_act": "gelu"}, "quantize=int8-dynamic needs a model of the families llama, mistral"),
    ],
)
def test_unsupported_quantization_is_refused(
    lab: Any, tokenizer: Any, quantize: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        load_decoder("ar", lab.known(**changes), tokenizer=tokenizer, kv_budget=100, quantize=quantize)
