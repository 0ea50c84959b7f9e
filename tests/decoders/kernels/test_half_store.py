"""Keys and values stored in float16 while the forward in C computes in float32."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from tot.decoders import ModelError
from tot.decoders.kernels.native import library as native
from tot.decoders.kernels.native.compiling import LEVELS
from tot.decoders.models.loaded import LoadedModel


@pytest.fixture(autouse=True, params=[level for level in LEVELS if level.half_store], ids=lambda level: level.name)
def _level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute at each processor level that converts float16."""
    if not native.processor_flags() >= request.param.needs:
        pytest.skip("the processor lacks it")
    monkeypatch.setenv("TOT_ISA", request.param.name)


def halved(model: Any) -> LoadedModel:
    loaded = LoadedModel.of(model)
    loaded.store_dtype = np.dtype(np.float16)
    return loaded


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_logits_are_close_to_a_float32_stores_in_half_the_memory(lab: Any, family: str) -> None:
    model = lab.known(family)
    reference, runner, wide = copy.deepcopy(model), lab.open(halved(model), 4000), lab.open(model, 4000)
    assert runner.slot_bytes * 2 == wide.slot_bytes
    texts = [lab.text(30 + 40 * i, seed=i) for i in range(5)]
    differences = []
    for tokens, half, full in zip(texts, lab.computed(runner, texts), lab.computed(wide, texts), strict=True):
        expected = lab.alone(reference, tokens)[-1]
        assert (full[0] - expected).abs().max() < 1e-3
        differences.append(float((half[0] - expected).abs().max()))
        assert (half[0] - expected).norm() < 0.01 * expected.norm()
    assert max(differences) > 1e-3  # the store is really narrower


@pytest.mark.parametrize("part", ["k_proj", "v_proj"])
def test_keys_and_values_beyond_the_range_of_float16_are_refused(lab: Any, part: str) -> None:
    model = lab.known("llama")
    wide = lab.open(copy.deepcopy(model), 400)
    lab.computed(wide, [lab.text(50)])
    stored = wide.backend._store[:, 0 if part == "k_proj" else 1]
    weight = model.model.layers[0].self_attn.get_submodule(part).weight
    weight.data *= 65504 * 0.9999 / float(np.abs(stored[0]).max())
    runner = lab.open(halved(model), 400)
    (logits,) = lab.computed(runner, [lab.text(50)])  # the largest number just fits
    assert logits.isfinite().all()
    runner.close()
    weight.data *= 1.0002
    runner = lab.open(halved(model), 400)
    with pytest.raises(ModelError, match=r"^1 keys and values are beyond 65,504, .* use dtype=fp32, and quantize=gguf"):
        lab.computed(runner, [lab.text(50)])
    assert not any(map(runner.cache.is_computed, range(1, 50)))
    runner.close()
    (logits,) = lab.computed(lab.open(model, 400), [lab.text(50)])
    assert logits.isfinite().all()
