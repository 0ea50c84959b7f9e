"""Cosines and sines of rotary position embeddings (Su et al., 2021), as transformers computes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tot.decoders.errors import ModelError
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
        exponents = np.arange(0, self.dim, 2, dtype=np.float32) / self.dim  # rounded where transformers rounds
        plain = 1 / (rope["rope_theta"] ** exponents.astype(np.float64)).astype(np.float32)
        kind = rope.get("rope_type", "default")
        if kind not in _SCALED:
            raise ModelError(f"rotary embeddings of the type {kind!r} can't be computed here: use another model")
        try:
            frequencies, self.scaling = _SCALED[kind](plain, rope, config)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise ModelError(f"config.json lacks settings of {kind} rotary embeddings ({error!r}): {rope}") from error
        self.frequencies: _Floats = frequencies.astype(np.float32)

    def rows(self, count: int) -> tuple[_Floats, _Floats]:
        """(count, dim) cosines and sines of the first positions, float32."""
        half = (np.arange(count, dtype=np.float32)[:, None] * self.frequencies).astype(np.float64)
        cosines, sines = ((wave(half) * self.scaling).astype(np.float32) for wave in (np.cos, np.sin))
        return np.concatenate((cosines, cosines), axis=1), np.concatenate((sines, sines), axis=1)


def rotary_dim(config: Any, rope: Rope) -> int:
    """Return how many dimensions of each head are rotated. Raises ModelError if it is not possible."""
    partial, dim = rope.get("partial_rotary_factor") or 1.0, Heads.of(config).dim
    rotated = int(dim * partial)
    if not 0 < rotated <= dim or rotated % 2:
        raise ModelError(f"partial_rotary_factor is {partial}, but heads have {dim} dimensions: download it again")
    return rotated


def layer_ropes(config: Any) -> tuple[list[Rope], list[int]]:
    """Return the kinds of rotary embeddings of a model, and the kind of each layer by its number; -1 for none."""
    layers, parameters = range(config.num_hidden_layers), config.rope_parameters
    if "rope_theta" not in parameters:  # by type of layer
        kinds: list[Rope] = list(parameters.values())
        numbers = {kind: number for number, kind in enumerate(parameters)}
        return kinds, [numbers[config.layer_types[layer]] for layer in layers]
    rotated = setting(config, "no_rope_layers")  # 1 for layers with rotary embeddings
    return [parameters], [0 if rotated is None or rotated[layer] else -1 for layer in layers]


def _llama3(frequencies: _Floats, rope: Rope, config: Any) -> tuple[_Floats, float]:
    """Llama 3.1: interpolate frequencies of few turns in the original context, and blend in between."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - smooth) * frequencies / rope["factor"] + smooth * frequencies, 1.0


def _yarn(frequencies: _Floats, rope: Rope, config: Any) -> tuple[_Floats, float]:
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
    return frequencies / factor * ramp + frequencies * (1 - ramp), float(scaling)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


_SCALED: dict[str, Callable[[_Floats, Rope, Any], tuple[_Floats, float]]] = {
    "default": lambda frequencies, rope, config: (frequencies, 1.0),
    "linear": lambda frequencies, rope, config: (frequencies / rope["factor"], 1.0),
    "llama3": _llama3,
    "yarn": _yarn,
}
