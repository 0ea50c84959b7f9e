"""Packed weights are kept: made once, whole or anew, and mapped by whoever comes next."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tot.decoders.errors import ModelError
from tot.decoders.kernels.packed_file import packed_in_file
from tot.decoders.kernels.packing import Packed, packed


@pytest.fixture
def asked() -> list[str]:
    """What was packed."""
    return []


@pytest.fixture
def products(asked: list[str]) -> dict[str, Callable[[], Packed]]:
    torch.manual_seed(0)
    weights = {name: torch.randn(40 + size, 64 * size) for size, name in enumerate(("first", "second"), 1)}

    def pack(name: str) -> Callable[[], Packed]:
        return lambda: asked.append(name) or packed(weights[name], "int8-dynamic")  # type: ignore[func-returns-value]

    return {name: pack(name) for name in weights}


def same(one: dict[str, Packed], other: dict[str, Packed]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name].strips, other[name].strips) and one[name][1:] == other[name][1:] for name in one
    )


def test_what_was_packed_is_found_again(tmp_path: Path, products: Any, asked: list[str]) -> None:
    whole = {name: pack() for name, pack in products.items()}
    asked.clear()
    for _ in range(2):
        found = packed_in_file(tmp_path, products)
        assert same(found, whole)
        assert all(of.strips.data_ptr() % 64 == 0 for of in found.values())
    assert asked == ["first", "second"]


def test_what_was_packed_in_other_ways_goes(tmp_path: Path, products: Any) -> None:
    packed_in_file(tmp_path, products)
    (file,) = tmp_path.glob("*.bin")
    older, elsewhere = (tmp_path / name for name in (f"{file.stem.rpartition('-')[0]}-v0.bin", "packed-99-255-v0.bin"))
    for one in (older, elsewhere):
        one.write_text("")
    file.unlink()
    packed_in_file(tmp_path, products)
    assert sorted(tmp_path.glob("*.bin")) == sorted([file, elsewhere])


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def empty(file: Path) -> None:
    file.with_suffix(".json").write_text("")


def other(file: Path) -> None:
    index = {"bytes": file.stat().st_size, "products": {"first": 3}}
    file.with_suffix(".json").write_text(json.dumps(index))


def lost(file: Path) -> None:
    file.with_suffix(".json").unlink()


@pytest.mark.parametrize("damage", [cut, empty, other, lost])
def test_what_is_not_whole_is_made_anew(
    tmp_path: Path, products: Any, asked: list[str], damage: Callable[[Path], None]
) -> None:
    whole = {name: Packed(of.strips.clone(), *of[1:]) for name, of in packed_in_file(tmp_path, products).items()}
    damage(next(tmp_path.glob("*.bin")))
    assert same(packed_in_file(tmp_path, products), whole)
    assert len(asked) == 4


def test_a_model_of_other_layers_is_not_taken_for_it(tmp_path: Path, products: Any) -> None:
    packed_in_file(tmp_path, products)
    assert packed_in_file(tmp_path, {"first": products["first"]}).keys() == {"first"}


def test_a_failure_leaves_nothing_behind(tmp_path: Path, products: Any) -> None:
    def fail() -> Packed:
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelError, match=r"No space left on device.*set TOT_CACHE to a folder on another disk"):
        packed_in_file(tmp_path, {**products, "second": fail})
    assert [one.suffix for one in tmp_path.iterdir()] == [".lock"]
