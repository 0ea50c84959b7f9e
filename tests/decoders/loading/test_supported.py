"""Which models the engine can run, judged before their weights are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig, Qwen2Config

from tot.decoders.errors import ModelError
from tot.decoders.models.loading import load_model
from tot.decoders.models.supported import TESTED_FAMILIES, check_supported


@pytest.mark.parametrize(
    ("family", "options", "named"),
    [
        ("gpt2", {}, "family 'gpt2'"),
        ("gemma2", {}, "family 'gemma2'"),
        ("mistral", {"sliding_window": 4096}, "sliding-window attention (mistral, 4096 tokens)"),
        ("phi3", {"sliding_window": 2047}, "sliding-window attention (phi3"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, "sliding_attention layers (qwen2)"),
        ("llama", {"attn_logit_softcapping": 50.0}, "soft-capped attention (llama)"),
        ("llama", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention layers (llama)"),
        ("llama", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention layers (llama)"),
    ],
)
def test_models_the_engine_cannot_run_are_refused(
    family: str, options: dict[str, Any], named: str, one_line: Callable[..., str]
) -> None:
    with pytest.raises(ModelError) as error:
        check_supported(AutoConfig.for_model(family, num_hidden_layers=2, **options))
    assert named in one_line(error)
    assert ", ".join(TESTED_FAMILIES) in str(error.value)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("qwen2", {"sliding_window": 32768, "use_sliding_window": False}),
        ("qwen2", {"sliding_window": 32768, "use_sliding_window": True, "max_window_layers": 2}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": None}),
        ("gemma", {}),
        ("phi3", {"sliding_window": None}),
    ],
)
def test_tested_families_with_plain_attention_pass(family: str, options: dict[str, Any]) -> None:
    config = AutoConfig.for_model(family, num_hidden_layers=2, **options)
    assert family in TESTED_FAMILIES
    check_supported(config)
    check_supported(SimpleNamespace(**config.to_dict()))  # and as config.json spells it


def test_windows_are_judged_from_config_json_as_from_transformers() -> None:
    """Published Qwen2 configurations name a window that no layer uses, without `layer_types`."""
    plain = {"model_type": "qwen2", "sliding_window": 32768, "num_hidden_layers": 28, "max_window_layers": 21}
    check_supported(SimpleNamespace(**plain, use_sliding_window=False))
    check_supported(SimpleNamespace(**{**plain, "max_window_layers": 28}, use_sliding_window=True))
    with pytest.raises(ModelError, match="sliding-window"):
        check_supported(SimpleNamespace(**plain, use_sliding_window=True))


def test_an_unsupported_folder_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    AutoConfig.for_model("gpt2").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError, match="family 'gpt2'"):
        load_model(tmp_path)


def test_an_unsupported_model_object_is_refused() -> None:
    config = Qwen2Config(use_sliding_window=True, max_window_layers=0, num_hidden_layers=1)
    with pytest.raises(ModelError, match="sliding_attention"):
        load_model(SimpleNamespace(config=config), tokenizer="mine")
