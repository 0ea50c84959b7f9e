"""Damaged and hostile GGUF files: each is refused in one line, before memory is taken by its numbers."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tot.decoders import ModelError, load_decoder
from tot.decoders.models.gguf_quants import FLOATS, FORMATS
from tot.decoders.models.gguf_reader import read_gguf
from tot.decoders.models.loading import load_model

Change = Callable[[bytes], bytes]
INT32, STRING, LIST = 5, 8, 9
"""Types of a list's elements in a GGUF file."""
LISTED = struct.pack("<Q", len("tokenizer.ggml.token_type")) + b"tokenizer.ggml.token_type" + struct.pack("<II", 9, 5)


def listing(kind: int, length: int, more: bytes = b"") -> Change:
    """Change the element type and length of the file's list of token types, a list of int32."""

    def change(whole: bytes) -> bytes:
        at = whole.index(LISTED) + len(LISTED)
        return whole[: at - 4] + struct.pack("<IQ", kind, length) + more + whole[at + 8 :]

    return change


def padded(change: Change) -> Change:
    """Append zeros, so that a reader finds bytes at any offset."""
    return lambda whole: change(whole) + bytes(2**24)


def with_tensors(count: int) -> Change:
    return lambda whole: whole[:8] + struct.pack("<Q", count) + whole[16 : whole.index(b"token_embd.weight") - 8]


def first_tensor(offset: int, form: str, *values: int) -> Change:
    """Replace numbers after the name of the first tensor: its dimensions at 0, its sizes at 4, its type at 20."""

    def change(whole: bytes) -> bytes:
        at = whole.index(b"token_embd.weight") + len(b"token_embd.weight") + offset
        return whole[:at] + struct.pack(form, *values) + whole[at + struct.calcsize(form) :]

    return change


def truncated(left: float) -> Change:
    return lambda whole: whole[: int(left if isinstance(left, int) else left * len(whole))]


UNREADABLE = r"odd\.gguf is not a readable GGUF file \(.+\): download it again"
DAMAGES: dict[str, list[Change]] = {
    UNREADABLE: [
        *map(truncated, (0, 20, 4000, 0.999)),
        *(listing(kind, length) for kind in (INT32, STRING) for length in (2**23, 2**64 - 1)),
        *(padded(listing(kind, length)) for kind in (0, STRING) for length in (2**23, 2**63)),
        listing(LIST, 2**62),
        listing(LIST, 1, struct.pack("<IQ", LIST, 1) * 3000),
        *(padded(with_tensors(count)) for count in (2**17, 2**64 - 1)),
        lambda whole: whole[:16] + struct.pack("<Q", 2**62) + whole[24:],
        lambda whole: whole[:100] + b"\xff" * 40 + whole[140:],
    ],
    r"\(its tensor token_embd\.weight has no numbers\): download it again": [
        first_tensor(4, "<QQ", *sizes) for sizes in ((0, 1), (64, 0))
    ],
    "its tensor token_embd.weight has 4,294,967,295 dimensions": [padded(first_tensor(0, "<I", 2**32 - 1))],
}


@pytest.mark.parametrize(("message", "change"), [(text, one) for text, found in DAMAGES.items() for one in found])
def test_a_damaged_file_is_refused_in_one_line(
    tiny: Any, tmp_path: Path, one_line: Callable[..., str], message: str, change: Change
) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(change(tiny.path.read_bytes()))
    with pytest.raises(ModelError, match=message) as error:
        load_model(path)
    one_line(error)


@pytest.mark.parametrize(("number", "name"), [(18, "IQ3_XXS"), (28, "F64"), (2**32 - 1, "number 4294967295")])
def test_a_type_that_cannot_be_read_is_refused_by_name(
    tiny: Any, tmp_path: Path, one_line: Callable[..., str], number: int, name: str
) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(first_tensor(20, "<I", number)(tiny.path.read_bytes()))
    message = rf"odd\.gguf can't be used: its tensor token_embd\.weight has the type {name}, and readable"
    with pytest.raises(ModelError, match=message) as error:
        load_decoder("ar", path, kv_budget=100)
    assert all(kind in one_line(error) for kind in (*FLOATS, *FORMATS))


def test_damaged_bytes_anywhere_in_the_header_end_in_an_error_or_a_file(tiny: Any, tmp_path: Path) -> None:
    """No damage ends in another error than ModelError, or in a tensor past the end of the file."""
    whole, path, random = tiny.path.read_bytes(), tmp_path / "odd.gguf", np.random.default_rng(0)
    first = whole.index(b"token_embd.weight")
    refused = 0
    for place in (*random.integers(4, first + 2000, 150), *range(first - 8, first + 50)):
        path.write_bytes(whole[:place] + bytes([random.integers(256)]) + whole[place + 1 :])
        try:
            file = read_gguf(path)
        except ModelError:
            refused += 1
        else:
            assert all(tensor.data.nbytes <= len(whole) for tensor in file.tensors.values())
    assert refused > 30


@pytest.mark.parametrize(
    ("family", "changed", "reason"),
    [
        ("llama", {"pre": "viking"}, "odd.gguf can't be used: its tokenizer (gpt2, viking)"),
        ("llama", {"llama.rope.scaling.type": "yarn"}, "scaled RoPE"),
        ("llama", {"divisors": [1.0] * 7 + [3.0]}, "odd.gguf can't be used: it uses scaled RoPE of a type"),
        ("llama", {"llama.context_length": 0}, "its context_length is 0"),
        ("llama", {"llama.rope.dimension_count": 8}, "part of each head"),
        ("llama", {"llama.embedding_length": 32}, "shape"),
        ("llama", {"llama.block_count": 3}, "it has no blk.2"),
        ("llama", {"llama.block_count": 1}, "its tensor blk.1"),
        *(
            (family, {f"{family}.block_count": count}, f"odd.gguf can't be used: its block_count is {count:,}, but it")
            for family, count in (("llama", 100_000), ("gemma3", 2**32 - 1))
        ),
        ("qwen3moe", {"qwen3moe.expert_count": 0}, "num_local_experts=0"),
        ("qwen3moe", {"qwen3moe.expert_count": 10**9}, "a mixture of 1000000000 experts"),
        ("qwen3moe", {"qwen3moe.expert_used_count": 5}, "a mixture of 4 experts of size 32, 5 for each token"),
        ("qwen3moe", {"qwen3moe.expert_used_count": 0}, "num_experts_per_tok=0"),
        ("qwen3moe", {"qwen3moe.expert_count": 8}, "blk.0.ffn_gate_exps.weight has shape (4, 32, 64)"),
        ("qwen3moe", {"qwen3moe.expert_feed_forward_length": 16}, "blk.0.ffn_gate_exps.weight has shape (4, 32, 64)"),
    ],
)
def test_settings_that_do_not_fit_or_are_unknown_are_refused(
    tmp_path: Path,
    write_gguf: Callable[..., Any],
    one_line: Callable[..., str],
    family: str,
    changed: dict[str, Any],
    reason: str,
) -> None:
    """Impossible counts are refused before anything is built."""
    made = write_gguf(tmp_path / "odd.gguf", family, **({} if family == "llama" else {"pre": "qwen2"}), **changed)
    with pytest.raises(ModelError) as error:
        load_model(made.path)
    assert reason in one_line(error)
