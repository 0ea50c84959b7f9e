"""The packed weights of a model, in one memory-mapped file of the cache folder.

The weights are packed once, and processes that use the same model share its memory. C reads the file at the offsets in
its index. File and index are checked before use, and packed again if they do not match.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from tot.decoders.errors import ModelError, TaskError, reason
from tot.decoders.files import fingerprint, others_could_write, replacing, write_json
from tot.decoders.kernels.native.library import lanes, log_once
from tot.decoders.kernels.native.packing import Packed
from tot.decoders.machine import free_memory

_FORMAT = 5
"""Version of the file and of the packed layout; increment it when either changes."""
_PAGE = 4096
Shapes = Mapping[str, tuple[int, int]]
"""(outputs, inputs) of each matrix, by name."""


def packed_in_file(folder: Path, products: Mapping[str, Callable[[], Packed]], shapes: Shapes) -> dict[str, Packed]:
    """Map the packed weights of `products`, by name, from the file in `folder` for this processor's vectors.

    Writes the file first if it is missing, damaged, or has matrices of other shapes. Raises ModelError if it cannot be
    written, if other users can write to the folder, or if the weights do not have these `shapes`."""
    path = folder / f"packed-{lanes()}-v{_FORMAT}.bin"
    try:
        if problem := others_could_write(folder, trust_root=True):
            raise ModelError(
                f"{folder} {problem}, so another user may have changed the weights in it: delete it, or set TOT_CACHE "
                "to a private folder"
            )
        if (weights := _mapped(path, shapes)) is not None:
            return weights
        with FileLock(path.with_suffix(".lock")):
            if (weights := _mapped(path, shapes)) is not None:  # another process wrote it in the meantime
                return weights
            _write(path, products)
            weights, problem = _mapped(path, shapes), "their shapes differ"
    except (RuntimeError, ValueError, LookupError) as error:  # weights of invalid shapes
        weights, problem = None, reason(error)
    except (OSError, TaskError) as error:
        raise ModelError(
            f"packed weights can't be written to {folder} ({reason(error)}): free space there, or set TOT_CACHE to a "
            "folder on another disk"
        ) from error
    if weights is None:
        raise ModelError(
            f"the weights in the .gguf file do not fit the model in {folder} ({problem}): delete that folder, and "
            "check that the file is complete"
        )
    return weights


def _mapped(path: Path, shapes: Shapes) -> dict[str, Packed] | None:
    """Map the weights in the file. Returns None if it is missing, damaged, writable by others, or of other shapes."""
    try:
        if any(others_could_write(file, trust_root=True) for file in (path, path.with_suffix(".json"))):
            return None
        index = json.loads(path.with_suffix(".json").read_text())
        size, products = path.stat().st_size, index["products"]
        if size != index["bytes"] or index["sha256"] != _seal(path, products) or products.keys() != shapes.keys():
            return None
        if size > (free := free_memory("cpu")):
            sizes = f"{size / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"
            log_once(logging.WARNING, f"the weights take {sizes}, so parts of them are read from disk repeatedly")
        content = np.memmap(path, dtype=np.uint8, mode="r", shape=(size,))
        weights = {}
        for name, (begin, count, strips, groups, *form) in products.items():
            if begin < 0 or begin % _PAGE:
                return None
            packed = Packed(content[begin : begin + count].reshape(strips, groups, -1), *form)
            if not packed.fits(*shapes[name]):
                return None
            weights[name] = packed
        return weights
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError):
        return None


def _seal(path: Path, products: Any) -> str:
    """Return a SHA-256 of the products' offsets and of parts of the file."""
    return hashlib.sha256(f"{fingerprint(path)} {json.dumps(products, sort_keys=True)}".encode()).hexdigest()


def _write(path: Path, products: Mapping[str, Callable[[], Packed]]) -> None:
    """Pack and write one product at a time, which bounds the memory, then the index.

    Deletes files of older formats and the unfinished files of killed processes."""
    older = [file for file in path.parent.glob(f"packed-{lanes()}-*") if file.stem != path.stem]
    for stale in (
        path.with_suffix(".json"),
        *([] if path.is_file() else [path]),
        *path.parent.glob(f".{path.name}.*"),
        *older,
    ):
        stale.unlink(missing_ok=True)
    offsets = {}
    with replacing(path, private=True) as file:
        for name, pack in products.items():
            strips, *form = pack()
            offsets[name] = [file.tell(), strips.nbytes, *strips.shape[:2], *form]
            file.write(strips.data)
            file.write(bytes(-file.tell() % _PAGE))
        size = file.tell()
    index = {"bytes": size, "products": offsets, "sha256": _seal(path, offsets)}
    write_json(path.with_suffix(".json"), index, private=True)
