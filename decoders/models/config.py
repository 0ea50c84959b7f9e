"""A model's config: the settings of its config.json, with the defaults of its family in transformers.

Built without transformers, whose import takes a second. Attributes have the names of transformers' config classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from tot.decoders.errors import ModelError

_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings"),
)
"""The settings at the beginning of each family's defaults, in this order."""
_COUNTS = (*_SIZES, "num_experts", "num_experts_per_tok", "num_local_experts", "moe_intermediate_size")
_ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NUMBERS = (
    *("rms_norm_eps", "query_pre_attn_scalar", "swiglu_alpha", "swiglu_limit", "embedding_multiplier"),
    *("logits_scaling", "residual_multiplier", "attention_multiplier"),
)


def _family(sizes: tuple[int | None, ...], ends: tuple[int | None, ...], **others: Any) -> dict[str, Any]:
    common = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0}
    return {**common, **dict(zip(_SIZES, sizes, strict=True)), **dict(zip(_ENDS, ends, strict=True)), **others}


_SILU: dict[str, Any] = {"hidden_act": "silu"}
_UNBIASED: dict[str, Any] = {**_SILU, "attention_bias": False, "mlp_bias": False}
_QWEN: dict[str, Any] = {**_SILU, "use_sliding_window": False, "sliding_window": 4096}
_DENSE_QWEN: dict[str, Any] = {**_QWEN, "max_window_layers": 28, "layer_types": None}
_GEMMA: dict[str, Any] = {"tie_word_embeddings": True, "attention_bias": False, "use_bidirectional_attention": None}
_GEMMA_2: dict[str, Any] = {**_GEMMA, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}
_GEMMA_2 |= {"sliding_window": 4096, "layer_types": None}
_MULTIPLIERS = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")
_NO_ENDS = (None, None, None)

# A size of None is computed from the others.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _family((32000, 4096, 11008, 32, 32, None, None, 2048), (1, 2, None), **_UNBIASED),
    "mistral": _family((32000, 4096, 14336, 32, 32, 8, None, 131072), (1, 2, None), **_SILU, sliding_window=4096),
    "qwen2": _family((151936, 4096, 22016, 32, 32, 32, None, 32768), _NO_ENDS, **_DENSE_QWEN),
    "qwen3": _family((151936, 4096, 22016, 32, 32, 32, 128, 32768), _NO_ENDS, **_DENSE_QWEN, attention_bias=False),
    "qwen3_moe": _family(
        (151936, 2048, 6144, 24, 32, 4, None, 32768),
        _NO_ENDS,
        **_QWEN,
        attention_bias=False,
        decoder_sparse_step=1,
        moe_intermediate_size=768,
        num_experts_per_tok=8,
        num_local_experts=128,
        norm_topk_prob=False,
        mlp_only_layers=None,
    ),
    "gemma": _family((256000, 3072, 24576, 28, 16, 16, 256, 8192), (2, 1, 0), **_GEMMA, hidden_act="gelu_pytorch_tanh"),
    "gemma2": _family(
        (256000, 2304, 9216, 26, 8, 4, 256, 8192),
        (2, 1, 0),
        **_GEMMA_2,
        final_logit_softcapping=30.0,
        attn_logit_softcapping=50.0,
    ),
    "gemma3_text": _family(
        (262208, 2304, 9216, 26, 8, 4, 256, 131072),
        (2, 1, 0),
        **{**_GEMMA_2, "use_bidirectional_attention": False},
        final_logit_softcapping=None,
        attn_logit_softcapping=None,
        sliding_window_pattern=6,
        rope_theta=1000000.0,
        rope_local_base_freq=10000.0,
    ),
    "phi3": _family(
        (32064, 3072, 8192, 32, 32, None, None, 4096),
        (1, 32000, 32000),
        **_SILU,
        rms_norm_eps=1e-5,
        original_max_position_embeddings=4096,
        sliding_window=None,
        partial_rotary_factor=1.0,
    ),
    "gpt_oss": _family(
        (201088, 2880, 2880, 36, 64, 8, 64, 131072),
        _NO_ENDS,
        **_SILU,
        rms_norm_eps=1e-5,
        attention_bias=True,
        sliding_window=128,
        layer_types=None,
        num_local_experts=128,
        num_experts_per_tok=4,
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        rope_theta=150000.0,
    ),
    "granite": _family(
        (32000, 4096, 11008, 32, 32, None, None, 2048), (1, 2, None), **_UNBIASED, **dict.fromkeys(_MULTIPLIERS, 1.0)
    ),
    "smollm3": _family(
        (128256, 2048, 11008, 36, 16, 4, None, 32768),
        (128000, 128001, 128004),
        **_UNBIASED,
        tie_word_embeddings=True,
        use_sliding_window=False,
        sliding_window=None,
        no_rope_layers=None,
        no_rope_layer_interval=4,
        layer_types=None,
        rope_theta=2000000.0,
    ),
    "seed_oss": _family(
        (155136, 4096, 27648, 64, 80, 8, 128, 524288),
        (0, 2, 1),
        **{**_UNBIASED, "attention_bias": True},
        attention_out_bias=False,
    ),
}
"""Defaults that transformers' config classes fill in, by `model_type`."""
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_GPT_OSS_ROPE |= {"original_max_position_embeddings": 4096}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def model_config(settings: Mapping[str, Any]) -> SimpleNamespace:
    """Complete the settings of a config.json with the defaults of its family, a key of DEFAULTS.

    RoPE's settings are in `rope_parameters`, including older spellings (`rope_theta`, `rope_scaling`). Gemma 3 has
    a mapping of them for each of its layer types. Raises ModelError for values of the wrong type or range.
    """
    family = settings["model_type"]
    values = {**DEFAULTS[family], **settings}
    if "num_local_experts" in values:  # both spellings are in use
        values["num_local_experts"] = settings.get("num_experts", values["num_local_experts"])
    _check_numbers(values)
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    if values["head_dim"] is None:
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    if values["num_attention_heads"] % values["num_key_value_heads"] or not values["head_dim"]:
        raise ModelError(
            f"config.json has {values['num_attention_heads']} attention heads, {values['num_key_value_heads']} "
            f"key-value heads and hidden_size {values['hidden_size']}, which do not fit: download it again"
        )
    if not values.get("use_sliding_window", True) and family != "smollm3":
        values["sliding_window"] = None
    if family == "qwen3_moe" and values["mlp_only_layers"] is None:
        values["mlp_only_layers"] = []
    if family == "gemma" and values["hidden_act"] == "gelu":  # the first files of Gemma; it means the approximation
        values["hidden_act"] = "gelu_pytorch_tanh"
    _complete_layers(values)
    _complete_rope(values)
    return SimpleNamespace(**values)


