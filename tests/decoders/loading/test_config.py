"""Configs built without transformers equal the configs of transformers, and refuse impossible values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tot.decoders.errors import ModelError
from tot.decoders.models.config import DEFAULTS, model_config
from tot.decoders.models.loading import open_model

_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_SMALL = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"rope_theta": 500000.0, "num_hidden_layers": 3},
    {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_scaling": {**_LLAMA3, "original_max_position_embeddings": 8192}},
    {"rope_scaling": _LLAMA3, "max_position_embeddings": 4000},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 7000.0}},
    {"num_hidden_layers": 30, "use_sliding_window": True, "sliding_window": 77, "max_window_layers": 2},
    {"sliding_window": None},
    {**_SMALL, "head_dim": 64},
    {**_SMALL, "head_dim": 32, "tie_word_embeddings": True, "eos_token_id": [3, 4], "bos_token_id": None},
    {"hidden_act": "gelu", "attention_bias": True, "rms_norm_eps": 1e-5},
]


@pytest.mark.parametrize("family", DEFAULTS)
def test_a_config_equals_that_of_transformers(family: str, tmp_path: Path) -> None:
    compared = 0
    for settings in SETTINGS:
        stored = {"model_type": family, **settings}
        (tmp_path / "config.json").write_text(json.dumps(stored))
        try:
            expected = AutoConfig.from_pretrained(tmp_path)
        except Exception:  # a scaling or an activation that the family does not have  # noqa: BLE001
            continue
        if family == "gemma3_text" and "rope_parameters" in settings:  # its layers' types differ
            continue
        ours = vars(model_config(stored))
        for name in ours.keys() - {"head_dim", "sliding_window_pattern"}:
            assert ours[name] == getattr(expected, name), (settings, name)
        heads = getattr(expected, "head_dim", None) or expected.hidden_size // expected.num_attention_heads
        assert ours["head_dim"] == heads
        compared += 1
    assert compared >= 8


def test_rope_parameters_by_layer_type_are_completed(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention"]
    rope = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_theta": 1e5}}
    stored = {"model_type": "gemma3_text", "num_hidden_layers": 2, "layer_types": types, "rope_parameters": rope}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert model_config(stored).rope_parameters == AutoConfig.from_pretrained(tmp_path).rope_parameters
    older = {
        "model_type": "gemma3_text",
        "rope_theta": 1e6,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"factor": 8.0},
    }
    older["rope_scaling"]["rope_type"] = "linear"
    (tmp_path / "config.json").write_text(json.dumps(older))
    assert model_config(older).rope_parameters == AutoConfig.from_pretrained(tmp_path).rope_parameters


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hidden_size": "64"}, "hidden_size='64', which is not a positive integer"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"vocab_size": -5}, "vocab_size=-5"),
        ({"vocab_size": 2**40}, "vocab_size=1099511627776"),
        ({"vocab_size": None}, "vocab_size=None"),
        ({"num_attention_heads": True}, "num_attention_heads=True"),
        ({"intermediate_size": 9.5}, "intermediate_size=9.5"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "3 attention heads, 2 key-value heads"),
        ({"hidden_size": 2, "num_attention_heads": 4, "head_dim": None}, "which do not fit"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan, which is not a number"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small'"),
        ({"rope_theta": 0}, "rope_theta=0, which is not a positive number"),
        ({"rope_theta": "big"}, "rope_theta='big'"),
        ({"rope_scaling": [1]}, "rope_scaling=[1], which is not a mapping"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -2}}, "factor=-2"),
        ({"layer_types": ["full_attention"]}, "which is not a list of the types of 2 layers"),
        ({"layer_types": 5}, "layer_types=5"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(
    wrong: dict[str, Any], message: str, one_line: Callable[..., str]
) -> None:
    with pytest.raises(ModelError) as error:
        model_config({"model_type": "qwen3", "num_hidden_layers": 2, **wrong})
    assert message in one_line(error)
    assert str(error.value).startswith("config.json has ")
    assert str(error.value).endswith("download it again")


@pytest.mark.parametrize("ends", [5, [5, 6]])
def test_end_tokens_come_from_the_generation_config_else_from_the_config(
    folder: Path, tmp_path: Path, ends: Any
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    expected = (5,) if ends == 5 else (5, 6)
    assert open_model(tmp_path).end_ids == expected
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": ends}))
    (tmp_path / "generation_config.json").unlink()
    assert open_model(tmp_path).end_ids == expected
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "<eos>"}))
    with pytest.raises(ModelError, match="eos_token_id is '<eos>', which is not a token"):
        open_model(tmp_path)
