"""The identity of a model, which names its calibrations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from tot.decoders.models.weights import Weights
from tot.llm.decoders import identity_of


def test_the_identity_of_a_model_survives_quantization_and_not_fine_tuning() -> None:
    def loaded(norm: float, dtype: Any) -> Any:
        weights = SmallWeights({"model.norm.weight": np.full(64, norm, dtype)})
        return SimpleNamespace(config=SimpleNamespace(model_type="qwen2"), weights=weights)

    assert (
        identity_of(loaded(1.5, np.float32))
        == identity_of(loaded(1.5, bfloat16))
        != identity_of(loaded(1.25, bfloat16))
    )
    assert identity_of(None) is None
    assert identity_of(SimpleNamespace(config=None, weights=SmallWeights({}))) is None  # type: ignore[arg-type]


class SmallWeights(Weights):
    def __init__(self, arrays: dict[str, Any]) -> None:
        self._arrays, self.shapes = arrays, {name: array.shape for name, array in arrays.items()}

    def __getitem__(self, name: str) -> Any:
        return self._arrays[name]
