"""Cached packed weights: written once, rewritten if damaged, and mapped by later processes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tot.decoders.errors import ModelError
from tot.decoders.kernels.native import packed_file
from tot.decoders.kernels.native.packed_file import packed_in_file
from tot.decoders.kernels.native.packing import Packed, packed

SHAPES = {"first": (41, 64), "second": (42, 128)}


@pytest.fixture
def packings() -> list[str]:
    """The names of the packed weights."""
    return []


@pytest.fixture
def products(packings: list[str]) -> dict[str, Callable[[], Packed]]:
    random = np.random.default_rng(0)
    weights = {name: random.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}

    def pack(name: str) -> Callable[[], Packed]:
        return lambda: packings.append(name) or packed(weights[name], "int8-dynamic")  # type: ignore[func-returns-value]

    return {name: pack(name) for name in weights}


def same(one: dict[str, Packed], other: dict[str, Packed]) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(one[name].strips, other[name].strips) and one[name][1:] == other[name][1:] for name in one
    )


def test_packed_weights_are_reused(tmp_path: Path, products: Any, packings: list[str]) -> None:
    whole = {name: pack() for name, pack in products.items()}
    packings.clear()
    for _ in range(2):
        found = packed_in_file(tmp_path, products, SHAPES)
        assert same(found, whole)
        assert all(of.strips.ctypes.data % 64 == 0 for of in found.values())
    assert packings == ["first", "second"]


def test_files_of_older_packing_versions_are_deleted(tmp_path: Path, products: Any) -> None:
    packed_in_file(tmp_path, products, SHAPES)
    (file,) = tmp_path.glob("*.bin")
    older, elsewhere = (tmp_path / name for name in (f"{file.stem.rpartition('-')[0]}-v0.bin", "packed-99-255-v0.bin"))
    for one in (older, elsewhere):
        one.write_text("")
    file.unlink()
    packed_in_file(tmp_path, products, SHAPES)
    assert sorted(tmp_path.glob("*.bin")) == sorted([file, elsewhere])


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def zero(file: Path) -> None:
    size = file.stat().st_size
    os.truncate(file, 0)
    os.truncate(file, size)


def empty(file: Path) -> None:
    file.with_suffix(".json").write_text("")


def lost(file: Path) -> None:
    file.with_suffix(".json").unlink()


def deep(file: Path) -> None:
    file.with_suffix(".json").write_text("[" * 100_000)


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to(file.with_name("elsewhere"))


def writable(file: Path) -> None:
    file.chmod(0o666)


def writable_index(file: Path) -> None:
    file.with_suffix(".json").chmod(0o620)


@pytest.mark.parametrize("damage", [cut, zero, empty, lost, deep, pipe, link, writable, writable_index])
def test_a_damaged_file_is_packed_again(
    tmp_path: Path, products: Any, packings: list[str], damage: Callable[[Path], None]
) -> None:
    whole = packed_copy(tmp_path, products)
    damage(next(tmp_path.glob("*.bin")))
    assert same(packed_in_file(tmp_path, products, SHAPES), whole)
    assert len(packings) == 4


def packed_copy(folder: Path, products: Any) -> dict[str, Packed]:
    """Return a copy in memory, because a mapped file may change under its arrays."""
    return {name: Packed(of.strips.copy(), *of[1:]) for name, of in packed_in_file(folder, products, SHAPES).items()}


BEGIN, COUNT, STRIPS, GROUPS, BITS, GROUP, UNIT, MIDDLE = range(8)
"""Positions in a product's index entry."""
WRONG: list[dict[int, Any]] = [
    *({BEGIN: begin} for begin in (-4096, 1, 4097, 2**20, 2**62, 2**70, 0.5, "0", None)),
    *({COUNT: count} for count in (0, -1, 4096, 2**40)),
    *({STRIPS: strips} for strips in (0, 1, -1, 2**40)),
    *({GROUPS: groups} for groups in (0, 1, 3, 8, -2)),
    *({BITS: bits} for bits in (0, 4, 16, 1000, -8, True)),
    *({GROUP: group} for group in (0, 1, 16, 64, -32, 2**40)),
    *({UNIT: unit} for unit in (0.0, -1.0, math.nan, math.inf, "x", None)),
    *({MIDDLE: middle} for middle in (8.0, -1.0, 1e308, math.nan, "x")),
    {COUNT: 4096, STRIPS: 1, GROUPS: 1},
    {BITS: 4, GROUP: 16},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
@pytest.mark.parametrize("sealed", [True, False])
def test_no_number_in_the_index_is_trusted(
    tmp_path: Path, products: Any, packings: list[str], wrong: dict[int, Any], sealed: bool
) -> None:
    """The C code would read memory by these numbers. They are checked even under a valid seal."""
    whole = packed_copy(tmp_path, products)
    file = next(tmp_path.glob("*.bin"))
    index = json.loads(file.with_suffix(".json").read_text())
    for place, value in wrong.items():
        index["products"]["second"][place] = value
    if sealed:
        index["sha256"] = packed_file._seal(file, index["products"])
    file.with_suffix(".json").write_text(json.dumps(index))
    assert same(packed_in_file(tmp_path, products, SHAPES), whole)
    assert len(packings) == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["products"]["first"].pop(),
        lambda index: index["products"]["first"].append(1),
        lambda index: index["products"].pop("first"),
        lambda index: index["products"].update(third=index["products"]["first"]),
        lambda index: index["products"].update(first=index["products"]["second"]),
        lambda index: index["products"].update(first=3),
        lambda index: index.update(products=[]),
        lambda index: index.update(bytes=str(index["bytes"])),
        lambda index: index.update(bytes=index["bytes"] - 1),
        lambda index: index.pop("sha256"),
    ],
)
def test_an_edited_index_is_rewritten(
    tmp_path: Path, products: Any, packings: list[str], change: Callable[[Any], object]
) -> None:
    whole = packed_copy(tmp_path, products)
    index_file = next(tmp_path.glob("*.json"))
    index = json.loads(index_file.read_text())
    change(index)
    index_file.write_text(json.dumps(index))
    assert same(packed_in_file(tmp_path, products, SHAPES), whole)
    assert len(packings) == 4


