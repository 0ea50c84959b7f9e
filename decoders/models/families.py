"""Model families as data: one entry says how the layers of a family differ from Llama's.

The C forward pass, the weight shapes and the conversion of GGUF files read these entries. Configs have the attributes
of transformers' configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tot.decoders.errors import ModelError
from tot.decoders.models.config import DEFAULTS

_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_BIASES = {"attention_bias": _ATTENTION, "mlp_bias": _MLP}
_PRE_NORMS = {"norm_in": "input_layernorm", "norm_mlp": "post_attention_layernorm"}
_SANDWICH_NORMS = {
    "norm_in": "input_layernorm",
    "norm_attended": "post_attention_layernorm",
    "norm_mlp": "pre_feedforward_layernorm",
    "norm_done": "post_feedforward_layernorm",
}
HEAD_NORMS = {"norm_query": "self_attn.q_norm", "norm_key": "self_attn.k_norm"}


class Experts(NamedTuple):
    """The mixture of experts of a family. The weights of all experts are one matrix: (experts * outputs, inputs)."""

    router: str
    """Stem of the router's weight."""
    inner: str
    """Name of the setting with an expert's intermediate size."""
    normalized: str | None = None
    """Name of the setting that makes the weights of the chosen experts sum to 1; None if they always do."""
    biased: bool = False
    """Whether router and experts have biases."""
    transposed: bool = False
    """Whether transformers stores (experts, inputs, outputs), with gates and ups in turn."""


@dataclass(frozen=True)
class Family:
    """The differences between a family and Llama."""

    architecture: str
    """The class in transformers."""
    gguf: str
    """`general.architecture` of its GGUF files."""
    norms: Mapping[str, str] = field(default_factory=lambda: _PRE_NORMS)
    """Stems of the norms' weights of a layer, by their names in forward.c."""
    norm_offset: float = 0.0
    """Added to the weights of norms."""
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _BIASES)
    """Biased linear layers, by the setting that enables them; "" for always."""
    activation: str = "hidden_act"
    """Name of the setting with the activation function; "" for the last of ACTIVATIONS."""
    scaled_embedding: bool = False
    """Whether embeddings are multiplied by the square root of the hidden size."""
    sinks: bool = False
    """Whether each head has an attention sink: a score without a value."""
    adjacent_pairs: bool = False
    """Whether RoPE rotates adjacent pairs in GGUF files, instead of halves of a head."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Linear layers that transformers stores as one, by its stem."""
    experts: Experts | None = None


_GEMMA: dict[str, Any] = {"norm_offset": 1.0, "scaled_embedding": True, "biases": {"attention_bias": _ATTENTION}}
ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "swiglu_clamped")
"""The activation functions of linear.h, in its order."""
CLAMPED = (1.702, 7.0)
"""gpt-oss's factor of the gate in the sigmoid, and its limit of gates and ups."""
_MOST_EXPERTS, _MOST_CHOSEN = 2**12, 64
FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", adjacent_pairs=True),
    "mistral": Family("MistralForCausalLM", "llama", adjacent_pairs=True, biases={}),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", biases={"": _ATTENTION[:3]}),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", norms=_PRE_NORMS | HEAD_NORMS),
    "gemma": Family("GemmaForCausalLM", "gemma", **_GEMMA),
    "gemma2": Family("Gemma2ForCausalLM", "gemma2", **_GEMMA, norms=_SANDWICH_NORMS, activation="hidden_activation"),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", "gemma3", **_GEMMA, norms=_SANDWICH_NORMS | HEAD_NORMS, activation="hidden_activation"
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        "phi3",
        biases={},
        fused={"self_attn.qkv_proj": _ATTENTION[:3], "mlp.gate_up_proj": _MLP[:2]},
    ),
    "granite": Family("GraniteForCausalLM", "granite", adjacent_pairs=True),
    "smollm3": Family("SmolLM3ForCausalLM", "smollm3", adjacent_pairs=True),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        "seed_oss",
        biases={"attention_bias": _ATTENTION[:3], "attention_out_bias": _ATTENTION[3:], "mlp_bias": _MLP},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        "qwen3moe",
        norms=_PRE_NORMS | HEAD_NORMS,
        experts=Experts("mlp.gate", "moe_intermediate_size", "norm_topk_prob"),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "gpt-oss",
        activation="",
        sinks=True,
        experts=Experts("mlp.router", "intermediate_size", biased=True, transposed=True),
    ),
}
"""The supported families, by `model_type`. A family is supported once its logits have been verified."""

