"""Cosines and sines of rotary position embeddings (Su et al., 2021), as transformers computes them for LLAMA_LIKE
families, without its modelling code: importing that takes two seconds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tot.decoders.models.shapes import Heads


class RotaryTable:
    """The table of one model."""

    def __init__(self, config: Any) -> None:
        rope = config.rope_parameters
        if rope["rope_type"] == "default":
            dim = Heads.of(config).dim
            self.frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
            self.scaling = 1.0
        else:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            self.frequencies, self.scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)

    def rows(self, count: int) -> tuple[Tensor, Tensor]:
        """(count, head_dim) cosines and sines of the first positions, float32."""
        half = torch.arange(count)[:, None].float() * self.frequencies
        angles = torch.cat((half, half), dim=-1)
        return angles.cos() * self.scaling, angles.sin() * self.scaling
