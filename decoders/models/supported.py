"""Which models the engine can run: told from a config alone, before weights are downloaded, converted or read.

The engine replaces a model's attention by its own, so a family counts once its logits have been compared; layers of
other kinds than full and sliding attention are refused by name. Knows nothing of where models come from.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tot.decoders.errors import ModelError

# `config.model_type` of the families whose attention the runner's own has been tested to replace.
TESTED_FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi3")
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
"""Of these, the families whose whole forward there is in C."""
_MOST_LAYERS = 2**12


def check_supported(config: Any) -> None:
    """Raise ModelError if the engine can't run a model with this config, naming what stands in the way."""
    family = getattr(config, "model_type", None)
    other_layers = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    layers = getattr(config, "num_hidden_layers", None)
    unusual = None
    if isinstance(layers, int) and layers > _MOST_LAYERS:  # each would be built before any weight is missed
        unusual = f"models of {layers:,} layers"
    elif family not in TESTED_FAMILIES:
        unusual = f"models of the family {family!r}"
    elif other_layers:
        unusual = f"{' and '.join(sorted(other_layers))} layers ({family})"
    elif kind := _by_length(config):
        unusual = f"rotary embeddings of the type {kind!r}, whose angles change with the length of a text ({family}),"
    elif getattr(config, "use_bidirectional_attention", None):
        unusual = f"bidirectional attention ({family})"
    if unusual:
        raise ModelError(
            f"{unusual} can't be run here yet: use a model with plain causal attention "
            f"of a tested family ({', '.join(TESTED_FAMILIES)})"
        )


def _by_length(config: Any) -> str | None:
    """The type of rotary embeddings whose angles depend on how long a text is: keys of texts of other lengths, in the
    cache or packed in the same forward, would have other angles."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    found = [rope, *(each for each in rope.values() if isinstance(each, dict))] if isinstance(rope, dict) else []
    kinds = (each.get("rope_type", each.get("type")) for each in found)
    return next((kind for kind in kinds if kind in ("dynamic", "longrope", "su")), None)


def window_of(config: Any) -> int | None:
    """How many tokens a token sees in layers with a sliding window, itself included; None where there are no such."""
    if types := getattr(config, "layer_types", None):
        return config.sliding_window if "sliding_attention" in types else None
    if not getattr(config, "use_sliding_window", True):
        return None
    first = getattr(config, "max_window_layers", None)  # Qwen: the first layer with a window
    if first is not None and first >= config.num_hidden_layers:
        return None
    return getattr(config, "sliding_window", None)


def read_config(folder: Path) -> SimpleNamespace:
    """A folder's config.json as it stands, without transformers. Raises ModelError if there is none."""
    try:
        return SimpleNamespace(**json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{folder} holds no model ({error}): a folder needs a readable config.json") from error


def missing_weights(folder: Path) -> str:
    """What a folder lacks of its weights and what to do, in one line; "" if every safetensors file is there."""
    index = folder / "model.safetensors.index.json"
    shards = {"model.safetensors"}
    if index.exists():
        try:
            shards = set(json.loads(index.read_text())["weight_map"].values())
            if any(Path(shard).name != shard for shard in shards):
                raise ValueError("a shard is no file's name")
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return f"{index.name} can't be read: download it again"
    missing = sorted(shard for shard in shards if not (folder / shard).exists())
    if not missing:
        return ""
    if any(folder.glob("*.bin")):
        return (
            "its weights are .bin files, and weights are loaded from safetensors or GGUF only: convert them once, "
            "where you trust the file, by AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)"
        )
    if files := sorted(folder.glob("*.gguf")):
        return f"it has no {missing[0]}: give the path of the GGUF file instead, {files[0]}"
    return f"it has no {missing[0]}: weights are loaded from safetensors or GGUF only"
