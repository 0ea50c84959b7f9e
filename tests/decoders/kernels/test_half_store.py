"""Keys and values stored in float16 while the forward in C computes in float32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from tot.decoders import ModelError, load_model
from tot.decoders.engine.runner import Runner
from tot.decoders.kernels.native import library as native
from tot.decoders.kernels.native.compiling import LEVELS
from tot.decoders.kernels.native.forward import NativeForward
from tot.decoders.models.loaded import LoadedModel

HALF = np.dtype(np.float16)


@pytest.fixture(autouse=True)
def _converts() -> None:
    if not ((level := native.level()) and level.half_store):
        pytest.skip("needs a processor that converts float16")


def halved(model: Any, tokenizer: Any = None) -> LoadedModel:
    loaded = load_model(model, tokenizer=tokenizer) if tokenizer else LoadedModel.of(model)
    loaded.store_dtype = HALF
    return loaded


@pytest.mark.parametrize("level", [level.name for level in LEVELS if level.half_store])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_logits_are_close_to_a_float32_stores_in_half_the_memory(
    known: Callable[..., Any],
    text: Callable[..., Any],
    computed: Callable[..., Any],
    logits_alone: Callable[..., Tensor],
    family: str,
    level: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not native.processor_flags() >= next(one.needs for one in LEVELS if one.name == level):
        pytest.skip("the processor lacks it")
    monkeypatch.setenv("TOT_ISA", level)
    model = known(family)
    reference, runner, wide = copy.deepcopy(model), Runner(halved(model), 4000), Runner(LoadedModel.of(model), 4000)
    assert isinstance(runner.backend, NativeForward)
    assert runner.slot_bytes * 2 == wide.slot_bytes
    texts = [text(30 + 40 * i, seed=i) for i in range(5)]
    differences = []
    for tokens, half, full in zip(texts, computed(runner, texts), computed(wide, texts), strict=True):
        expected = logits_alone(reference, tokens)[-1]
        assert (full[0] - expected).abs().max() < 1e-3
        differences.append(float((half[0] - expected).abs().max()))
        assert (half[0] - expected).norm() < 0.01 * expected.norm()
    assert max(differences) > 1e-3  # the store is really narrower
    runner.close()
    wide.close()


@pytest.mark.parametrize("level", [level.name for level in LEVELS if level.half_store])
@pytest.mark.parametrize("part", ["k_proj", "v_proj"])
def test_keys_and_values_beyond_the_range_of_float16_are_refused(
    known: Callable[..., Any],
    text: Callable[..., Any],
    computed: Callable[..., Any],
    part: str,
    level: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not native.processor_flags() >= next(one.needs for one in LEVELS if one.name == level):
        pytest.skip("the processor lacks it")
    monkeypatch.setenv("TOT_ISA", level)
    model = known("llama")
    wide = Runner(LoadedModel.of(copy.deepcopy(model)), 400)
    computed(wide, [text(50)])
    assert isinstance(wide.backend, NativeForward)
    assert wide.backend._store is not None
    stored = wide.backend._store[:, 0 if part == "k_proj" else 1]
    weight = model.model.layers[0].self_attn.get_submodule(part).weight
    weight.data *= 65504 * 0.9999 / float(np.abs(stored[0]).max())
    wide.close()
    runner = Runner(halved(model), 400)
    (logits,) = computed(runner, [text(50)])  # the largest number just fits
    assert logits.isfinite().all()
    runner.close()
    weight.data *= 1.0002
    runner = Runner(halved(model), 400)
    with pytest.raises(ModelError, match=r"^1 keys and values are beyond 65,504, .* use dtype=fp32, and quantize=gguf"):
        computed(runner, [text(50)])
    assert not any(map(runner.cache.is_computed, range(1, 50)))
    runner.close()
    wide = Runner(LoadedModel.of(model), 400)
    (logits,) = computed(wide, [text(50)])
    assert logits.isfinite().all()
    wide.close()
