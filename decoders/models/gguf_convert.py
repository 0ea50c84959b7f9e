"""Conversion of a GGUF file to transformers format: config, generation config, tokenizer, bfloat16 safetensors.

Reads and dequantizes with the `gguf` package. Files with features that cannot be converted (an unknown pre-tokenizer,
scaled RoPE, extra or missing tensors) are rejected.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from ml_dtypes import bfloat16

from tot.decoders.errors import ModelError, reason
from tot.decoders.models.config import model_config
from tot.decoders.models.gguf_tokenizer import UnknownTokenizerError, build_tokenizer, end_tokens
from tot.decoders.models.shapes import Array, weight_shapes
from tot.decoders.models.supported import LLAMA_LIKE

if TYPE_CHECKING:
    from pathlib import Path

# GGUF's `general.architecture` -> the class in transformers. Mistral files use "llama", and run as Llama.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_FAMILIES = {"gemma3": "gemma3_text"}
"""The name of an architecture in transformers, if it differs."""
_LOCAL_ROPE, _GLOBAL_EVERY = 10000.0, 6
"""Gemma 3 (report, section 2.1): the RoPE base of layers with a window, and which layers have none. Not in files."""

FIRST = 64
"""Numbers of each matrix that a conversion without matrices keeps, to identify the model."""


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file's metadata and its memory-mapped tensors (`gguf.ReaderTensor`)."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Any]

    def setting(self, key: str, default: Any = None) -> Any:
        """Return the metadata value `<architecture>.<key>`."""
        return self.metadata.get(f"{self.metadata.get('general.architecture')}.{key}", default)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape in torch's order."""
        return tuple(reversed(self.tensors[name].shape.tolist()))

    def converted_bytes(self, matrices: bool = True) -> int:
        """Return the bytes of the converted folder: two per weight, plus the size of a large tokenizer."""
        sizes = [tensor.n_elements for tensor in self.tensors.values() if matrices or len(tensor.shape) == 1]
        return 2 * sum(map(int, sizes)) + 32 * 2**20


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of a GGUF file, and check that the file holds every tensor it lists.

    Raises ModelError for a file that is not GGUF, is damaged, or ends too early.
    """
    from tot.decoders.models.gguf_reader import BoundedReader

    try:
        reader = BoundedReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {str(tensor.name): tensor for tensor in reader.tensors}
    except FileNotFoundError:
        raise ModelError(f"there is no file {path}") from None
    # All errors of the reader, such as for an unknown quantization or an empty file, mean an invalid GGUF file.
    except (ValueError, LookupError, TypeError, ArithmeticError, MemoryError) as error:
        raise ModelError(f"{path} is not a readable GGUF file ({reason(error)}): download it again") from error
    return GGUFFile(path, metadata, tensors)


def build_config(file: GGUFFile) -> Any:
    """Return the config of a GGUF file. Raises ModelError if the engine can't run it faithfully."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise _refusal(file, f"its architecture is {architecture}; supported are {', '.join(ARCHITECTURES)}")
    if file.setting("attention.sliding_window") and architecture != "gemma3":
        raise _refusal(file, "it uses sliding-window attention")
    if file.setting("rope.scaling.type", "none") != "none":
        raise _refusal(file, "it uses scaled RoPE")
    blocks = file.setting("block_count")
    if blocks > len(file.tensors):
        raise _refusal(file, f"its block_count is {blocks:,}, but it has {len(file.tensors):,} tensors")
    if (context := file.setting("context_length")) == 0:
        raise _refusal(file, "its context_length is 0")
    hidden, heads = file.setting("embedding_length"), file.setting("attention.head_count")
    head_dim = file.setting("attention.key_length") or hidden // heads
    if file.setting("rope.dimension_count", head_dim) != head_dim:
        raise _refusal(file, "its RoPE rotates only a part of each head")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": file.setting("rope.freq_base", 10000.0)}
    others: dict[str, Any] = {}
    if architecture != "qwen2":
        others["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if architecture == "gemma3":
        rope = {"full_attention": rope, "sliding_attention": {**rope, "rope_theta": _LOCAL_ROPE}}
        layers = range(1, blocks + 1)
        others |= {
            "sliding_window": file.setting("attention.sliding_window"),
            "layer_types": [f"{'sliding' if layer % _GLOBAL_EVERY else 'full'}_attention" for layer in layers],
            "query_pre_attn_scalar": hidden // heads if len(layers) == 62 else head_dim,  # the 27B only
        }
    eos = end_tokens(file.metadata)
    settings = dict(
        model_type=_FAMILIES.get(architecture, architecture),
        architectures=[ARCHITECTURES[architecture]],
        dtype="bfloat16",
        vocab_size=file.shape("token_embd.weight")[0],
        hidden_size=hidden,
        intermediate_size=file.setting("feed_forward_length"),
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=file.setting("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=context,
        rms_norm_eps=float(f"{file.setting('attention.layer_norm_rms_epsilon'):.7g}"),  # stored as float32
        rope_parameters=rope,
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=eos[0] if len(eos) == 1 else eos or None,
        pad_token_id=file.metadata.get("tokenizer.ggml.padding_token_id"),
        **others,
    )
    return model_config(settings)


def build_weights(file: GGUFFile, config: Any, matrices: bool = True) -> dict[str, Array]:
    """Return all weights by their names in transformers, in bfloat16. Raises ModelError if file and model differ.

    Without `matrices`, return only the first numbers of each matrix."""

    expected = weight_shapes(config) if config.model_type in LLAMA_LIKE else _module_shapes(config)
    if config.tie_word_embeddings:
        expected.pop("lm_head.weight")
    sources = source_names(expected, config)
    missing = [name for name, source in sources.items() if source not in file.tensors]
    extra = sorted(set(file.tensors) - set(sources.values()))
    if missing or extra:
        raise _refusal(file, f"it has no {missing[0]}" if missing else f"its tensor {extra[0]} is unknown")

    weights = {}
    for name, source in sources.items():
        tensor, shape = file.tensors[source], file.shape(source)
        if shape != expected[name]:
            raise _refusal(file, f"{source} has shape {shape}, not {expected[name]}")
        whole = matrices or len(shape) == 1
        values = dequantized(tensor, None if whole else 1)
        if config.model_type == "gemma3_text" and len(shape) == 1:
            values -= 1  # transformers adds it again
        weights[name] = (in_halves(values, source, config) if whole else values[0, :FIRST]).astype(bfloat16)
    return weights


def _module_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the weight shapes of a module of transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.for_model(**vars(config)))
    return {name: tuple(weight.shape) for name, weight in empty.state_dict().items()}


def dequantized(tensor: Any, rows: int | None = None) -> Array:
    """Dequantize a `gguf.ReaderTensor`, or its first `rows` rows, to float32."""
    import gguf

    return np.array(gguf.dequantize(tensor.data[:rows], tensor.tensor_type))


def source_names(names: Iterable[str], config: Any) -> dict[str, str]:
    """Return the names of weights in GGUF files, by their names in transformers."""
    import gguf

    architectures = {_FAMILIES.get(name, name): number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    name_map = gguf.get_tensor_name_map(architectures[config.model_type], config.num_hidden_layers)
    parts = {name: name.rpartition(".") for name in names}
    return {name: f"{name_map.get_name(stem)}.{suffix}" for name, (stem, _, suffix) in parts.items()}


def in_halves(values: Array, source: str, config: Any) -> Array:
    """Permute rows to transformers' order: RoPE rotates halves of a head there, but adjacent pairs in llama.cpp."""
    if config.model_type != "llama" or not (".attn_q." in source or ".attn_k." in source):
        return values
    heads = config.num_attention_heads if "attn_q" in source else config.num_key_value_heads
    return values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def convert(file: GGUFFile, folder: Path, matrices: bool = True) -> None:
    """Write the model of a GGUF file into `folder`, in transformers format; `matrices` as for build_weights.

    Raises ModelError for a model that can't be converted faithfully; OSError or SafetensorError if writing fails.
    """
    from safetensors.numpy import save_file

    try:
        config, tokenizer = build_config(file), build_tokenizer(file.metadata)
        weights = build_weights(file, config, matrices)
    except (ModelError, OSError, MemoryError):
        raise
    except UnknownTokenizerError as error:
        raise _refusal(file, str(error)) from error
    except Exception as error:  # libraries raise various errors for missing or invalid metadata
        cause = f"no {error}" if isinstance(error, KeyError) else reason(error)
        raise ModelError(f"{file.path} is not a readable GGUF file ({cause}): download it again") from error
    (folder / "config.json").write_text(json.dumps(vars(config), indent=1))
    ends = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    tokenizer.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _refusal(file: GGUFFile, cause: str) -> ModelError:
    return ModelError(f"{file.path} can't be used: {cause}. Give the model's hub id or a folder with safetensors")
