"""Helpers for the tests of loading: tiny models, and GGUF files as llama.cpp's converter writes them.

pytest imports with `importlib`, so tests get these functions and factories as fixtures.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tot.decoders.models import gguf_cache, gguf_convert
from tot.decoders.models.gguf_convert import read_gguf
from tot.decoders.models.gguf_tokenizer import build_tokenizer
from tot.decoders.models.loading import load_model
from tot.decoders.models.model_names import KNOWN_MODELS

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|tool|>"]
USER_DEFINED = ["<think>"]
MERGES = ["Ġ Ġ", "h e", "l l", "he ll", "hell o", "Ġ w", "Ċ Ċ", "Ġ hello"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def bytes_to_unicode() -> list[str]:
    """Return GPT-2's spelling of the 256 bytes, independently of the code under test."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


class Tiny(NamedTuple):
    path: Path
    model: Any


def write_gguf(path: Path, family: str = "llama", **changed: Any) -> Tiny:
    """Create a random model of a family, and the GGUF file that llama.cpp's converter would write for it."""
    tokens = [*CONTROL, *USER_DEFINED, *bytes_to_unicode(), *(merge.replace(" ", "") for merge in MERGES)]
    blocks = 7 if family == "gemma3" else 2  # the sixth of seven layers has no window
    options: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": blocks, "head_dim": 16}
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    if family == "gemma3":
        options |= {"sliding_window": 9, "query_pre_attn_scalar": 16}
        rope = {"full_attention": rope, "sliding_attention": {**rope, "rope_theta": 10000.0}}
    config = AutoConfig.for_model(
        {"gemma3": "gemma3_text"}.get(family, family),
        vocab_size=len(tokens),
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=family != "qwen2",
        max_position_embeddings=128,
        rope_parameters=rope,
        **options,
    )
    torch.manual_seed(changed.pop("seed", 0))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for weight in model.parameters():
        weight.data = torch.randn_like(weight).mul(0.2).to(torch.bfloat16).float()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(blocks)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(5000.0)
    if family in ("qwen3", "gemma3"):
        writer.add_key_length(16)
    if family == "gemma3":
        writer.add_sliding_window(9)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changed.pop("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(CONTROL) + [4] + [1] * (len(tokens) - len(CONTROL) - 1))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for key, value in changed.items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            stem, _, suffix = name.rpartition(".")
            values = weight + 1 if family == "gemma3" and "norm" in name else weight
            if family == "llama" and ("q_proj" in name or "k_proj" in name):
                heads = 4 if "q_proj" in name else 2
                values = values.reshape(heads, 2, -1, 64).swapaxes(1, 2).reshape(weight.shape)
            kind = gguf.GGMLQuantizationType.Q8_0 if "down_proj" in name else gguf.GGMLQuantizationType.F32
            data = gguf.quantize(values.contiguous().numpy(), kind)
            writer.add_tensor(f"{names.get_name(stem)}.{suffix}", data, raw_dtype=kind)
            if kind is gguf.GGMLQuantizationType.Q8_0:
                weight.copy_(torch.from_numpy(gguf.dequantize(data, kind)).to(torch.bfloat16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Tiny(path, model)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def folder(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with its tokenizer, in transformers format."""
    place = tmp_path_factory.mktemp("models") / "tiny"
    tiny.model.save_pretrained(place)
    build_tokenizer(read_gguf(tiny.path).metadata).save_pretrained(place)
    return place


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that conversions of this test have written to."""
    done: list[Path] = []

    def counted(file: gguf_convert.GGUFFile, place: Path, matrices: bool) -> None:
        done.append(place)
        gguf_convert.convert(file, place, matrices)

    monkeypatch.setattr(gguf_cache, "convert", counted)
    return done


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(torch.arange(3, 60)[None]).logits
    return result


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def run_python(code: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if KNOWN_MODELS["smollm2-135m"].gguf() is None:
        advice = f"the embedded model's wheel is missing: {KNOWN_MODELS['smollm2-135m'].advice}"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(advice)
    cache = tmp_path_factory.mktemp("smollm")
    load_model("smollm2-135m", cache_dir=cache)
    yield load_model("smollm2-135m", dtype="bf16", device="cpu", cache_dir=cache)
    shutil.rmtree(cache)


@pytest.fixture(name="write_gguf")
def _write_gguf() -> Callable[..., Any]:
    return write_gguf


@pytest.fixture(name="logits")
def _logits() -> Callable[..., torch.Tensor]:
    return logits


@pytest.fixture(name="one_line")
def _one_line() -> Callable[..., str]:
    return one_line


@pytest.fixture(name="run_python")
def _run_python() -> Callable[..., subprocess.Popen[str]]:
    return run_python
