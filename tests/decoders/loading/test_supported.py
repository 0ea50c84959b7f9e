"""Models that the engine can run, checked before their weights are read."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from tot.decoders.errors import ModelError
from tot.decoders.models.families import FAMILIES
from tot.decoders.models.loading import load_model
from tot.decoders.models.rotary import RotaryTable
from tot.decoders.models.supported import check_supported


@pytest.mark.parametrize(
    ("family", "options", "named"),
    [
        ("falcon", {}, "family 'falcon'"),
        ("mamba", {}, "family 'mamba'"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional attention (gemma3_text)"),
        ("llama", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention layers (llama)"),
        ("llama", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention layers (llama)"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rotary embeddings of the type 'dynamic', whose angles change with the length of a text (llama)",
        ),
    ],
)
def test_models_the_engine_cannot_run_are_refused(
    family: str, options: dict[str, Any], named: str, one_line: Callable[..., str]
) -> None:
    with pytest.raises(ModelError) as error:
        check_supported(AutoConfig.for_model(family, num_hidden_layers=2, **options))
    assert named in one_line(error)
    assert ", ".join(FAMILIES) in str(error.value)


@pytest.mark.parametrize("rope", [{"rope_type": "longrope"}, {"type": "su"}, {"full": {"rope_type": "dynamic"}}])
@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_rope_angles_that_depend_on_the_longest_text_are_refused(name: str, rope: dict[str, Any]) -> None:
    config = SimpleNamespace(model_type="phi3", num_hidden_layers=2, **{name: rope})
    with pytest.raises(ModelError, match=r"^rotary embeddings of the type"):
        check_supported(config)


@pytest.mark.parametrize(
    "rope",
    [
        *({"rope_type": "default", "partial_rotary_factor": factor} for factor in (-0.5, 1.5, 0.3)),
        *({"rope_type": "axial"}, {"rope_type": "linear"}, {"rope_type": "llama3"}),
    ],
    ids=str,
)
def test_impossible_rope_settings_are_refused(make_model: Callable[..., Any], rope: dict[str, Any]) -> None:
    """The error names the wrong part of a head, or the type that is unknown or lacks a setting."""
    named = f"partial_rotary_factor is {rope['partial_rotary_factor']}" if len(rope) > 1 else rope["rope_type"]
    with pytest.raises(ModelError, match=named):
        RotaryTable(make_model("llama").config, {"rope_theta": 10000.0, **rope})


@pytest.mark.parametrize(
    "changes",
    [
        {"num_local_experts": 0},
        {"num_local_experts": 10**9},
        {"num_local_experts": "many"},
        {"num_experts_per_tok": 200},
    ],
)
def test_impossible_mixtures_of_experts_are_refused(
    changes: dict[str, Any], tmp_path: Path, one_line: Callable[..., str]
) -> None:
    config = {**AutoConfig.for_model("qwen3_moe", num_hidden_layers=2).to_dict(), **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError) as error:
        load_model(tmp_path, tokenizer="mine")
    assert re.search("a mixture of|num_local_experts=", one_line(error))


@pytest.mark.parametrize("layers", [10**5, 2**70])
def test_a_config_with_too_many_layers_is_refused_before_they_are_built(
    folder: Path, tmp_path: Path, layers: int
) -> None:
    shutil.copytree(folder, tmp_path / "many")
    config = json.loads((tmp_path / "many" / "config.json").read_text())
    (tmp_path / "many" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    with pytest.raises(ModelError, match=f"^models of {layers:,} layers can.t be run here"):
        load_model(tmp_path / "many")


@pytest.mark.parametrize("method", ["awq", "mxfp4"])
def test_quantized_safetensors_are_refused(method: str, one_line: Callable[..., str]) -> None:
    config = AutoConfig.for_model("llama", num_hidden_layers=2)
    config.quantization_config = {"quant_method": method, "bits": 4}
    with pytest.raises(ModelError) as error:
        check_supported(config)
    assert one_line(error).startswith(f"safetensors quantized by the method '{method}' can't be read here: use a .gguf")


def test_an_unsupported_model_object_is_refused() -> None:
    with pytest.raises(ModelError, match="family 'bloom'"):
        load_model(SimpleNamespace(config=AutoConfig.for_model("bloom")), tokenizer="mine")
