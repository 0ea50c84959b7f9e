"""Sizes derived from a config: attention heads, bytes of keys and values, and weight shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tot.decoders.models.families import HEAD_NORMS, Mixture, family_of

Shape = tuple[int, ...]
Array = np.ndarray[Any, np.dtype[Any]]
"""A numpy array of any shape; bfloat16 has the dtype of `ml_dtypes`."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
EXPERTS, SINKS = "mlp.experts", "self_attn.sinks"
"""Names in a layer."""


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
    """Return the weight shapes of a model of a family in FAMILIES, by name in transformers.

    A linear layer that transformers stores as a part of a larger one has a name of its own, such as
    "model.layers.0.self_attn.q_proj". The weights of all experts are one matrix (experts * outputs, inputs).
    """
    family, mixture = family_of(config), Mixture.of(config)
    heads, hidden = Heads.of(config), config.hidden_size
    query, kv = heads.query * heads.dim, heads.kv * heads.dim
    layer: dict[str, Shape] = {}
    for stem, shape in (
        ("self_attn.q_proj", (query, hidden)),
        ("self_attn.k_proj", (kv, hidden)),
        ("self_attn.v_proj", (kv, hidden)),
        ("self_attn.o_proj", (hidden, query)),
    ):
        layer[f"{stem}.weight"] = shape
    biased = {stem for key, stems in family.biases.items() if not key or getattr(config, key, False) for stem in stems}
    inner, count = (config.intermediate_size, 1) if mixture is None else (mixture.inner, mixture.experts)
    place = "mlp" if mixture is None else EXPERTS
    layer |= {f"{place}.{name}_proj.weight": (count * inner, hidden) for name in ("gate", "up")}
    layer[f"{place}.down_proj.weight"] = (count * hidden, inner)
    layer |= {
        f"{stem}.bias": layer[f"{stem}.weight"][:1]
        for stem in [name.removesuffix(".weight") for name in layer]
        if stem in biased or (family.experts and family.experts.biased and stem.startswith(EXPERTS))
    }
    if mixture is not None and family.experts is not None:
        layer[f"{family.experts.router}.weight"] = (mixture.experts, hidden)
        if family.experts.biased:
            layer[f"{family.experts.router}.bias"] = (mixture.experts,)
    layer |= {f"{stem}.weight": (heads.dim if name in HEAD_NORMS else hidden,) for name, stem in family.norms.items()}
    if family.sinks:
        layer[SINKS] = (heads.query,)
    layers = range(config.num_hidden_layers)
    body = {f"model.layers.{number}.{name}": shape for number in layers for name, shape in layer.items()}
    table = (config.vocab_size, hidden)
    return {**body, EMBEDDING: table, HEAD: table, "model.norm.weight": (hidden,)}
