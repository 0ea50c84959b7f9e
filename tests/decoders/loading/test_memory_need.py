"""The memory that several models need, estimated from their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from tot.decoders import ModelError
from tot.decoders.models.memory import MAX_TOKENS, Need, check_memory, split_budget


def test_a_folder_needs_the_size_of_its_weights(make_model: Callable[..., Any], tmp_path: Path) -> None:
    model = make_model()
    model.save_pretrained(tmp_path)
    need = Need.of(tmp_path, "fp32", "cpu", integers=False)
    assert need.weights == (tmp_path / "model.safetensors").stat().st_size
    config = model.config
    assert need.slot == 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4


def test_a_gguf_file_needs_its_integers_or_a_float_per_weight(tiny: Any) -> None:
    path, model = tiny.path, tiny.model
    numbers = sum(weight.numel() for weight in model.parameters())
    assert Need.of(path, "auto", "cpu", integers=True).weights < path.stat().st_size
    whole, half = (Need.of(path, dtype, "cuda", integers=False) for dtype in ("fp32", "bf16"))
    assert (whole.weights, half.weights) == (4 * numbers, 2 * numbers)
    assert whole.slot == 2 * half.slot == 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, dimensions, bytes


def test_damaged_files_are_model_errors(make_model: Callable[..., Any], tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": "big"}))
    with pytest.raises(ModelError, match=r"config\.json has hidden_size='big'"):
        Need.of(tmp_path, "fp32", "cpu", integers=False)
    writer = gguf.GGUFWriter(tmp_path / "empty.gguf", "qwen2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=rf"{tmp_path}/empty\.gguf can't be loaded"):
        Need.of(tmp_path / "empty.gguf", "auto", "cpu", integers=True)


def test_models_that_do_not_fit_are_refused_with_their_sizes() -> None:
    needs = [Need("small.gguf", 2**29, 1024), Need("large.gguf", 2**31, 2048)]
    numbers = r"^the models need 2\.5 GiB \(small\.gguf 0\.5, large\.gguf 2\.0\) and 1\.0 GiB are free: free memory,"
    with pytest.raises(ModelError, match=numbers):
        check_memory(needs, 2**30)


@pytest.mark.parametrize(("room", "tokens"), [(10_000 * 3072, 10_000), (1, 4096), (10 * MAX_TOKENS * 3072, MAX_TOKENS)])
def test_a_split_budget_holds_equally_many_tokens_of_each_model(room: int, tokens: int) -> None:
    needs = [Need("small", 0, 1024), Need("large", 0, 2048)]
    assert split_budget(needs, room) == [f"{tokens}KiB", f"{2 * tokens}KiB"]
