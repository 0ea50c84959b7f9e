"""Products with packed integers and bfloat16: exact but for the rounding of the inputs, at every processor level."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from ml_dtypes import bfloat16

from tot.decoders.kernels.native import packing
from tot.decoders.kernels.native.compiling import LEVELS, SOURCES, Level
from tot.decoders.kernels.native.structures import structure
from tot.decoders.machine import processor_flags
from tot.decoders.models.gguf_quants import QuantizedMatrix
from tot.decoders.models.shapes import Array

EMULATED_TILES = f'-DEMULATED_TILES="{Path(__file__).with_name("emulated_tiles.h")}"'
OUTPUTS, INPUTS = 70, 512
KINDS = {
    "Q4_K": (4, 15, 32, "minimums"),
    "Q4_0": (4, 15, 32, "zero point"),
    "Q2_K": (4, 3, 16, "minimums"),
    "Q3_K": (4, 7, 16, "zero point"),
    "Q5_K": (8, 31, 32, "minimums"),
    "Q6_K": (8, 63, 16, "zero point"),
    "Q8_0": (8, 255, 32, "zero point"),
    "floats": (8, 255, 32, "minimums"),
    "several formats": (8, 255, 16, "minimums"),
    "IQ4_NL": (4, 15, 32, "IQ4_NL"),
    "MXFP4": (4, 15, 32, "MXFP4"),
}
"""Bits, the largest integer, inputs in a group, and minimums, zero point or codebook."""
CODEBOOKS = {
    "IQ4_NL": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "MXFP4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
}
Multiply = Callable[[Any, Array], Array]
"""Multiply a weight (outputs, inputs) and rows (count, inputs): (count, outputs)."""


def multiplier(level: Level, folder: Path, *options: str, bits: int = 8) -> Multiply:
    """Compile the products for a processor level, with weights in integers (8) or bfloat16 (16)."""
    if shutil.which("cc") is None or not processor_flags() >= level.needs:
        pytest.skip("needs a C compiler, and a processor of this level")
    path, code = folder / f"{level.name}{len(options)}-{bits}.so", Path(__file__).with_name("products.c")
    flags = (*level.options, "-O1", "-w", f"-DWEIGHTS={bits}", f"-I{SOURCES}", *options)
    subprocess.run(["cc", "-shared", "-fPIC", *flags, str(code), "-o", str(path), "-lm"], check=True)
    functions = ctypes.CDLL(str(path))

    def multiply(weight: QuantizedMatrix | Array, rows: Array) -> Array:
        strips, *form, codebook = packing.packed(weight, "bfloat16" if bits == 16 else "gguf")
        outputs, inputs = (weight.integers if isinstance(weight, QuantizedMatrix) else weight).shape
        matrix = structure("Matrix")(strips.ctypes.data, None, inputs, outputs, *form)
        matrix.codebook[: len(codebook)] = codebook
        out = np.empty((len(rows), outputs), dtype=np.float32)
        pointers = (ctypes.c_void_p(array.ctypes.data) for array in (rows, out))
        functions.products(ctypes.byref(matrix), next(pointers), ctypes.c_int64(len(rows)), next(pointers))
        return out

    return multiply


class Form(NamedTuple):
    """The products of a processor level. In bfloat16 they use tiles for many rows, and inputs keep more bits."""

    multiply: Multiply
    tiled: bool


@pytest.fixture(scope="module", params=[*(level.name for level in LEVELS), "tiles", "emulated tiles"])
def form(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Form]:
    tiled = "tiles" in request.param
    name = {"tiles": "amx", "emulated tiles": "avx512-bf16"}.get(request.param, request.param)
    level = level_named(name)
    options = [EMULATED_TILES] if request.param == "emulated tiles" else [] if tiled else ["-DFLOAT32"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "lanes", lambda: level.lanes)
        yield Form(multiplier(level, tmp_path_factory.mktemp("products"), *options), tiled)


def level_named(name: str) -> Level:
    level = next((level for level in LEVELS if level.name == name), None)
    if level is None:
        pytest.skip("is of x86-64")
    return level


def weight_of(kind: str, outputs: int = OUTPUTS, inputs: int = INPUTS) -> QuantizedMatrix:
    """Return a random weight, whose scales and minimums are exact in 16 bits."""
    bits, largest, group, form = KINDS[kind]
    random = np.random.default_rng(largest)
    integers = random.integers(0, largest + 1, (outputs, inputs), dtype=np.uint8)
    scales, minimums = (random.integers(1, 1024, (2, outputs, inputs // group)) / 2**14).astype(np.float32)
    if form == "minimums":
        return QuantizedMatrix(integers, scales, -8 * minimums, bits)
    if form == "zero point":
        return QuantizedMatrix(integers, scales, None, bits, zero_point=(largest + 1) / 2)
    return QuantizedMatrix(integers, scales, None, bits, codebook=np.array(CODEBOOKS[form], dtype=np.int8))


def some_rows(count: int, inputs: int = INPUTS) -> Array:
    return np.random.default_rng(count).standard_normal((count, inputs), dtype=np.float32)


def rounded(rows: Array, scale: type) -> Array:
    """Round rows to integers up to 127, with a scale in a number format for each group of 32."""
    groups = rows.reshape(len(rows), -1, 32).astype(np.float64)
    step = np.abs(groups).max(-1, keepdims=True) / 127
    return (np.rint(groups / step) * step.astype(scale)).reshape(rows.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_products_differ_from_the_files_numbers_only_by_the_rounding_of_inputs(
    floats: Callable[[QuantizedMatrix], Array], form: Form, kind: str
) -> None:
    """So the error is that of llama.cpp, whose scales of the inputs have 16 bits, or half of it in tiles."""
    sizes, count = ((300, 2080), 100) if form.tiled else ((OUTPUTS, INPUTS), 13)
    weight, rows = weight_of(kind, *sizes), some_rows(count, sizes[1])
    numbers = floats(weight).astype(np.float64).T
    exact, expected, found = rows @ numbers, rounded(rows, np.float64) @ numbers, form.multiply(weight, rows)
    if not form.tiled:
        assert np.abs(found - expected).max() < 2e-6 * np.abs(rows).max() * np.abs(numbers).sum(0).max()
    llama = rounded(rows, np.float16) @ numbers
    assert 0 < np.square(found - exact).mean() < (0.5 if form.tiled else 1.01) * np.square(llama - exact).mean()


@pytest.mark.parametrize("kind", KINDS)
def test_the_product_of_a_row_does_not_depend_on_other_rows(form: Form, kind: str) -> None:
    """From 64 rows on in tiles."""
    weight, rows = weight_of(kind), some_rows(130)
    together = form.multiply(weight, rows)
    for count in (64, 65, 80, 81, 96, 129) if form.tiled else (1, 2, 3, 5, 8, 9, 17, 70):
        assert np.array_equal(form.multiply(weight, rows[:count]), together[:count])
    if not form.tiled:
        alone = [form.multiply(weight, row[None]) for row in rows[:70]]
        assert np.array_equal(np.concatenate(alone), together[:70])


@pytest.mark.parametrize("largest", [15, 63, 127, 255])
def test_the_largest_numbers_do_not_saturate(form: Form, largest: int) -> None:
    """All products of a group are as large as can be."""
    integers = np.full((OUTPUTS, INPUTS), largest, dtype=np.uint8)
    scales = np.ones((OUTPUTS, INPUTS // 32), dtype=np.float32)
    rows = np.ones((9, INPUTS), dtype=np.float32)
    rows[1::2] *= -1
    for bits in (4, 8) if largest == 15 else (8,):
        for minimums in (None, np.zeros_like(scales)):
            zero_point = 0.5 if minimums is None else 0
            found = form.multiply(QuantizedMatrix(integers, scales, minimums, bits, zero_point), rows)
            expected = rows.sum(1) * (largest - zero_point)
            np.testing.assert_allclose(found, np.tile(expected[:, None], OUTPUTS), rtol=1e-5)


def test_emulated_tiles_equal_real_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    level = level_named("amx")
    monkeypatch.setattr(packing, "lanes", lambda: level.lanes)
    forms: tuple[tuple[str, ...], ...] = ((), (EMULATED_TILES,))
    rows, integers = some_rows(70, 2080), [weight_of(kind, 300, 2080) for kind in KINDS]
    for bits, weights in ((8, integers), (16, [narrow_weight()])):
        real, emulated = (multiplier(level, tmp_path, *options, bits=bits) for options in forms)
        for weight in weights:
            assert np.array_equal(emulated(weight, rows), real(weight, rows))


def narrow_weight() -> Array:
    return np.random.default_rng(1).standard_normal((300, 2080)).astype(bfloat16)


@pytest.mark.parametrize("kind", ["emulated tiles", "tiles", "vectors"])
def test_products_of_bfloat16_differ_only_by_the_order_of_summation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A row has the same products beside any number of other rows."""
    level = level_named("amx" if kind == "tiles" else "avx512-bf16")
    monkeypatch.setattr(packing, "lanes", lambda: level.lanes)
    multiply = multiplier(level, tmp_path, *([EMULATED_TILES] if kind == "emulated tiles" else []), bits=16)
    weight, rows = narrow_weight(), some_rows(100, 2080)
    exact = rows.astype(bfloat16).astype(np.float64) @ weight.astype(np.float64).T
    found = multiply(weight, rows)
    assert np.abs(found - exact).max() < 1e-3 < np.abs(exact).max()
    for count in (0, 1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 48, 49, 64, 65, 99):
        assert np.array_equal(multiply(weight, rows[:count]), found[:count])
