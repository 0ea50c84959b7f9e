"""The model in a GGUF file: config, tokenizer and weights, in transformers' terms, for the families in FAMILIES.

Files with features that the engine does not compute (long RoPE, extra or missing tensors) are refused.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import DTypeLike

from tot.decoders.errors import ModelError, reason
from tot.decoders.models.config import DEFAULTS, model_config
from tot.decoders.models.families import FAMILIES, GGUF_FAMILIES, family_of
from tot.decoders.models.gguf_quants import QuantizedMatrix, unpack
from tot.decoders.models.gguf_reader import GGUFFile, read_gguf
from tot.decoders.models.gguf_tokenizer import UnknownTokenizerError, build_tokenizer, end_tokens
from tot.decoders.models.model_names import gguf_parts
from tot.decoders.models.rotary import RotaryTable
from tot.decoders.models.shapes import EMBEDDING, HEAD, SINKS, Array, weight_shapes
from tot.decoders.models.tokenizer import Tokenizer
from tot.decoders.models.weights import FIRST, Part, Weights, whole_parts

_LOCAL_ROPE = 10000.0
"""The RoPE base of Gemma 3's layers with a window (report, section 2.1). Not in files."""
_SETTINGS = {
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
"""Keys of settings that only some families have."""
_BIASES = {
    "attention_bias": "blk.0.attn_q.bias",
    "attention_out_bias": "blk.0.attn_output.bias",
    "mlp_bias": "blk.0.ffn_down.bias",
}
_FIXED = {"qwen3moe": {"norm_topk_prob": True}, "gpt-oss": {"attention_bias": True}}
"""Settings that are not in files."""
_FREQUENCIES = "rope_freqs.weight"
_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the models of 27B parameters, which scale attention by the hidden size."""


class GGUFModel(NamedTuple):
    """The model in a GGUF file."""

    config: Any
    tokenizer: Tokenizer
    weights: GGUFWeights


def open_gguf(path: Path, dtype: DTypeLike, integers: bool = False) -> GGUFModel:
    """Open a GGUF file, or all parts of a model given one of them. `dtype` and `integers` are as for GGUFWeights.

    Raises ModelError for a file that can't be read, and for a model that can't be run faithfully.
    """
    file = read_gguf(path)
    try:
        config, tokenizer = build_config(file), build_tokenizer(file.metadata)
        return GGUFModel(config, tokenizer, GGUFWeights(file, config, dtype, integers, tokenizer))
    except (ModelError, MemoryError):
        raise
    except UnknownTokenizerError as error:
        raise refusal(file, str(error)) from error
    except Exception as error:  # libraries raise various errors for missing or invalid metadata
        cause = f"no {error}" if isinstance(error, KeyError) else reason(error)
        raise ModelError(f"{file.path} is not a readable GGUF file ({cause}): download it again") from error


class GGUFWeights(Weights):
    """The weights of a GGUF file, dequantized and rounded to bfloat16, in `dtype`.

    With `integers`, matrices are the integers or floats of the file, routers are exact, and so is every weight of a
    file whose floats are wider than bfloat16; `dtype` is then float32. Raises ModelError if file and config differ.
    """

    def __init__(
        self, file: GGUFFile, config: Any, dtype: DTypeLike, integers: bool, tokenizer: Tokenizer | None = None
    ) -> None:
        self.path, self.files = file.path, gguf_parts(file.path)
        self.tokenizer = tokenizer
        """The file's tokenizer, which is kept beside its packed weights."""
        self.shapes = weight_shapes(config)
        self.integers, self.quantized = integers, integers and file.matrices == "integers"
        wide = integers and file.matrices == "float32"
        self.exact_dtype: np.dtype[Any] = np.dtype(np.float32 if wide else bfloat16)
        """The number format that holds all weights but quantized ones and routers exactly."""
        self.dtype: np.dtype[Any] = self.exact_dtype if wide else np.dtype(dtype)
        self._family, self._file, self._sources = family_of(config), file, sources_of(config)
        if config.tie_word_embeddings:
            self._sources[HEAD] = self._sources[EMBEDDING]
        _check_tensors(file, self._sources)

    def __getitem__(self, name: str) -> Array | QuantizedMatrix:
        source = self._sources[name]
        tensor = self._file.tensors[source.names[0]]
        router = self._family.experts is not None and name.endswith(f".{self._family.experts.router}.weight")
        exact = self.integers and len(source.shape) == 2
        if exact and not router and (matrix := unpack(tensor)) is not None:
            return matrix.map(source.view)
        values: Array = source.view(dequantized(tensor).reshape(source.shape))
        if name.endswith((*(f"{stem}.weight" for stem in self._family.norms.values()), "model.norm.weight")):
            values = values - self._family.norm_offset
        return values if exact else self._rounded(values)

    def first(self, name: str) -> Array:
        source = self._sources[name]
        if len(source.shape) == 1:
            return self.array(name)[:FIRST]
        row = source.view(np.arange(source.shape[0]))[0]
        return self._rounded(dequantized(self._file.tensors[source.names[0]], slice(row, row + 1))[0, :FIRST])

    def _rounded(self, values: Array) -> Array:
        return values.astype(self.exact_dtype, copy=False).astype(self.dtype, copy=False)


def _in_halves(values: Array, heads: int) -> Array:
    """Sort the outputs of each head, whose adjacent ones are pairs for RoPE, for transformers, which rotates halves."""
    return values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def sources_of(config: Any) -> dict[str, Part]:
    """Return where a GGUF file stores each weight, by the weight's name in transformers.

    Tensors have a weight's shape: the weights of all experts are one matrix (experts * outputs, inputs)."""
    import gguf

    family = family_of(config)
    architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architectures[family.gguf], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    sources = {}
    for name, part in whole_parts(config).items():
        stored = part.names[0]
        stem, _, suffix = (f"{stored}.weight" if stored.endswith(SINKS) else stored).rpartition(".")
        sources[name] = part._replace(names=(f"{names.get_name(stem)}.{suffix}",))
        if family.adjacent_pairs and (count := heads.get(name.split(".")[-2])):
            sources[name] = sources[name]._replace(view=partial(_in_halves, heads=count))
    return sources


def _check_tensors(file: GGUFFile, sources: dict[str, Part]) -> None:
    """Raise ModelError unless the file has the tensors of the sources, in their shapes, and no others."""
    shapes = {name: part.shape for part in sources.values() for name in part.names}
    missing = [name for name in shapes if name not in file.tensors]
    extra = sorted(file.tensors.keys() - shapes.keys() - {_FREQUENCIES})
    if missing or extra:
        raise refusal(file, f"it has no {missing[0]}" if missing else f"its tensor {extra[0]} is unknown")
    for name, expected in shapes.items():
        *outputs, inputs = file.shape(name)
        shape = (math.prod(outputs), inputs) if len(expected) == 2 else (math.prod(outputs) * inputs,)
        if shape != expected:
            raise refusal(file, f"{name} has shape {(*outputs, inputs)}, not {expected}")


def dequantized(tensor: Any, rows: slice = slice(None)) -> Array:
    """Dequantize some rows of a `GGUFTensor` to float32: (rows, inputs), or (inputs,) for a vector."""
    import gguf

    data = tensor.data if tensor.data.ndim == 1 else tensor.data.reshape(-1, tensor.data.shape[-1])[rows]
    return np.array(gguf.dequantize(data, tensor.tensor_type))


def refusal(file: GGUFFile, cause: str) -> ModelError:
    """Return the error for a file that the engine can't run faithfully."""
    return ModelError(
        f"{file.path} can't be used: {cause}. Give the model's hub id or a folder with safetensors, or run it in a "
        "server, such as llama-server, and ask it with --decoder openai"
    )


def build_config(file: GGUFFile) -> Any:
    """Return the config of a GGUF file. Raises ModelError if the engine can't run it faithfully."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in GGUF_FAMILIES:
        raise refusal(file, f"its architecture is {architecture}; supported are {', '.join(GGUF_FAMILIES)}")
    name = GGUF_FAMILIES[architecture]
    if file.setting("attention.sliding_window"):
        if architecture == "llama":
            name = "mistral"
        elif "sliding_window" not in DEFAULTS[name] or "use_sliding_window" in DEFAULTS[name]:
            raise refusal(file, "it uses sliding-window attention")
    family = FAMILIES[name]
    blocks = file.setting("block_count")
    if blocks > len(file.tensors):
        raise refusal(file, f"its block_count is {blocks:,}, but it has {len(file.tensors):,} tensors")
    if (context := file.setting("context_length")) == 0:
        raise refusal(file, "its context_length is 0")
    hidden, heads = file.setting("embedding_length"), file.setting("attention.head_count")
    head_dim = file.setting("attention.key_length") or hidden // heads
    inner = "expert_feed_forward_length" if family.experts and family.experts.inner == "intermediate_size" else ""
    eos = end_tokens(file.metadata)
    settings = dict(
        model_type=name,
        architectures=[family.architecture],
        dtype="bfloat16",
        vocab_size=file.shape("token_embd.weight")[0],
        hidden_size=hidden,
        intermediate_size=file.setting(inner or "feed_forward_length"),
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=file.setting("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=context,
        rms_norm_eps=float(f"{file.setting('attention.layer_norm_rms_epsilon'):.7g}"),  # stored as float32
        rope_parameters=_rope(file, architecture, head_dim),
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=eos[0] if len(eos) == 1 else eos or None,
        pad_token_id=file.metadata.get("tokenizer.ggml.padding_token_id"),
        **_other_settings(file, architecture, name),
    )
    config = model_config(settings)
    if _FREQUENCIES in file.tensors:
        _check_frequencies(file, config)
    return config


def _other_settings(file: GGUFFile, architecture: str, name: str) -> dict[str, Any]:
    """Return the settings that only some families have, for the family `name`."""
    known = DEFAULTS[name]
    others = {name: file.setting(key) for name, key in _SETTINGS.items() if name in known}
    others = {name: value for name, value in others.items() if value is not None or name == "sliding_window"}
    others |= {key: bias in file.tensors for key, bias in _BIASES.items() if key in FAMILIES[name].biases}
    if "query_pre_attn_scalar" in known:
        heads, head_dim = file.setting("attention.head_count"), file.setting("attention.key_length")
        largest = file.setting("block_count") == _LARGEST_GEMMA[architecture]
        others["query_pre_attn_scalar"] = file.setting("embedding_length") // heads if largest else head_dim
    return {**others, **_FIXED.get(architecture, {})}


def _rope(file: GGUFFile, architecture: str, head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters`. Raises ModelError for a type that the engine does not compute."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": file.setting("rope.freq_base", 10000.0)}
    plain, kind = dict(rope), file.setting("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn") or "rope_factors_long.weight" in file.tensors:
        raise refusal(file, "it uses scaled RoPE of a type that is not supported")
    if kind != "none" and not file.setting("rope.scaling.factor"):
        raise refusal(file, "it uses scaled RoPE without a factor")
    if _FREQUENCIES in file.tensors:  # Llama 3.1 to 3.3
        factor = round(float(dequantized(file.tensors[_FREQUENCIES]).max()), 4)
        rope |= {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope["original_max_position_embeddings"] = 8192
    if kind != "none":
        rope |= {"rope_type": kind, "factor": file.setting("rope.scaling.factor")}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = file.setting("rope.scaling.original_context_length")
        rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": architecture != "gpt-oss"}
    if (rotated := file.setting("rope.dimension_count", head_dim)) != head_dim:
        if architecture != "phi3":
            raise refusal(file, "its RoPE rotates only a part of each head")
        rope["partial_rotary_factor"] = rotated / head_dim
    if architecture == "gemma3":
        return {"full_attention": rope, "sliding_attention": {**plain, "rope_theta": _LOCAL_ROPE}}
    return rope


def _check_frequencies(file: GGUFFile, config: Any) -> None:
    """Raise ModelError if the file's divisors of RoPE's frequencies differ from the ones of Llama 3.1."""
    plain = RotaryTable(config, {"rope_theta": config.rope_parameters["rope_theta"]}).frequencies
    scaled, divisors = RotaryTable(config, config.rope_parameters).frequencies, dequantized(file.tensors[_FREQUENCIES])
    if divisors.shape != plain.shape or not np.allclose(plain / divisors, scaled, rtol=1e-3):
        raise refusal(file, "it uses scaled RoPE of a type that is not supported")