GGUF_FAMILIES = {family.gguf: name for name, family in reversed(FAMILIES.items())}
"""`model_type` by `general.architecture` of GGUF files. Mistral files use "llama", and run as Llama."""


def family_of(config: Any) -> Family:
    """Return the family of a config. Raises ModelError if it is not supported."""
    name = getattr(config, "model_type", None)
    if name not in FAMILIES:
        raise ModelError(f"models of the family {name!r} can't be run here: use one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def setting(config: Any, name: str) -> Any:
    """Return a setting that only some families have, or None if the config's family lacks it."""
    return getattr(config, name, None) if name in DEFAULTS[config.model_type] else None


class Scales(NamedTuple):
    """Factors and limits of a model's forward pass; a limit of 0 means none."""

    embedding: float
    attention: float
    attention_cap: float
    """Scores are at most this: cap * tanh(score / cap) (Gemma 2, section 2)."""
    residual: float
    """Factor of the results of attention and of the MLP, before they are added to the residual stream."""
    logits: float
    logit_cap: float

    @classmethod
    def of(cls, config: Any) -> Scales:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        attention = setting(config, "attention_multiplier")
        if attention is None:
            attention = (setting(config, "query_pre_attn_scalar") or head_dim) ** -0.5
        return cls(
            setting(config, "embedding_multiplier")
            or (config.hidden_size**0.5 if family_of(config).scaled_embedding else 1.0),
            attention,
            setting(config, "attn_logit_softcapping") or 0.0,
            setting(config, "residual_multiplier") or 1.0,
            1.0 / (setting(config, "logits_scaling") or 1.0),
            setting(config, "final_logit_softcapping") or 0.0,
        )


class Mixture(NamedTuple):
    """The sizes of a mixture of experts."""

    experts: int
    chosen: int
    """Experts of each token."""
    inner: int
    """Intermediate size of an expert."""
    normalized: bool
    """Whether the weights of the chosen experts sum to 1."""

    @classmethod
    def of(cls, config: Any) -> Mixture | None:
        """Return the mixture of a model, or None if it has none. Raises ModelError for impossible sizes."""
        experts = family_of(config).experts
        if experts is None:
            return None
        sizes = [setting(config, name) for name in ("num_local_experts", "num_experts_per_tok", experts.inner)]
        count, chosen, inner = sizes
        whole = all(type(size) is int for size in sizes)
        if not (whole and 0 < count <= _MOST_EXPERTS and 0 < chosen <= min(count, _MOST_CHOSEN) and inner > 0):
            raise ModelError(
                f"a mixture of {count} experts of size {inner}, {chosen} for each token, can't be run: a model has up "
                f"to {_MOST_EXPERTS} experts, and up to {_MOST_CHOSEN} for each token; download the model again"
            )
        normalized = True if experts.normalized is None else bool(setting(config, experts.normalized))
        return cls(count, chosen, inner, normalized)


def layer_windows(config: Any) -> list[int | None]:
    """Return the sliding window of each layer in tokens, including the token itself; None for full attention."""
    layers, window = config.num_hidden_layers, setting(config, "sliding_window")
    if types := getattr(config, "layer_types", None):
        return [window if kind == "sliding_attention" else None for kind in types[:layers]]
    return [None if setting(config, "use_sliding_window") is False else window] * layers


def activation_of(config: Any) -> str:
    """Return the name of a model's activation function, as in ACTIVATIONS if it is supported."""
    name = family_of(config).activation
    activation = str(getattr(config, name)) if name else ACTIVATIONS[-1]
    return "gelu_pytorch_tanh" if activation == "gelu" and config.model_type == "gemma" else activation
