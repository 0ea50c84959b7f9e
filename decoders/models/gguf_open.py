"""A GGUF file's model without its matrices, for a backend that packs the file's own numbers.

Such a weight says as `in_file()` what the file has for it. Nothing is read but the converted folder until one is asked;
what was read is held until `model.let_go_of_file()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tot.decoders.errors import ModelError, OptionError
from tot.decoders.models.gguf_convert import dequantized, in_halves, read_gguf, source_names
from tot.decoders.models.gguf_numbers import Whole, numbers_of
from tot.decoders.models.given_up import give_up
from tot.decoders.models.supported import LLAMA_LIKE


def open_unread(path: Path, folder: Path, config: Any, dtype: torch.dtype) -> Any:
    """The model of the GGUF file at `path`, whose conversion without matrices is in `folder`. Raises OptionError for
    families that no such backend knows."""
    if config.model_type not in LLAMA_LIKE:
        raise OptionError(
            f"a file's own numbers are computed with for {', '.join(LLAMA_LIKE)}, not {config.model_type}"
        )
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, GenerationConfig

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.generation_config = GenerationConfig.from_pretrained(folder)
    model.packed_in = folder
    kept = load_file(folder / "model.safetensors")
    _check(model, kept)
    sources, read = source_names(kept, config), cache(partial(read_gguf, path))
    model.let_go_of_file = read.cache_clear

    def numbers(source: str) -> Whole | Tensor:
        tensor = read().tensors[source]
        order, whole = partial(in_halves, source=source, config=config), numbers_of(tensor)
        return order(dequantized(tensor)) if whole is None else whole.each(order)

    for name, value in kept.items():
        holder, _, leaf = name.rpartition(".")
        module = model.get_submodule(holder)
        if getattr(module, leaf).dim() == 1:
            setattr(module, leaf, nn.Parameter(value.to(dtype), requires_grad=False))
        else:
            give_up(module, value.to(dtype))
            module.weight.in_file = partial(numbers, sources[name])
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def _check(model: nn.Module, kept: Mapping[str, Tensor]) -> None:
    """Raise ModelError unless there is a value for each weight of a model, whole for its vectors: C reads them."""
    for name, weight in model.named_parameters():  # without lm_head, where that is the embedding
        value = kept.get(name)
        if value is None or value.dim() != 1 or (weight.dim() == 1 and value.shape != weight.shape):
            raise ModelError(f"the weight {name} is missing, or has another shape than config.json says")
