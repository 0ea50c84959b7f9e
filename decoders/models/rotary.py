"""Cosines and sines of rotary position embeddings (Su et al., 2021), as transformers computes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tot.decoders.models.families import setting
from tot.decoders.models.shapes import Heads

_Floats = np.ndarray[Any, np.dtype[np.float32]]
Rope = Mapping[str, Any]
"""A dictionary of `rope_parameters`: rope_type, rope_theta, and what scales its frequencies."""


class RotaryTable:
    """The table of one kind of rotary embeddings."""

    def __init__(self, config: Any, rope: Rope) -> None:
        self.dim = rotary_dim(config, rope)
        """Dimensions of a head that are rotated."""
        dims = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
        frequencies = 1.0 / (float(rope["rope_theta"]) ** dims.astype(np.float64))
        scaled, self.scaling = _SCALED[rope.get("rope_type", "default")](frequencies, rope, config)
        self.frequencies = scaled.astype(np.float32)

    def rows(self, count: int) -> tuple[_Floats, _Floats]:
        """(count, dim) cosines and sines of the first positions, float32."""
        half = np.arange(count, dtype=np.float32)[:, None] * self.frequencies
        angles = np.concatenate((half, half), axis=-1)
        return np.cos(angles) * np.float32(self.scaling), np.sin(angles) * np.float32(self.scaling)


def rotary_dim(config: Any, rope: Rope) -> int:
    """Return how many dimensions of each head are rotated."""
    partial = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    return int(Heads.of(config).dim * partial)


def layer_ropes(config: Any) -> tuple[list[Rope], list[int]]:
    """Return the kinds of rotary embeddings of a model, and the kind of each layer by its number; -1 for none."""
    layers, parameters = range(config.num_hidden_layers), config.rope_parameters
    if "rope_theta" not in parameters:  # by type of layer
        kinds: list[Rope] = list(parameters.values())
        numbers = {kind: number for number, kind in enumerate(parameters)}
        return kinds, [numbers[config.layer_types[layer]] for layer in layers]
    without = setting(config, "no_rope_layers")
    if without is None and (interval := setting(config, "no_rope_layer_interval")):
        without = [int((layer + 1) % interval != 0) for layer in layers]
    return [parameters], [0 if without is None or without[layer] else -1 for layer in layers]


_Frequencies = np.ndarray[Any, np.dtype[np.float64]]


def _default(frequencies: _Frequencies, rope: Rope, config: Any) -> tuple[_Frequencies, float]:
    return frequencies, 1.0


def _linear(frequencies: _Frequencies, rope: Rope, config: Any) -> tuple[_Frequencies, float]:
    return frequencies / rope["factor"], 1.0


def _llama3(frequencies: _Frequencies, rope: Rope, config: Any) -> tuple[_Frequencies, float]:
    """Llama 3.1: interpolate frequencies of few turns in the original context, and blend in between."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return frequencies * ((1 - smooth) / rope["factor"] + smooth), 1.0


def _yarn(frequencies: _Frequencies, rope: Rope, config: Any) -> tuple[_Frequencies, float]:
    """YaRN (Peng et al., 2023), sections 3.2 to 3.4."""
    original, dim = rope["original_max_position_embeddings"], 2 * len(frequencies)
    factor = rope.get("factor") or config.max_position_embeddings / original

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low or 0.001), 0, 1)
    scaling = rope.get("attention_factor")
    if scaling is None:
        one, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
        scaling = _mscale(factor, one) / _mscale(factor, all_dims) if one and all_dims else _mscale(factor, 1.0)
    return frequencies * (ramp / factor + 1 - ramp), float(scaling)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


_SCALED: dict[str, Callable[[_Frequencies, Rope, Any], tuple[_Frequencies, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
