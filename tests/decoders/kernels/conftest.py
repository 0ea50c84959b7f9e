"""Tiny models with a native forward in C, and their logits."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from ctypes import byref, c_int64
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ml_dtypes import bfloat16
from torch import Tensor, nn

from tot.decoders.engine.runner import Chunk, Runner
from tot.decoders.kernels.native import compiling, packing
from tot.decoders.kernels.native import library as native
from tot.decoders.kernels.native.forward import NativeForward
from tot.decoders.kernels.native.structures import structure
from tot.decoders.kernels.native.tiles import Tiles, kernels_run
from tot.decoders.machine import threads
from tot.decoders.models.gguf_model import GGUFWeights
from tot.decoders.models.gguf_quants import QuantizedMatrix
from tot.decoders.models.loaded import LoadedModel
from tot.decoders.models.shapes import Array, weight_shapes
from tot.decoders.models.weights import ModuleWeights

VOCAB = 300
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


@pytest.fixture(scope="session")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, torch.dtype], Callable[..., Tensor]]:
    """Map a head dimension and a number format to attention.h: (query, keys, values, tiles, scale, cap) -> result.

    Shapes: query (heads, rows, head_dim); keys, values (kv_heads, slots, head_dim); result (rows, heads, head_dim)."""
    folder = tmp_path_factory.mktemp("attention")

    @cache
    def functions(head_dim: int, float32: bool) -> ctypes.CDLL:
        level, path = native.level(), folder / f"{head_dim}-{float32}.so"
        options = ("-O1", *((level and level.options) or ()), f"-DHEAD_DIM={head_dim}", *["-DFLOAT32"] * float32)
        code = Path(__file__).with_name("attention.c")
        command = ["cc", "-shared", "-fPIC", "-w", *options, f"-I{compiling.SOURCES}", str(code), "-o", str(path)]
        subprocess.run([*command, "-lm", "-pthread"], check=True)
        assert native._opened(*compiling.POOL) is not None
        return ctypes.CDLL(str(path))

    def make(head_dim: int, dtype: torch.dtype) -> Callable[..., Tensor]:
        numbers = np.dtype(bfloat16 if dtype == torch.bfloat16 else np.float32)
        if not kernels_run(head_dim, 1, numbers, "cpu") or shutil.which("cc") is None:
            pytest.skip("needs a C compiler, and a processor with AVX2 (or bfloat16 products)")
        attend = functions(head_dim, dtype == torch.float32).attend

        def call(query: Tensor, keys: Tensor, values: Tensor, tiles: Tiles, scale: float, cap: float = 0.0) -> Tensor:
            heads, rows, _ = query.shape
            out = torch.empty((rows, heads, head_dim), dtype=dtype)
            attention = structure("Attention")(
                *(tensor.data_ptr() for tensor in (query, keys, values, out)),
                *(query.stride(0), query.stride(1), keys.stride(0), keys.stride(1)),
                *(rows, len(keys), heads // len(keys), None, scale, cap),
            )
            attend(byref(attention), byref(structure("Tiles")(*tiles.addresses())), c_int64(threads()))
            return out

        return call

    return make


OTHERS = [level.name for level in compiling.LEVELS[1:] if level.name != "avx512"]


@pytest.fixture(params=["widest", *OTHERS])
def vectors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the vector instructions: the processor's widest, and each narrower level that it supports."""
    if known := next((level for level in compiling.LEVELS if level.name == request.param), None):
        if known == native.level() or not native.processor_flags() >= known.needs:
            pytest.skip("the processor lacks it, or has no more")
        monkeypatch.setenv("TOT_ISA", known.name)


