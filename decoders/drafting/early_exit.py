"""Early exit: the first layers of a model as a model of its own, sharing its weights, to draft for it.

Elhoushi et al., 2024 (LayerSkip), without the training that makes early layers good: what they get wrong costs time,
never correctness.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tot.decoders.errors import OptionError
from tot.decoders.models.loaded import LoadedModel


def first_layers(loaded: LoadedModel, layers: int | None = None) -> LoadedModel:
    """A model of the first `layers` layers (a quarter by default), the final norm and the head; no weight is copied.

    Raises OptionError for a number that leaves nothing out or nothing over.
    """
    whole = int(loaded.config.num_hidden_layers)
    wanted = max(1, whole // 4) if layers is None else layers
    if not 1 <= wanted < whole:
        raise OptionError(f"early-exit:{wanted}: the target has {whole} layers; give from 1 to {whole - 1}")
    config = copy.deepcopy(loaded.config)
    config.num_hidden_layers = wanted
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:wanted]
    config._attn_implementation = "eager"  # the backend sets its own; the copy has the target's

    def load() -> Any:
        model = loaded.model
        with torch.device("meta"):
            shallow = type(model)(config)
        shallow.model.embed_tokens = model.model.embed_tokens
        shallow.model.layers = nn.ModuleList(list(model.model.layers)[:wanted])
        shallow.model.norm = model.model.norm
        shallow.model.rotary_emb = model.model.rotary_emb
        shallow.lm_head = model.lm_head
        return shallow.eval()

    name = f"{loaded.name}, first {wanted} layers"
    stored = loaded.stored if loaded.module is None else None
    return LoadedModel(config, loaded.tokenizer, name, loaded.dtype, loaded.device, load=load, stored=stored)