def _check_numbers(values: Mapping[str, Any]) -> None:
    """Raise ModelError for a size that is not a positive integer, and for other numbers that are not finite."""
    for name in (*_COUNTS, "sliding_window"):
        value = values.get(name)
        optional = name in ("num_key_value_heads", "head_dim", "sliding_window") or name not in values
        if not (value is None and optional) and not (type(value) is int and 0 < value < 2**31):
            raise _bad(name, value, "a positive integer")
    for name in _NUMBERS:
        if name in values and not _is_number(values[name]):
            raise _bad(name, values[name], "a number")


def _complete_layers(values: dict[str, Any]) -> None:
    """Fill in which layers have a window, and which have no RoPE (SmolLM3)."""
    count, family, window = values["num_hidden_layers"], values["model_type"], values.get("sliding_window")
    if family == "smollm3" and values["no_rope_layers"] is None:
        interval = values["no_rope_layer_interval"]
        values["no_rope_layers"] = [int(number % interval != 0) for number in range(1, count + 1)]
    types = values.get("layer_types")
    if types is None and "layer_types" in values:
        if family in ("gemma2", "gpt_oss"):
            windowed = [bool(number % 2) for number in range(1, count + 1)]
        elif family == "gemma3_text":
            windowed = [bool(number % values["sliding_window_pattern"]) for number in range(1, count + 1)]
        elif family == "smollm3":
            uses = values["use_sliding_window"] and window is not None
            windowed = [uses and not rope for rope in values["no_rope_layers"]]
        else:
            windowed = [window is not None and number >= values["max_window_layers"] for number in range(count)]
        values["layer_types"] = [_SLIDING if one else _FULL for one in windowed]
    elif types is not None and (not isinstance(types, list) or len(types) != count):
        raise _bad("layer_types", types, f"a list of the types of {count} layers")


def _complete_rope(values: dict[str, Any]) -> None:
    """Move RoPE's settings into `rope_parameters`, completed."""
    theta, partial = values.pop("rope_theta"), values.pop("partial_rotary_factor", None)
    scaling, given = values.pop("rope_scaling", None), values.get("rope_parameters")
    for name, value in (("rope_scaling", scaling), ("rope_parameters", given)):
        if value is not None and not isinstance(value, Mapping):
            raise _bad(name, value, "a mapping")
    if values["model_type"] == "gemma3_text":
        full, sliding = ((given or {}).get(name) or {} for name in (_FULL, _SLIDING))
        local = values.pop("rope_local_base_freq")
        values["rope_parameters"] = {
            _FULL: _rope({**full, **(scaling or {})}, theta, None, values),
            _SLIDING: _rope(sliding, local, None, values),
        }
        return
    if values["model_type"] == "gpt_oss":
        given = given or _GPT_OSS_ROPE
    rope = scaling or given or {}
    if nested := [name for name in rope if name in (values.get("layer_types") or ())]:
        values["rope_parameters"] = {name: _rope(rope[name] or {}, theta, partial, values) for name in nested}
    else:
        values["rope_parameters"] = _rope(rope, theta, partial, values)


def _rope(given: Mapping[str, Any], theta: Any, partial: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the RoPE settings of one type of layers."""
    rope = {"rope_type": given.get("type", "default"), "rope_theta": theta, **given}
    if partial is not None:
        rope.setdefault("partial_rotary_factor", partial)
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        rope.setdefault("original_max_position_embeddings", values["max_position_embeddings"])
        if "original_max_position_embeddings" in values:
            rope["original_max_position_embeddings"] = values["original_max_position_embeddings"]
    if values["model_type"] == "phi3" and rope["rope_type"] in ("su", "yarn"):
        rope["rope_type"] = "longrope"
    for name in ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        if name in rope and not (_is_number(rope[name]) and rope[name] > 0):
            raise _bad(name, rope[name], "a positive number")
    return rope


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _bad(name: str, value: Any, expected: str) -> ModelError:
    return ModelError(f"config.json has {name}={value!r:.60}, which is not {expected}: download it again")
