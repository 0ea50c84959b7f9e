"""Loading GGUF files: a file gives its model and its tokenizer, or is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

from tot.decoders.engine.open_models import open_engine
from tot.decoders.engine.text import TextCodec
from tot.decoders.kernels.native.library import level
from tot.decoders.models.gguf_reader import read_gguf
from tot.decoders.models.gguf_tokenizer import build_tokenizer, end_tokens
from tot.decoders.models.loading import load_model


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "granite", "smollm3", "seed_oss"),
        *("qwen3moe", "gpt-oss"),
    ],
)
def test_a_gguf_gives_the_logits_of_its_source_model(
    family: str, tmp_path: Path, write_gguf: Callable[..., Any], logits: Callable[..., torch.Tensor]
) -> None:
    made = write_gguf(tmp_path / "tiny.gguf", family, **({"pre": "qwen2"} if family != "llama" else {}))
    loaded = load_model(made.path, dtype="fp32", device="cpu")
    loaded.model.set_attn_implementation(made.model.config._attn_implementation)
    torch.testing.assert_close(logits(loaded.model), logits(made.model), atol=1e-5, rtol=1e-5)
    for name in ("model_type", "rope_parameters", "layer_types"):
        assert getattr(loaded.model.config, name, None) == getattr(made.model.config, name, None)
    assert not loaded.model.training
    assert not any(weight.requires_grad for weight in loaded.model.parameters())


def test_the_module_of_a_file_has_tied_embeddings_and_the_end_tokens(tiny: Any) -> None:
    loaded = load_model(str(tiny.path))
    settings = loaded.model.generation_config
    assert (settings.bos_token_id, settings.eos_token_id, settings.pad_token_id) == (1, [2, 0], 0)
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight


_DIGITS = ["1", "2", "3", "4", "5"]
PIECES = {
    "gpt-2": ["Don", "'", "T", " HelloWORLD", " 12345", "!!/", "\n\n", " ok"],
    "starcoder": ["Don", "'", "T", " HelloWORLD", " ", *_DIGITS, "!!/", "\n\n", " ok"],
    "qwen2": ["Don", "'T", " HelloWORLD", " ", *_DIGITS, "!!/\n\n", " ok"],
    "deepseek-r1-qwen": ["Don", "'T", " HelloWORLD", " ", *_DIGITS, "!!/\n\n", " ok"],
    "qwen35": ["Don", "'T", " HelloWORLD", " ", *_DIGITS, "!!/\n\n", " ok"],
    "llama-bpe": ["Don", "'T", " HelloWORLD", " ", "123", "45", "!!/\n\n", " ok"],
    "seed-coder": ["Don", "'T", " HelloWORLD", " ", *_DIGITS, "!!/", "\n\n", " ok"],
    "gpt-4o": ["Don'T", " Hello", "WORLD", " ", "123", "45", "!!/\n\n", " ok"],
    "llama4": ["Don'T", " Hello", "WORLD", " ", "123", "45", "!!/\n\n", " ok"],
    "tekken": ["Don", "'T", " Hello", "WORLD", " ", *_DIGITS, "!!/\n\n", " ok"],
    "deepseek-coder": ["Don", "'", "T", " HelloWORLD", " ", *_DIGITS, "!!/", "\n", "\n", " ok"],
}


def bytes_only(rule: str) -> Any:
    """Build a tokenizer that merges nothing but "he"."""
    tokens = ["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "hel"]
    given = {"model": "gpt2", "pre": rule, "tokens": tokens, "merges": ["h e"], "bos_token_id": 0}
    return build_tokenizer({f"tokenizer.ggml.{name}": value for name, value in given.items()})


@pytest.mark.parametrize("rule", PIECES)
def test_a_rule_splits_text_into_these_pieces(rule: str) -> None:
    text = "Don'T HelloWORLD 12345!!/\n\n ok"
    tokenizer = bytes_only(rule)
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    assert [text[begin:end] for _, (begin, end) in split(text)] == PIECES[rule]
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    combining = "e\u0301a"  # a letter, a combining mark, a letter
    joined = rule in ("qwen35", "gpt-4o", "llama4", "tekken")
    assert (len(split(combining)) == 1) == joined


def test_sentencepiece_vocabularies_survive_serialization(tiny: Any, tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "hi", "▁hi"]
    writer = gguf.GGUFWriter(tmp_path / "spm.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * 259 + [-1.0, -2.0, -3.0, -0.5, -0.2])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * 5)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    direct = build_tokenizer(read_gguf(tmp_path / "spm.gguf").metadata)
    direct.save_pretrained(tmp_path / "saved")
    tiny.model.config.save_pretrained(tmp_path / "saved")
    cached = PreTrainedTokenizerFast.from_pretrained(tmp_path / "saved")
    reference = LlamaTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[("h", "i"), ("▁", "hi")])
    for text in ["hi", "hi hi", "hi  hi", "é"]:
        assert cached.encode(text) == direct.encode(text)
        assert cached.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False)
    assert cached.encode("hi")[0] == 1
    assert "is_local" not in json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())


@pytest.mark.parametrize(
    ("declared", "tokens", "ends"),
    [
        ({"eos": 1}, {"<|im_end|>": 3, "<|endoftext|>": 3, "a": 1}, [1, 0]),
        ({"eos": 0, "eot": 2, "eom": 2}, {"<eos>": 3, "<pad>": 3, "<end_of_turn>": 3}, [0, 2]),
        ({}, {"<|eot_id|>": 3, "<|eom_id|>": 3, "<|end|>": 3, "<|end_of_text|>": 3}, [0, 1, 2, 3]),
        ({}, {"<EOT>": 3, "_<EOT>": 3, "[EOS]": 3, "[EOT]": 3, "</s>": 3, "<s>": 3}, [0, 1, 2, 3, 4]),
        ({}, {"<|im_end|>": 1, "<|im_start|>": 3, "<end_of_turn>": 4}, [0, 2]),  # llama.cpp goes by the name alone
        ({}, {"</s>": 4, "<s>": 4, "<table>": 4}, []),  # HTML, as in Gemma's vocabulary
        ({"eos": 9, "eot": 2**32 - 1, "eom": -1}, {"<|im_end|>": 3}, [0]),  # not tokens of this vocabulary
    ],
)
def test_end_tokens_are_the_files_own_and_the_names_that_llama_cpp_knows(
    declared: dict[str, int], tokens: dict[str, int], ends: list[int]
) -> None:
    metadata = {f"tokenizer.ggml.{name}_token_id": token for name, token in declared.items()}
    metadata |= {"tokenizer.ggml.tokens": list(tokens), "tokenizer.ggml.token_type": list(tokens.values())}
    assert end_tokens(metadata) == ends


def test_an_end_token_of_type_normal_is_one_control_token(tiny: Any) -> None:
    file = read_gguf(tiny.path)
    kinds = [1 if kind == 3 and i == 2 else kind for i, kind in enumerate(file.metadata["tokenizer.ggml.token_type"])]
    tokenizer = build_tokenizer({**file.metadata, "tokenizer.ggml.token_type": kinds})
    assert tokenizer.encode("hello<|im_end|>")[-1] == 2
    assert 2 not in TextCodec(tokenizer).encode("hello<|im_end|>")


def llama3_divisors() -> list[float]:
    """Return the divisors of RoPE's frequencies that llama.cpp's converter writes for Llama 3.2."""
    plain = 1 / 5000.0 ** (np.arange(0, 16, 2) / 16)
    turns = 8192 * plain / (2 * np.pi)
    smooth = np.clip((turns - 1) / 3, 0, 1)
    return (1 / ((1 - smooth) / 32 + smooth)).tolist()


def test_llama3_frequencies_are_read_from_the_file(
    tmp_path: Path, write_gguf: Callable[..., Any], logits: Callable[..., torch.Tensor]
) -> None:
    made = write_gguf(tmp_path / "tiny.gguf", pre="llama-bpe", divisors=llama3_divisors())
    loaded = load_model(made.path, dtype="fp32", device="cpu")
    assert loaded.model.config.rope_parameters == made.model.config.rope_parameters
    assert loaded.model.config.rope_parameters["rope_type"] == "llama3"
    torch.testing.assert_close(logits(loaded.model), logits(made.model), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "stored"), [("auto", np.dtype(np.float16)), ("fp32", None)])
def test_keys_and_values_are_float16_only_in_the_automatic_dtype_of_a_processor_without_bfloat16(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, stored: Any
) -> None:
    if not ((at := level()) and at.half_store):
        pytest.skip("needs a processor that converts float16")
    monkeypatch.setattr("tot.decoders.models.loading._cpu_computes_in_bf16", lambda: False)
    with open_engine(tiny.path, dtype=dtype, quantize="gguf", kv_budget=100) as engine:
        assert (engine.loaded.dtype, engine.loaded.store_dtype) == (np.float32, stored)
        assert engine.runner.slot_bytes == 2 * 2 * 2 * 16 * (4 if stored is None else 2)
