"""Loading GGUF files: a file gives its model and its tokenizer, or is refused."""

from __future__ import annotations

import json
import struct
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
from tot.decoders.errors import ModelError
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


def test_smollm_splits_digits_before_anything_else(tiny: Any) -> None:
    """Unlike transformers' GGUF tokenizer, keep two spaces together before a digit, as in SmolLM's training.

    transformers gives ['Ġ', 'Ġ', '5'] for two spaces and a digit.
    """
    tokenizer = build_tokenizer(read_gguf(tiny.path).metadata)
    for text, tokens in (
        ("hello  5", ["hello", "ĠĠ", "5"]),
        ("<|im_start|>1 hello", ["<|im_start|>", "1", "Ġhello"]),
    ):
        assert [tokenizer.convert_ids_to_tokens(i) for i in tokenizer.encode(text)] == tokens


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


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"pre": "viking"}, "tokenizer (gpt2, viking)"),
        ({"llama.rope.scaling.type": "yarn"}, "scaled RoPE"),
        ({"llama.context_length": 0}, "its context_length is 0"),
        ({"llama.rope.dimension_count": 8}, "part of each head"),
        ({"llama.embedding_length": 32}, "shape"),
        ({"llama.block_count": 3}, "it has no blk.2"),
        ({"llama.block_count": 1}, "its tensor blk.1"),
    ],
)
def test_a_file_with_an_unknown_feature_is_refused(
    changed: dict[str, Any], reason: str, tmp_path: Path, write_gguf: Callable[..., Any], one_line: Callable[..., str]
) -> None:
    made = write_gguf(tmp_path / "odd.gguf", **changed)
    with pytest.raises(ModelError, match=r"odd\.gguf can't be used") as error:
        load_model(made.path)
    assert reason in one_line(error)


@pytest.mark.parametrize("left", [0, 3, 20, 4000, 0.5, 0.999])
def test_a_truncated_gguf_error_says_to_download_it_again(
    tiny: Any, tmp_path: Path, left: float, one_line: Callable[..., str]
) -> None:
    whole = tiny.path.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: int(left if isinstance(left, int) else left * len(whole))])
    with pytest.raises(ModelError, match=r"cut\.gguf is not a readable GGUF file \(.+\): download it again") as error:
        load_model(cut)
    one_line(error)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("count", [100_000, 10**9, 2 * 10**9, 2**32 - 1])
def test_a_block_count_beyond_the_files_tensors_is_refused_before_anything_is_built(
    tmp_path: Path, write_gguf: Callable[..., Any], one_line: Callable[..., str], family: str, count: int
) -> None:
    made = write_gguf(tmp_path / "odd.gguf", family, **{f"{family}.block_count": count, "pre": "qwen2"})
    with pytest.raises(
        ModelError, match=rf"odd\.gguf can't be used: its block_count is {count:,}, but it has"
    ) as error:
        load_model(made.path)
    one_line(error)


KINDS, STRINGS, LISTS = 5, 8, 9
"""Types of a list's elements in a GGUF file: int32, string, list."""
LISTED = struct.pack("<Q", len("tokenizer.ggml.token_type")) + b"tokenizer.ggml.token_type" + struct.pack("<II", 9, 5)


def listing(kind: int, length: int, more: bytes = b"") -> Callable[[bytes], bytes]:
    """Change the element type and length of the file's list of token types, a list of int32."""

    def change(whole: bytes) -> bytes:
        at = whole.index(LISTED) + len(LISTED)
        return whole[: at - 4] + struct.pack("<IQ", kind, length) + more + whole[at + 8 :]

    return change


def padded(change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """Append zeros, so that a reader finds bytes at any offset."""
    return lambda whole: change(whole) + bytes(2**24)


def with_tensors(count: int) -> Callable[[bytes], bytes]:
    def change(whole: bytes) -> bytes:
        end = whole.index(b"token_embd.weight") - 8
        return whole[:8] + struct.pack("<Q", count) + whole[16:end]

    return change


@pytest.mark.parametrize(
    "change",
    [
        *(listing(kind, length) for kind in (0, KINDS, STRINGS, 12) for length in (2**23, 2**40, 2**63, 2**64 - 1)),
        *(padded(listing(kind, length)) for kind in (0, KINDS, STRINGS) for length in (2**23, 2**40, 2**63)),
        listing(LISTS, 2**62),
        listing(LISTS, 1, struct.pack("<IQ", LISTS, 1) * 3000),
        *(padded(with_tensors(count)) for count in (2**17, 2**40, 2**62, 2**64 - 1)),
        lambda whole: whole[:16] + struct.pack("<Q", 2**62) + whole[24:],
        lambda whole: whole[:100] + b"\xff" * 40 + whole[140:],
    ],
)
def test_impossible_counts_are_refused_before_they_are_read(
    tiny: Any, tmp_path: Path, one_line: Callable[..., str], change: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(change(tiny.path.read_bytes()))
    with pytest.raises(ModelError, match=r"odd\.gguf is not a readable GGUF file \(.+\): download it again") as error:
        load_model(path)
    one_line(error)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"expert_count": 0}, "num_local_experts=0"),
        ({"expert_count": 10**9}, "a mixture of 1000000000 experts"),
        ({"expert_used_count": 5}, "a mixture of 4 experts of size 32, 5 for each token"),
        ({"expert_used_count": 0}, "num_experts_per_tok=0"),
        ({"expert_count": 8}, r"blk.0.ffn_gate_exps.weight has shape (4, 32, 64)"),
        ({"expert_feed_forward_length": 16}, r"blk.0.ffn_gate_exps.weight has shape (4, 32, 64)"),
    ],
)
def test_impossible_mixtures_of_experts_are_refused(
    changed: dict[str, Any], reason: str, tmp_path: Path, write_gguf: Callable[..., Any], one_line: Callable[..., str]
) -> None:
    keys = {f"qwen3moe.{key}": value for key, value in changed.items()}
    made = write_gguf(tmp_path / "odd.gguf", "qwen3moe", **keys)
    with pytest.raises(ModelError) as error:
        load_model(made.path)
    assert reason in one_line(error)


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


def test_other_frequencies_are_refused(tmp_path: Path, write_gguf: Callable[..., Any]) -> None:
    made = write_gguf(tmp_path / "odd.gguf", divisors=[1.0] * 7 + [3.0])
    with pytest.raises(ModelError, match=r"odd\.gguf can't be used: it uses scaled RoPE of a type"):
        load_model(made.path)


@pytest.mark.parametrize(("dtype", "stored"), [("auto", np.dtype(np.float16)), ("fp32", None)])
def test_keys_and_values_are_float16_only_in_the_automatic_dtype_of_a_processor_without_bfloat16(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, stored: Any
) -> None:
    if not ((at := level()) and at.half_store):
        pytest.skip("needs a processor that converts float16")
    monkeypatch.setenv("TOT_CACHE", str(tmp_path))
    monkeypatch.setattr("tot.decoders.models.loading._cpu_computes_in_bf16", lambda: False)
    with open_engine(tiny.path, dtype=dtype, quantize="gguf", kv_budget=100) as engine:
        assert (engine.loaded.dtype, engine.loaded.store_dtype) == (np.float32, stored)
        assert engine.runner.slot_bytes == 2 * 2 * 2 * 16 * (4 if stored is None else 2)
