"""Weights by name: their shapes by a config, and refused files that do not fit it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from tot.decoders import ModelError, Request, Sampling, load_decoder
from tot.decoders.kernels.native.forward import native_forward
from tot.decoders.models.loaded import end_ids
from tot.decoders.models.loading import load_model, open_model
from tot.decoders.models.weights import FolderWeights

SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
CONFIGS = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    ("gemma2", {}),
    ("gemma3_text", {}),
    ("phi3", {}),
    ("granite", {}),
    ("seed_oss", {}),
    ("qwen3_moe", {}),
    ("gpt_oss", {}),
]


@pytest.fixture
def saved(make_model: Callable[..., Any], tokenizer: Any, tmp_path: Path) -> Callable[..., Path]:
    def save(family: str = "llama", **changes: Any) -> Path:
        changes = {**SHAPE, **changes}
        shards = {"max_shard_size": changes.pop("max_shard_size")} if "max_shard_size" in changes else {}
        make_model(family, **changes).save_pretrained(tmp_path, **shards)
        tokenizer.save_pretrained(tmp_path)
        return tmp_path

    return save


@pytest.mark.parametrize(("family", "changes"), CONFIGS)
@pytest.mark.parametrize("shard", [None, "20KB"])
def test_a_folder_has_the_weights_of_its_module(
    saved: Callable[..., Path], family: str, changes: dict[str, Any], shard: str | None
) -> None:
    folder = saved(family, **changes, **({} if shard is None else {"max_shard_size": shard}))
    assert (folder / "model.safetensors.index.json").exists() == (shard is not None)
    for dtype in ("fp32", "bf16"):
        read, whole = open_model(folder, dtype=dtype), load_model(folder, dtype=dtype)
        assert isinstance(read.stored, FolderWeights)
        assert dict(read.weights.shapes) == dict(whole.weights.shapes)
        for name in read.weights:
            assert np.array_equal(read.weights.array(name), whole.weights.array(name))
        assert read.module is None
        assert (read.size, read.linear_sizes) == (whole.size, whole.linear_sizes)
        assert read.end_ids == end_ids(whole.model.generation_config.eos_token_id)


def change(folder: Path, **tensors: Any) -> None:
    """Replace tensors by name, with "." spelled "__". None removes a tensor."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name, value in tensors.items():
        weights.pop(name.replace("__", "."))
        if value is not None:
            weights[name.replace("__", ".")] = value
    save_file(weights, path, metadata={"format": "pt"})


def test_a_weight_of_another_shape_is_refused_before_c_reads_it(saved: Callable[..., Path]) -> None:
    folder = saved()
    change(folder, model__layers__1__mlp__down_proj__weight=torch.zeros(64, 32))
    with pytest.raises(ModelError, match=r"the shape of model\.layers\.1\.mlp\.down_proj\.weight is \(64, 32\)"):
        native_forward(open_model(folder, dtype="fp32"))
    with pytest.raises(ModelError, match=r"the shape of model\.layers\.1\.mlp\.down_proj"):
        load_decoder("ar", folder, kv_budget=100)


def test_names_that_only_transformers_knows_are_read_by_transformers(
    saved: Callable[..., Path], make_model: Callable[..., Any]
) -> None:
    """A base model's file has no prefix, and a tied head."""
    folder = saved(tie_word_embeddings=True)
    request = Request(prompt="the rain", sampling=Sampling(max_tokens=8, ignore_eos=True))
    with load_decoder("ar", folder, dtype="fp32", kv_budget=100) as decoder:
        expected = decoder.generate([request])[0].tokens
    weights = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): value for name, value in weights.items()}
    save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
    with load_decoder("ar", folder, dtype="fp32", kv_budget=100) as decoder:
        assert decoder.generate([request])[0].tokens == expected


def test_a_truncated_file_is_refused(saved: Callable[..., Path]) -> None:
    folder = saved()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"can't be (loaded|read)"):
        load_decoder("ar", folder, kv_budget=100)


@pytest.mark.parametrize("shard", ["../model.safetensors", 3, None, ["a"]])
def test_an_invalid_index_is_refused(saved: Callable[..., Path], shard: object) -> None:
    folder = saved()
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, shard)}))
    with pytest.raises(ModelError, match="can't be loaded"):
        load_decoder("ar", folder, kv_budget=100)


@pytest.mark.parametrize("start", ["language_model.model.", "model.language_model."])
def test_gemma3_with_images_runs_as_its_language_model(tmp_path: Path, tokenizer: Any, start: str) -> None:
    sizes = {**SHAPE, "vocab_size": len(tokenizer), "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "sliding_window": 8, "max_position_embeddings": 128}
    seen = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = Gemma3Config(
        text_config=sizes, vision_config={**seen, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=4
    )
    model = Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = {name.replace("language_model.model.", start): value for name, value in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    tokens = list(range(5, 25))
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
    loaded = open_model(tmp_path, dtype="fp32", device="cpu")
    assert (loaded.config.model_type, loaded.config.hidden_size) == ("gemma3_text", 64)
    assert isinstance(loaded.stored, FolderWeights)
    with torch.no_grad():
        module = loaded.model(input_ids=torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
    assert torch.allclose(module, expected, atol=1e-4)
    with load_decoder("ar", tmp_path, dtype="fp32", device="cpu", kv_budget=200) as decoder:
        request = Request(prompt=tuple(tokens), sampling=Sampling(max_tokens=1, ignore_eos=True))
        (found,) = decoder.generate([request])
    assert found.tokens == (int(expected.argmax()),)
    assert found.logprob == pytest.approx(float(expected.max()), abs=1e-3)
