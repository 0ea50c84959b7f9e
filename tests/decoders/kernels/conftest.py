"""Tiny models with a native forward in C, and their logits."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ml_dtypes import bfloat16
from torch import Tensor, nn

from tot.decoders.engine.runner import Chunk, Runner
from tot.decoders.kernels.native import compiling, forward, packed_file, packing
from tot.decoders.kernels.native import library as native
from tot.decoders.kernels.native.tiles import kernels_run

VOCAB = 300
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


OTHERS = [level.name for level in compiling.LEVELS[1:] if level.name != "avx512"]


@pytest.fixture(params=["widest", *OTHERS, "portable-4", pytest.param("portable-16", marks=pytest.mark.slow)])
def vectors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the vector instructions: the processor's widest, each narrower level that it supports, and portable C."""
    kind, _, lanes = request.param.partition("-")
    if known := next((level for level in compiling.LEVELS if level.name == request.param), None):
        if known == native.level() or not native.processor_flags() >= known.needs:
            pytest.skip("the processor lacks it, or has no more")
        monkeypatch.setenv("TOT_ISA", known.name)
    if kind == "portable":
        plain = Path(__file__).with_name("portable.c")
        monkeypatch.setattr(compiling, "_VECTORS", (*compiling._VECTORS, f'-DPORTABLE="{plain}"', f"-DLANES={lanes}"))
        for module in (packing, packed_file, forward):
            monkeypatch.setattr(module, "lanes", lambda: int(lanes))


@pytest.fixture
def rounding() -> type[nn.Linear]:
    """A linear layer that rounds its input to integers up to 127, with one scale for each group of 32."""

    class Rounding(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            groups = input.unflatten(-1, (-1, 32))
            step = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
            return super().forward(((groups / step).round() * step).flatten(-2))

    return Rounding


@pytest.fixture
def native_forwards() -> None:
    able = kernels_run(16, 1, np.dtype(np.float32), "cpu")
    if not (able and native.library("sampling", "-O3")):
        pytest.skip("needs a C compiler, and a processor with AVX2")


@pytest.fixture
def known(native_forwards: None, make_model: Callable[..., Any]) -> Callable[..., Any]:
    """Map a family to a tiny model with a native forward in C, whose norms and biases affect the result."""

    def make(family: str = "llama", **changes: Any) -> Any:
        model = make_model(family, **{**WIDE, "num_attention_heads": 4, **changes})
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data = 1 + 0.3 * torch.randn_like(parameter)
            elif "router" in name or name.endswith("mlp.gate.weight"):  # not so sharp that only one expert counts
                parameter.data = 0.3 * torch.randn_like(parameter)
            elif name.endswith(("bias", "sinks")):
                parameter.data = torch.randn_like(parameter)
        return model

    return make


@pytest.fixture
def text() -> Callable[..., list[int]]:
    """Return random tokens by length and seed."""
    return lambda length, seed=0: random.Random(seed).choices(range(VOCAB), k=length)


@pytest.fixture
def computed() -> Callable[..., list[Tensor]]:
    """Map a runner and texts to the logits of the last `reads` tokens of each text, computed in one forward."""

    def run(runner: Runner, texts: list[list[int]], reads: int = 1) -> list[Tensor]:
        with torch.inference_mode():
            branches = [runner.cache.open(tokens) for tokens in texts]
            result = runner.forward([Chunk(branch, 0, len(branch), [0] * reads) for branch in branches])
            for branch in branches:
                runner.cache.rollback(branch, 0)
            runner.cache.clear()
        return [torch.from_numpy(result.logits[rows]) for rows in result.rows]

    return run


@pytest.fixture
def halved(known: Callable[..., Any]) -> Callable[..., Any]:
    """Map a family to such a model in bfloat16."""
    if not kernels_run(32, 1, np.dtype(bfloat16), "cpu"):
        pytest.skip("needs a processor with bfloat16 products")

    def make(family: str = "llama") -> Any:
        return known(family, head_dim=32).bfloat16()

    return make
