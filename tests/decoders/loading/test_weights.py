"""Weights by name: their shapes by a config, and refused files that do not fit it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from tot.decoders import Request, Sampling, load_decoder
from tot.decoders.models.families import FAMILIES
from tot.decoders.models.loaded import end_ids
from tot.decoders.models.loading import load_model, open_model
from tot.decoders.models.weights import FolderWeights

SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
CONFIGS = [
    *((family, {}) for family in FAMILIES),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("family", "changes"), CONFIGS)
@pytest.mark.parametrize("shard", [None, "20KB"])
def test_a_folder_has_the_weights_of_its_module(
    save_model: Callable[..., Path], family: str, changes: dict[str, Any], shard: str | None
) -> None:
    folder = save_model(family, **{**SHAPE, **changes}, **({} if shard is None else {"max_shard_size": shard}))
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


def test_names_that_only_transformers_knows_are_read_by_transformers(save_model: Callable[..., Path]) -> None:
    """A base model's file has no prefix, and a tied head."""
    folder = save_model(tie_word_embeddings=True, **SHAPE)
    request = Request(prompt="the rain", sampling=Sampling(max_tokens=8, ignore_eos=True))
    with load_decoder("ar", folder, dtype="fp32", kv_budget=100) as decoder:
        expected = decoder.generate([request])[0].tokens
    weights = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): value for name, value in weights.items()}
    save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
    with load_decoder("ar", folder, dtype="fp32", kv_budget=100) as decoder:
        assert decoder.generate([request])[0].tokens == expected


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
