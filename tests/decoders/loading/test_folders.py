"""Loading folders and model objects: no weights are invented, unpickled or replaced by code that runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from tot.decoders.errors import ModelError, OptionError
from tot.decoders.models.loading import load_model


def test_a_folder_loads_silently_and_keeps_the_logging_settings(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    transformers_logging.set_verbosity_info()
    transformers_logging.enable_progress_bar()
    try:
        loaded = load_model(str(folder), dtype="float16", device="cpu")
        assert transformers_logging.get_verbosity() == transformers_logging.INFO
        assert transformers_logging.is_progress_bar_enabled()
    finally:
        transformers_logging.set_verbosity_warning()
    assert capfd.readouterr() == ("", "")
    assert (loaded.name, loaded.dtype, loaded.device) == (str(folder), "float16", "cpu")
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.float16}


def test_a_model_object_passes_through(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tot.decoders.models.loading._cpu_computes_in_bf16", lambda: True)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded = load_model(model, tokenizer="mine")
    assert loaded.model is model
    assert loaded.tokenizer == "mine"
    assert loaded.dtype == "float32"
    again = load_model(model, tokenizer="mine", dtype="bf16", device="cpu")
    assert (again.model.dtype, again.dtype) == (torch.bfloat16, "bfloat16")
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32  # RoPE is not rounded with the weights
    with pytest.raises(OptionError, match="pass tokenizer="):
        load_model(model)


def test_pickled_weights_are_refused(folder: Path, tmp_path: Path, one_line: Callable[..., str]) -> None:
    place = shutil.copytree(folder, tmp_path / "pickled")
    torch.save(load_file(place / "model.safetensors"), place / "pytorch_model.bin")
    (place / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"safetensors or GGUF only: convert them once.*save_pretrained") as error:
        load_model(place)
    one_line(error)


def test_a_missing_shard_is_named(folder: Path, tmp_path: Path) -> None:
    place = shutil.copytree(folder, tmp_path / "sharded")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    (place / "model.safetensors").rename(place / "model-00001-of-00002.safetensors")
    with pytest.raises(ModelError, match="has no model-00002-of-00002"):
        load_model(place)


def test_a_missing_weight_is_refused(folder: Path, tmp_path: Path) -> None:
    place = shutil.copytree(folder, tmp_path / "holed")
    weights = load_file(place / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(place)


def test_a_folder_with_a_gguf_points_at_the_file(tiny: Any, folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    shutil.copy(tiny.path, tmp_path)
    with pytest.raises(ModelError, match=r"give the path of the GGUF file instead, .*tiny\.gguf"):
        load_model(tmp_path)


def test_code_from_a_folder_is_never_run(folder: Path, tmp_path: Path) -> None:
    place = shutil.copytree(folder, tmp_path / "custom")
    config = json.loads((place / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
    (place / "config.json").write_text(json.dumps(config))
    (place / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ModelError, match="family 'evil'"):
        load_model(place)
    assert not (tmp_path / "ran").exists()
