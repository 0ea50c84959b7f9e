"""Helpers for the tests of loading: tiny models, and GGUF files as llama.cpp's converter writes them.

pytest imports with `importlib`, so tests get these functions and factories as fixtures.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tot.decoders.kernels.native import packed_file
from tot.decoders.models.gguf_reader import read_gguf
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


@pytest.fixture(autouse=True)
def _own_packed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep packed weights out of the user's cache, so that no test depends on earlier runs."""
    monkeypatch.setattr(packed_file, "cache_folder", lambda: tmp_path / "cache")


class Tiny(NamedTuple):
    path: Path
    model: Any


ODD_FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma": ("gemma", {}, {}),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": 9,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
            "attn_implementation": "eager",
        },
        {"attention.sliding_window": 9, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3": (
        "gemma3_text",
        {"num_hidden_layers": 7, "sliding_window": 9, "query_pre_attn_scalar": 16},  # the sixth layer has no window
        {"attention.sliding_window": 9},
    ),
    "phi3": ("phi3", {"sliding_window": 9}, {"attention.sliding_window": 9, "rope.dimension_count": 12}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.25,
        },
        {"embedding_scale": 3.0, "logit_scale": 2.0, "residual_scale": 0.5, "attention.scale": 0.25},
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}, {}),  # the fourth layer has no rotary embeddings
    "seed_oss": ("seed_oss", {}, {}),
    "qwen3moe": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
    ),
    "gpt-oss": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9, "attn_implementation": "eager"},
        {
            "attention.sliding_window": 9,
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 96,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        },
    ),
}
"""By architecture in GGUF files: the family in transformers, its settings, and the file's keys."""


def gguf_tensors(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights by the names that llama.cpp's converter knows: it splits the gates and ups of experts."""
    weights = {}
    for name, weight in state.items():
        stem, gate_up, suffix = name.partition("experts.gate_up_proj")
        turned = gate_up and any(other.endswith("gate_up_proj_bias") for other in state)  # gpt-oss
        if gate_up:
            suffix = suffix.replace("_", ".") or ".weight"
            pair = (weight[..., ::2], weight[..., 1::2]) if turned else weight.chunk(2, dim=1)
            for part, values in zip(("gate", "up"), pair, strict=True):
                weights[f"{stem}experts.{part}_proj{suffix}"] = values.mT if values.dim() == 3 and turned else values
        elif "experts.down_proj" in name:
            suffix = ".bias" if name.endswith("bias") else ".weight"
            turned = any(other.endswith("gate_up_proj_bias") for other in state) and weight.dim() == 3
            weights[name.removesuffix("_bias") + suffix] = weight.mT if turned else weight
        else:
            weights[f"{name}.weight" if name.endswith("sinks") else name] = weight
    return weights


def write_gguf(path: Path, family: str = "llama", **changed: Any) -> Tiny:
    """Create a random model of a family, and the GGUF file that llama.cpp's converter would write for it."""
    tokens = [*CONTROL, *USER_DEFINED, *bytes_to_unicode(), *(merge.replace(" ", "") for merge in MERGES)]
    name, odd, keys = ODD_FAMILIES.get(family, (family, {}, {}))
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    if family == "gemma3":
        rope = {"full_attention": rope, "sliding_attention": {**rope, "rope_theta": 10000.0}}
    elif family == "phi3":
        rope["partial_rotary_factor"] = 0.75
    elif "divisors" in changed:
        rope |= {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope["original_max_position_embeddings"] = 8192
    elif family == "gpt-oss":
        rope |= {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
        rope["original_max_position_embeddings"] = 4096
    options: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "pad_token_id": 0,
        **odd,
    }
    config = AutoConfig.for_model(
        name,
        vocab_size=len(tokens),
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=family not in ("qwen2", "phi3", "gpt-oss"),
        max_position_embeddings=128,
        rope_parameters=rope,
        **options,
    )
    torch.manual_seed(changed.pop("seed", 0))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for weight in model.parameters():
        weight.data = torch.randn_like(weight).mul(0.2).to(torch.bfloat16).float()
    architecture = next(number for number, known in gguf.MODEL_ARCH_NAMES.items() if known == family)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(5000.0)
    if family not in ("llama", "qwen2"):
        writer.add_key_length(16)
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
    divisors = changed.pop("divisors", None)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))
    for key, value in {**{f"{family}.{key}": value for key, value in keys.items()}, **changed}.items():
        kinds = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
        kinds[type(value)](key, value)
    with torch.no_grad():
        for name, weight in gguf_tensors(model.state_dict()).items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            stem, _, suffix = name.rpartition(".")
            values = weight + 1 if family.startswith("gemma") and "norm" in name else weight
            if family in ("llama", "granite", "smollm3") and ("q_proj" in name or "k_proj" in name):
                heads = 4 if "q_proj" in name else 2
                values = values.reshape(heads, 2, -1, 64).swapaxes(1, 2).reshape(weight.shape)
            quantized = "down_proj" in name and weight.dim() == 2
            kind = gguf.GGMLQuantizationType.Q8_0 if quantized else gguf.GGMLQuantizationType.F32
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
def smollm() -> Any:
    if KNOWN_MODELS["smollm2-135m"].gguf() is None:
        advice = f"the embedded model's wheel is missing: {KNOWN_MODELS['smollm2-135m'].advice}"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(advice)
    return load_model("smollm2-135m", dtype="bf16", device="cpu")


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
