"""Cosines and sines of rotary position embeddings (Su et al., 2021), scaled as in transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tot.decoders.errors import ModelError
from tot.decoders.models.shapes import Heads

Floats = NDArray[np.float32]


class RotaryTable:
    """The table of one model, or of its layers of one type (`layers`) if types differ. Raises ModelError."""

    def __init__(self, config: Any, layers: str | None = None) -> None:
        rope = config.rope_parameters if layers is None else config.rope_parameters[layers]
        kind = rope["rope_type"]
        if kind not in _SCALINGS:
            raise ModelError(f"rotary embeddings of the type {kind!r} can't be computed here: use another model")
        dim = int(Heads.of(config).dim * rope.get("partial_rotary_factor", 1.0))
        exponents = np.arange(0, dim, 2, dtype=np.float32) / dim  # rounded where transformers rounds
        plain = 1 / (rope["rope_theta"] ** exponents.astype(np.float64)).astype(np.float32)
        try:
            frequencies, self.scaling = _SCALINGS[kind](plain, rope)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise ModelError(f"config.json lacks settings of {kind} rotary embeddings ({error!r}): {rope}") from error
        self.frequencies: Floats = frequencies.astype(np.float32)
        """Radians per position, by pair of dimensions."""

    def rows(self, count: int) -> tuple[Floats, Floats]:
        """(count, rotary dimension) cosines and sines of the first positions."""
        half = (np.arange(count, dtype=np.float32)[:, None] * self.frequencies).astype(np.float64)
        cosines, sines = ((wave(half) * self.scaling).astype(np.float32) for wave in (np.cos, np.sin))
        return np.concatenate((cosines, cosines), axis=1), np.concatenate((sines, sines), axis=1)


def _default(plain: Any, rope: Mapping[str, Any]) -> tuple[Any, float]:
    return plain, 1.0


def _linear(plain: Any, rope: Mapping[str, Any]) -> tuple[Any, float]:
    return plain / rope["factor"], 1.0


def _llama3(plain: Any, rope: Mapping[str, Any]) -> tuple[Any, float]:
    """Divide low frequencies by a factor, keep high ones, and interpolate between them."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)  # in the original context
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return kept * plain + (1 - kept) * plain / rope["factor"], 1.0


def _yarn(plain: Any, rope: Mapping[str, Any]) -> tuple[Any, float]:
    """YaRN (Peng et al., 2023), equations 19 to 22, by dimension instead of wavelength."""
    factor, context, pairs = rope["factor"], rope["original_max_position_embeddings"], len(plain)

    def pair_with(turns: float) -> float:
        """Return the pair of dimensions that makes this many turns in the original context."""
        return pairs * math.log(context / (turns * 2 * math.pi)) / math.log(rope["rope_theta"])

    first, last = pair_with(rope.get("beta_fast") or 32), pair_with(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    scaled = np.clip((np.arange(pairs) - first) / (last - first or 0.001), 0, 1)
    return plain * (1 - scaled) + plain / factor * scaled, _attention_factor(factor, rope)


def _attention_factor(factor: float, rope: Mapping[str, Any]) -> float:
    if (given := rope.get("attention_factor")) is not None:
        return float(given)
    scale, over = rope.get("mscale"), rope.get("mscale_all_dim")
    growth = 0.1 * math.log(max(factor, 1.0))
    return (growth * scale + 1) / (growth * over + 1) if scale and over else growth + 1


_SCALINGS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