def softmax_attention(
    query: Tensor, keys: Tensor, values: Tensor, paths: list[list[int]], cap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """Compute attention by definition in float64, one row and its path at a time: (rows, heads, head_dim)."""
    groups, rows = query.shape[0] // keys.shape[0], []
    for i, path in enumerate(paths):
        seen = [part[:, path].double().repeat_interleave(groups, 0) for part in (keys, values)]
        scores = torch.einsum("hd,hkd->hk", query[:, i].double(), seen[0]) * 0.3
        scores = cap * torch.tanh(scores / cap) if cap else scores
        scores = scores if sinks is None else torch.cat([scores, sinks.double()[:, None]], 1)
        rows.append(torch.einsum("hk,hkd->hd", torch.softmax(scores, -1)[:, : len(path)], seen[1]))
    return torch.stack(rows)


@pytest.fixture(scope="session")
def exact_attention() -> Callable[..., Tensor]:
    return softmax_attention


class Rounding(nn.Linear):
    """A linear layer that rounds its input to integers up to 127, with one scale for each group of 32."""

    def forward(self, input: Tensor) -> Tensor:
        groups = input.unflatten(-1, (-1, 32))
        step = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
        return super().forward(((groups / step).round() * step).flatten(-2))


def floats_of(matrix: QuantizedMatrix) -> Array:
    """Dequantize to (outputs, inputs), float32."""
    plain = matrix.decoded()
    integers, scales = plain.integers.reshape(*plain.scales.shape, -1), plain.scales[..., None]
    if plain.minimums is None:
        return ((integers - np.float32(plain.zero_point)) * scales).reshape(matrix.integers.shape)
    return (integers * scales + plain.minimums[..., None]).reshape(matrix.integers.shape)


@pytest.fixture(scope="session")
def floats() -> Callable[[QuantizedMatrix], Array]:
    return floats_of


class FileIntegers(GGUFWeights):
    """Weights as if a file had these matrices, by default a module's in 8 bits, and the module the vectors."""

    quantized = integers = True
    tokenizer = None  # so they are packed in memory

    def __init__(self, module: Any, matrices: dict[str, Any] | None = None) -> None:
        self._vectors, self.shapes = ModuleWeights(module), weight_shapes(module.config)
        if matrices is None:
            names = [name for name, shape in self.shapes.items() if len(shape) == 2 and "gate.w" not in name]
            with np.errstate(invalid="ignore"):
                matrices = {name: packing.quantized(self._vectors[name]) for name in names if "router" not in name}
        self._matrices = matrices

    def __getitem__(self, name: str) -> Any:
        return self._matrices.get(name, self._vectors[name])


@dataclass
class Lab:
    """Tiny models that run in C, their runners, and the logits of texts."""

    make_model: Callable[..., Any]
    alone: Callable[..., Tensor]
    """An unmodified model's logits for a text run alone: (tokens, vocab)."""
    rounding: type[nn.Linear] = Rounding
    runners: list[Runner] = field(default_factory=list)

    @staticmethod
    def floats(matrix: QuantizedMatrix) -> Array:
        return floats_of(matrix)

    @staticmethod
    def require_kernels() -> None:
        if not (kernels_run(16, 1, np.dtype(np.float32), "cpu") and native.library("sampling", "-O3")):
            pytest.skip("needs a C compiler, and a processor with AVX2")

    def known(self, family: str = "llama", **changes: Any) -> Any:
        """Return a tiny model of a family with a native forward in C, whose norms and biases affect the result."""
        self.require_kernels()
        model = self.make_model(family, **{**WIDE, "num_attention_heads": 4, **changes})
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data = 1 + 0.3 * torch.randn_like(parameter)
            elif "router" in name or name.endswith("mlp.gate.weight"):  # not so sharp that only one expert counts
                parameter.data = 0.3 * torch.randn_like(parameter)
            elif name.endswith(("bias", "sinks")):
                parameter.data = torch.randn_like(parameter)
        return model

    def halved(self, family: str = "llama") -> Any:
        """Return such a model in bfloat16."""
        if not kernels_run(32, 1, np.dtype(bfloat16), "cpu"):
            pytest.skip("needs a processor with bfloat16 products")
        return self.known(family, head_dim=32).bfloat16()

    def integers(self, model: Any, matrices: dict[str, Any] | None = None) -> LoadedModel:
        """Return a model whose file has matrices of integers, by default of 8 bits."""
        loaded = LoadedModel.of(model)
        loaded.stored, loaded.module = FileIntegers(model, matrices), None
        return loaded

    def open(self, model: Any, capacity: int = 3000, backend: type = NativeForward) -> Runner:
        """Open a model or a LoadedModel on the expected backend, until the test ends."""
        loaded = model if isinstance(model, LoadedModel) else LoadedModel.of(model)
        self.runners.append(Runner(loaded, capacity))
        assert isinstance(self.runners[-1].backend, backend)
        return self.runners[-1]

    def text(self, length: int, seed: int = 0) -> list[int]:
        """Return random tokens."""
        return random.Random(seed).choices(range(VOCAB), k=length)

    def texts(self, count: int) -> list[list[int]]:
        return [self.text(20 + 9 * i, seed=count + i) for i in range(count)]

    def computed(self, runner: Runner, texts: list[list[int]], reads: int = 1) -> list[Tensor]:
        """Return the logits of the last `reads` tokens of each text, computed in one forward: (reads, vocab)."""
        with torch.inference_mode():
            branches = [runner.cache.open(tokens) for tokens in texts]
            result = runner.forward([Chunk(branch, 0, len(branch), [0] * reads) for branch in branches])
            for branch in branches:
                runner.cache.rollback(branch, 0)
            runner.cache.clear()
        return [torch.from_numpy(result.logits[rows]) for rows in result.rows]

    def both(self, runner: Runner, reference: Any, texts: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
        """Return the last logits of each text, computed together by a runner and alone by a model."""
        together = [logits[0] for logits in self.computed(runner, texts)]
        return [(logits, self.alone(reference, text)[-1]) for logits, text in zip(together, texts, strict=True)]

    def check(self, runner: Runner, reference: Any, texts: list[list[int]], atol: float = 1e-3) -> None:
        """Check that texts computed together get the logits of the model alone."""
        for logits, expected in self.both(runner, reference, texts):
            torch.testing.assert_close(logits, expected, atol=atol, rtol=1e-4)


@pytest.fixture
def lab(make_model: Callable[..., Any], logits_alone: Callable[..., Tensor]) -> Iterator[Lab]:
    made = Lab(make_model, logits_alone)
    yield made
    for runner in made.runners:
        runner.close()
