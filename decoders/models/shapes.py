"""Sizes derived from a config: attention heads, bytes of keys and values, and weight shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Shape = tuple[int, ...]
Array = np.ndarray[Any, np.dtype[Any]]
"""A numpy array of any shape; bfloat16 has the dtype of `ml_dtypes`."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Heads(NamedTuple):
    """The attention heads of one layer."""

    query: int
    kv: int
    dim: int
    """Dimension of a head."""

    @classmethod
    def of(cls, config: Any) -> Heads:
        query = int(config.num_attention_heads)
        kv = getattr(config, "num_key_value_heads", None) or query
        return cls(query, int(kv), int(getattr(config, "head_dim", None) or config.hidden_size // query))


def slot_bytes(config: Any, dtype: np.dtype[Any]) -> int:
    """Return the bytes of the keys and values of one token, in all layers."""
    heads = Heads.of(config)
    return int(2 * config.num_hidden_layers * heads.kv * heads.dim * dtype.itemsize)


def weight_shapes(config: Any) -> dict[str, Shape]:
    """Return the weight shapes of a model of a LLAMA_LIKE family, by name in transformers."""
    heads, hidden, inner = Heads.of(config), config.hidden_size, config.intermediate_size
    query, kv = heads.query * heads.dim, heads.kv * heads.dim
    matrices = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    biased = _biased(config)
    layer: dict[str, Shape] = {f"{name}.weight": shape for name, shape in matrices.items()}
    layer |= {f"{name}.bias": shape[:1] for name, shape in matrices.items() if name.partition(".")[2] in biased}
    layer |= {f"{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    if config.model_type == "qwen3":
        layer |= {f"self_attn.{name}.weight": (heads.dim,) for name in ("q_norm", "k_norm")}
    layers = range(config.num_hidden_layers)
    body = {f"model.layers.{number}.{name}": shape for number in layers for name, shape in layer.items()}
    table = (config.vocab_size, hidden)
    return {**body, EMBEDDING: table, HEAD: table, "model.norm.weight": (hidden,)}


def _biased(config: Any) -> tuple[str, ...]:
    """Return the linear layers that have a bias."""
    if config.model_type == "qwen2":
        return "q_proj", "k_proj", "v_proj"
    if config.model_type == "mistral":
        return ()
    attention = ("q_proj", "k_proj", "v_proj", "o_proj") if getattr(config, "attention_bias", False) else ()
    mlp = ("gate_proj", "up_proj", "down_proj") if getattr(config, "mlp_bias", False) else ()
    return attention + mlp
