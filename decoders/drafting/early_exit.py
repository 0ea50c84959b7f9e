"""Early exit: draft with the first layers of the target model, sharing its weights.

Elhoushi et al., 2024 (LayerSkip), without the training that improves early layers. Wrong drafts cost time, never
correctness.
"""

from __future__ import annotations

import copy
from typing import Any

from tot.decoders.errors import OptionError
from tot.decoders.models.loaded import LoadedModel


def first_layers(loaded: LoadedModel, layers: int | None = None) -> LoadedModel:
    """Return a model of the first `layers` layers (default: a quarter), the final norm and the head, without copies.

    Raises OptionError unless 1 <= `layers` < the number of layers of the target.
    """
    total = int(loaded.config.num_hidden_layers)
    count = max(1, total // 4) if layers is None else layers
    if not 1 <= count < total:
        raise OptionError(f"early-exit:{count}: the target has {total} layers; give from 1 to {total - 1}")

    def load() -> Any:
        import torch
        from torch import nn

        model = loaded.model
        config = _shortened(model.config, count)
        config._attn_implementation = "eager"  # the backend sets its own; this is a copy of the target's
        with torch.device("meta"):
            shallow = type(model)(config)
        shallow.model.embed_tokens = model.model.embed_tokens
        shallow.model.layers = nn.ModuleList(list(model.model.layers)[:count])
        shallow.model.norm = model.model.norm
        shallow.model.rotary_emb = model.model.rotary_emb
        shallow.lm_head = model.lm_head
        return shallow.eval()

    name = f"{loaded.name}, first {count} layers"
    stored = loaded.stored if loaded.module is None else None
    config = _shortened(loaded.config, count)
    return LoadedModel(config, loaded.tokenizer, name, loaded.dtype, loaded.device, load=load, stored=stored)


def _shortened(config: Any, count: int) -> Any:
    """Return a copy of a config with its first layers only."""
    short = copy.deepcopy(config)
    short.num_hidden_layers = count
    if getattr(short, "layer_types", None):
        short.layer_types = short.layer_types[:count]
    return short
