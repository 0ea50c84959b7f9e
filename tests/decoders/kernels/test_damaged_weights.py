"""Damaged weights: one NaN anywhere ends in the error about it, in every kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tot.decoders import Engine, ModelError, Request, Sampling, load_decoder
from tot.decoders.kernels.native.tiles import Run, kernels_run, make_tiles
from tot.decoders.models.loaded import LoadedModel, number_type

WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 32}
WEIGHTS = [
    *(f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *("model.layers.1.input_layernorm.weight", "model.norm.weight", "lm_head.weight"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "integers"), [("llama", False), ("llama", True), ("gemma", False)])
def test_one_nan_weight_fails_the_request(
    lab: Any, make_model: Callable[..., Any], tokenizer: Any, family: str, dtype: torch.dtype, integers: bool
) -> None:
    if not kernels_run(32, 2, number_type(str(dtype).removeprefix("torch.")), "cpu"):
        pytest.skip("needs a C compiler, and a processor with AVX2 (or bfloat16 products)")

    def decode(model: Any) -> Any:
        loaded = lab.integers(model) if integers else LoadedModel.of(model)
        loaded.tokenizer = tokenizer
        with load_decoder("ar", engine=Engine(loaded, 100, owned=True)) as decoder:
            return decoder.generate([request])

    sound = make_model(family, **WIDE).to(dtype)
    request = Request(prompt="the rain on the", sampling=Sampling(max_tokens=3, ignore_eos=True))
    for name in WEIGHTS:
        model = make_model(family, **WIDE).to(dtype)
        weight = model.get_parameter(name)
        weight.view(-1)[weight.numel() // 2 + 3] = math.nan
        with pytest.raises(ModelError, match="the model's logits are not finite"):
            pytest.fail(f"{name}: {decode(model)}")
    assert len(decode(sound)[0].tokens) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("length", [5, 40, 700])
def test_only_rows_that_attend_to_a_nan_key_get_nan(
    kernel: Callable[..., Any], dtype: torch.dtype, length: int
) -> None:
    """Comparisons with NaN are false, so a maximum skips a NaN score at any position."""
    attend = kernel(32, dtype)
    runs = [Run(np.arange(start, start + length, dtype=np.int32), length - 3) for start in (0, length)]
    order, tiles = make_tiles(runs)
    random = torch.Generator().manual_seed(length)
    query = torch.randn(1, 6, 32, generator=random).to(dtype)
    for place in {0, 1, length // 3, length // 2, length - 4}:
        keys, values = (torch.randn(1, 2 * length, 32, generator=random).to(dtype) for _ in range(2))
        keys[0, place, 7] = math.nan
        finite = attend(query, keys, values, tiles, 0.3).isfinite().all(-1)[:, 0].view(2, 3)
        assert finite[order.index(1)].all()
        assert not finite[order.index(0)].any()
