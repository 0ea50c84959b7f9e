"""Rotary tables equal the tables of transformers, for every supported type of scaling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from tot.decoders.errors import ModelError
from tot.decoders.models.rotary import RotaryTable

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 256},
]  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
@pytest.mark.parametrize(("family", "reference"), [("llama", LlamaRotaryEmbedding), ("qwen3", Qwen3RotaryEmbedding)])
def test_rows_equal_the_module_of_transformers(
    make_model: Callable[..., Any], family: str, reference: Any, scaling: dict[str, Any]
) -> None:
    config = make_model(family, rope_parameters=scaling).config
    table, module = RotaryTable(config, config.rope_parameters), reference(config)
    np.testing.assert_allclose(table.frequencies, module.inv_freq, rtol=1e-7)
    cosines, sines = table.rows(3000)
    expected = module(torch.empty(0), position_ids=torch.arange(3000)[None])
    # A last bit of a frequency, in which powers of libraries differ, is an angle of 3000 / 2**24 at the end.
    tolerance = 2e-7 if scaling["rope_type"] in ("default", "linear") else 3e-4
    for rows, of_transformers in ((cosines, expected[0][0]), (sines, expected[1][0])):
        assert rows.dtype == np.float32
        np.testing.assert_allclose(rows, of_transformers.numpy(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("factor", [-0.5, 1.5, 0.3])
def test_an_impossible_part_of_a_head_is_refused(make_model: Callable[..., Any], factor: float) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": factor}
    with pytest.raises(ModelError, match=f"partial_rotary_factor is {factor}"):
        RotaryTable(make_model("llama").config, rope)


@pytest.mark.parametrize(
    "rope",
    [{"rope_type": "axial", "rope_theta": 1e4}, {"rope_type": "linear", "rope_theta": 1e4}, {"rope_type": "llama3"}],
)
def test_rope_settings_that_are_unknown_or_missing_are_refused(make_model: Callable[..., Any], rope: Any) -> None:
    with pytest.raises(ModelError, match=rope["rope_type"]):
        RotaryTable(make_model("llama").config, {"rope_theta": 1e4, **rope})


def test_the_native_path_imports_neither_torch_nor_transformers(python: Any, smollm2: str) -> None:
    code = (
        "import sys; from tot.decoders import load_decoder, Request, Sampling;"
        f"d = load_decoder('ar', {smollm2!r}, kv_budget=200);"
        "d.generate([Request(prompt='hi', sampling=Sampling(max_tokens=2))]);"
        "print(d.engine.runner.backend.name, [name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    out, err = python("-c", code).communicate(timeout=120)
    assert err == ""
    assert out.startswith("transformers, ") or out.strip().endswith("[]")
