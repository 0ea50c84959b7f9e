"""Checks whether the engine supports a model, from its config alone, before weights are downloaded or read.

The engine replaces a model's attention with its own. Other families than in FAMILIES run if transformers can replace
their attention. Layers other than full and sliding attention are rejected by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tot.decoders.errors import ModelError
from tot.decoders.models.families import FAMILIES

_MOST_LAYERS = 2**12
_WITH_IMAGES = ("gemma3",)
"""Families whose language model has its own config, `text_config`. Only the language model is run."""
_TOP_LEVEL = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")
"""Settings of the language model that such a config may hold itself."""


def check_supported(config: Any) -> None:
    """Raise ModelError if the engine can't run a model with this config. The message names the unsupported feature."""
    family = getattr(config, "model_type", None)
    other_layers = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    layers = getattr(config, "num_hidden_layers", None)
    unusual = ""
    if isinstance(layers, int) and layers > _MOST_LAYERS:  # all would be built before missing weights are noticed
        unusual = f"models of {layers:,} layers"
    elif family not in FAMILIES and not _has_replaceable_attention(str(family)):
        unusual = f"models of the family {family!r}"
    elif other_layers:
        unusual = f"{' and '.join(sorted(other_layers))} layers ({family})"
    elif kind := _length_dependent_rope(config):
        unusual = f"rotary embeddings of the type {kind!r}, whose angles change with the length of a text ({family}),"
    elif getattr(config, "use_bidirectional_attention", None):
        unusual = f"bidirectional attention ({family})"
    if unusual:
        raise ModelError(
            f"{unusual} can't be run here: use a model of the families {', '.join(FAMILIES)}, or run this one in a "
            "server, such as llama-server or vLLM, and ask it with --decoder openai"
        )
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ModelError(
            f"safetensors quantized by the method {method!r:.60} can't be read here: use a .gguf file of the model, or "
            "run it in a server, such as vLLM, and ask it with --decoder openai"
        )


def _has_replaceable_attention(family: str) -> bool:
    """Return whether transformers has a language model of this family and can replace its attention."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    architecture = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family, ""), None)
    return bool(getattr(architecture, "_supports_attention_backend", False))


def _length_dependent_rope(config: Any) -> str | None:
    """Return the RoPE type if its angles depend on the length of the text.

    Cached keys, and keys packed in the same forward pass, belong to texts of different lengths, so their angles would
    differ."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    settings = [rope, *(value for value in rope.values() if isinstance(value, dict))] if isinstance(rope, dict) else []
    kinds = (setting.get("rope_type", setting.get("type")) for setting in settings)
    return next((kind for kind in kinds if kind in ("dynamic", "longrope", "su")), None)


def read_config(folder: Path) -> SimpleNamespace:
    """Read a folder's config.json without transformers. Raises ModelError if it is missing or invalid."""
    if not (folder / "config.json").exists() and (files := sorted(folder.glob("*.gguf"))):
        raise ModelError(
            f"{folder} has no config.json, but {len(files)} .gguf files: give one of them, such as {files[0]}"
        )
    try:
        settings = json.loads((folder / "config.json").read_text())
        if settings.get("model_type") in _WITH_IMAGES and "text_config" in settings:
            settings = {name: settings[name] for name in _TOP_LEVEL if name in settings} | settings["text_config"]
        return SimpleNamespace(**settings)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder} holds no model ({error}): a folder needs a readable config.json") from error


def missing_weights(folder: Path) -> str:
    """Describe a folder's missing weights and the remedy in one line; "" if all safetensors files exist."""
    index = folder / "model.safetensors.index.json"
    shards = {"model.safetensors"}
    if index.exists():
        try:
            shards = set(json.loads(index.read_text())["weight_map"].values())
            if any(Path(shard).name != shard for shard in shards):
                raise ValueError("a shard is not a file name")
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return f"{index.name} can't be read: download it again"
    missing = sorted(shard for shard in shards if not (folder / shard).exists())
    if not missing:
        return ""
    if any(folder.glob("*.bin")):
        return (
            "its weights are .bin files, and weights are loaded from safetensors or GGUF only: convert them once, "
            "if you trust the file, with AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)"
        )
    if files := sorted(folder.glob("*.gguf")):
        return f"it has no {missing[0]}: give the path of the GGUF file instead, {files[0]}"
    return f"it has no {missing[0]}: weights are loaded from safetensors or GGUF only"
