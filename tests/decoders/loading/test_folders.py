"""Loading folders and model objects: no weights are invented, unpickled or replaced by code that runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from tot.decoders import ModelError, OptionError, load_decoder
from tot.decoders.models.loading import load_model


def test_a_folder_loads_silently_and_keeps_the_logging_settings(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    transformers_logging.set_verbosity_info()
    transformers_logging.enable_progress_bar()
    try:
        loaded = load_model(str(folder), dtype="float32", device="cpu")
        assert transformers_logging.get_verbosity() == transformers_logging.INFO
        assert transformers_logging.is_progress_bar_enabled()
    finally:
        transformers_logging.set_verbosity_warning()
    assert capfd.readouterr() == ("", "")
    assert (loaded.name, loaded.dtype, loaded.device) == (str(folder), "float32", "cpu")
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.float32}


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


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(place: Path, **tensors: Any) -> None:
    """Replace tensors by name, with "." spelled "__". None removes a tensor."""
    path = place / "model.safetensors"
    weights = load_file(path)
    for name, value in tensors.items():
        weights.pop(name.replace("__", "."))
        if value is not None:
            weights[name.replace("__", ".")] = value
    save_file(weights, path, metadata={"format": "pt"})


def pickled(place: Path) -> None:
    torch.save(load_file(place / "model.safetensors"), place / "pytorch_model.bin")
    (place / "model.safetensors").unlink()


def without_a_shard(place: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    (place / "model.safetensors").rename(place / "model-00001-of-00002.safetensors")


def with_shards(shard: object) -> Callable[[Path], None]:
    def change(place: Path) -> None:
        names = load_file(place / "model.safetensors")
        index = {"weight_map": dict.fromkeys(names, shard)}
        (place / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


def truncated(place: Path) -> None:
    path = place / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def gguf_instead(place: Path) -> None:
    (place / "model.safetensors").rename(place / "tiny.gguf")


def with_code(place: Path) -> None:
    own = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    edit_json(place / "config.json", model_type="evil", auto_map=own)
    (place / "evil.py").write_text(f"open({str(place.parent / 'ran')!r}, 'w')")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (pickled, r"safetensors or GGUF only: convert them once.*save_pretrained"),
        (without_a_shard, "has no model-00002-of-00002"),
        *((with_shards(shard), "can't be loaded") for shard in ("../model.safetensors", 3, None, ["a"])),
        (truncated, r"can't be (loaded|read)"),
        (partial(edit_weights, model__layers__1__mlp__up_proj__weight=None), r"lack model\.layers\.1\.mlp\.up_proj"),
        (
            partial(edit_weights, model__layers__1__mlp__down_proj__weight=torch.zeros(64, 32)),
            r"the shape of model\.layers\.1\.mlp\.down_proj\.weight is \(64, 32\)",
        ),
        (gguf_instead, r"give the path of the GGUF file instead, .*tiny\.gguf"),
        (with_code, "family 'evil'"),
    ],
)
def test_a_damaged_or_hostile_folder_is_refused_in_one_line(
    folder: Path, tmp_path: Path, one_line: Callable[..., str], damage: Callable[[Path], None], message: str
) -> None:
    """No weights are invented, unpickled or read by wrong shapes, and no code of the folder runs."""
    place = shutil.copytree(folder, tmp_path / "place")
    damage(place)
    with pytest.raises(ModelError, match=message) as error:
        load_decoder("ar", place, kv_budget=100)
    one_line(error)
    with pytest.raises(ModelError, match=message):
        load_model(place)
    assert not (tmp_path / "ran").exists()