def test_swapped_products_of_one_shape_are_packed_again(tmp_path: Path, packings: list[str]) -> None:
    random = np.random.default_rng(0)
    weights = {name: random.standard_normal((40, 64), np.float32) for name in ("first", "second")}
    products = {name: partial(packed, weight, "int8-dynamic") for name, weight in weights.items()}
    shapes = dict.fromkeys(weights, (40, 64))
    whole = {name: of() for name, of in products.items()}
    packed_in_file(tmp_path, products, shapes)
    index_file = next(tmp_path.glob("*.json"))
    index = json.loads(index_file.read_text())
    first, second = (index["products"][name] for name in ("first", "second"))
    index["products"] = {"first": second, "second": first}
    index_file.write_text(json.dumps(index))
    assert same(packed_in_file(tmp_path, products, shapes), whole)


def test_matrices_of_other_shapes_are_not_read_from_the_file(tmp_path: Path, products: Any) -> None:
    """config.json may have been edited, while the packed file has the old shapes."""
    packed_in_file(tmp_path, products, SHAPES)
    for shape in ((42, 160), (65, 128), (42, 120), (0, 128)):
        with pytest.raises(ModelError, match=r"do not fit the model in .* \(their shapes differ\): delete"):
            packed_in_file(tmp_path, products, {**SHAPES, "second": shape})
    assert packed_in_file(tmp_path, products, SHAPES).keys() == SHAPES.keys()


def test_weights_that_do_not_fit_the_models_shapes_are_refused(tmp_path: Path, products: Any) -> None:
    def mismatched() -> Packed:
        return packed(np.ones((41, 64), np.float32).reshape(9, -1), "int8-dynamic")

    with pytest.raises(ModelError, match=rf"do not fit the model in {tmp_path} \(cannot reshape array .*\): delete"):
        packed_in_file(tmp_path, {**products, "second": mismatched}, SHAPES)


def test_a_folder_that_others_could_write_is_refused(
    tmp_path: Path, products: Any, packings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed_in_file(tmp_path, products, SHAPES)
    tmp_path.chmod(0o777)
    with pytest.raises(ModelError, match=f"{tmp_path} can be written to by others, .*: delete it, or set TOT_CACHE"):
        packed_in_file(tmp_path, products, SHAPES)
    tmp_path.chmod(0o755)
    assert len(packings) == 2
    found = tmp_path.stat()
    strangers = os.stat_result((found.st_mode, *found[1:4], found.st_uid + 7, *found[5:]))
    monkeypatch.setattr(Path, "lstat", lambda path: strangers if path == tmp_path else os.lstat(path))
    with pytest.raises(ModelError, match=rf"belongs to another user \(number {strangers.st_uid}\)"):
        packed_in_file(tmp_path, products, SHAPES)
    monkeypatch.undo()
    somebody = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: somebody)
    if somebody == 1:  # files owned by root are trusted
        assert packed_in_file(tmp_path, products, SHAPES).keys() == SHAPES.keys()


def test_a_file_of_a_model_with_other_layers_is_not_used(tmp_path: Path, products: Any) -> None:
    packed_in_file(tmp_path, products, SHAPES)
    assert packed_in_file(tmp_path, {"first": products["first"]}, {"first": SHAPES["first"]}).keys() == {"first"}


def test_a_failure_leaves_no_files(tmp_path: Path, products: Any) -> None:
    def fail() -> Packed:
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelError, match=r"No space left on device.*set TOT_CACHE to a folder on another disk"):
        packed_in_file(tmp_path, {**products, "second": fail}, SHAPES)
    assert [one.suffix for one in tmp_path.iterdir()] == [".lock"]
