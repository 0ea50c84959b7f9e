"""A model's packed weights in one file of the cache folder, which is mapped: whoever opens the model next neither reads
nor packs them again, and processes that use one model hold it once.

C reads the file by the numbers in its index. Both are checked before use; what does not fit is packed again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from tot.decoders.errors import ModelError, TaskError, reason
from tot.decoders.files import fingerprint, others_could_write, replacing, write_json
from tot.decoders.kernels.native.library import lanes, largest_byte, log_once
from tot.decoders.kernels.native.packing import Packed
from tot.decoders.machine import free_memory

_FORMAT = 4
"""Of the file and of what is packed; raise it when either changes."""
_PAGE = 4096
Shapes = Mapping[str, tuple[int, int]]
"""Outputs and inputs of each matrix, by name."""


def packed_in_file(folder: Path, products: Mapping[str, Callable[[], Packed]], shapes: Shapes) -> dict[str, Packed]:
    """The packed weights of these products, by name: from the file for this processor's vectors in `folder`, which is
    made first if it is missing, damaged, or not of matrices of these shapes. Raises ModelError if it cannot be written,
    or if others can write to the folder."""
    path = folder / f"packed-{lanes()}-{largest_byte()}-v{_FORMAT}.bin"
    try:
        if problem := others_could_write(folder, trust_root=True):
            raise ModelError(
                f"{folder} {problem}, so the weights in it may be damaged on purpose: delete it, or set TOT_CACHE to a "
                "folder of your own"
            )
        if (found := _mapped(path, shapes)) is not None:
            return found
        with FileLock(path.with_suffix(".lock")):
            if (found := _mapped(path, shapes)) is not None:  # another process made it meanwhile
                return found
            _make(path, products)
            found, problem = _mapped(path, shapes), "they have other shapes"
    except (RuntimeError, ValueError, LookupError) as error:  # their shapes do not allow what is done with them
        found, problem = None, reason(error)
    except (OSError, TaskError) as error:
        raise ModelError(
            f"packed weights can't be kept in {folder} ({reason(error)}): make room there, or set TOT_CACHE to a "
            "folder on another disk"
        ) from error
    if found is None:
        raise ModelError(
            f"the weights in the .gguf file do not fit the model in {folder} ({problem}): delete that folder, and "
            "check that the file is whole"
        )
    return found


def _mapped(path: Path, shapes: Shapes) -> dict[str, Packed] | None:
    """The weights in the file; None if it is missing, damaged, of other matrices, or may be another user's."""
    try:
        if any(others_could_write(file, trust_root=True) for file in (path, path.with_suffix(".json"))):
            return None
        index = json.loads(path.with_suffix(".json").read_text())
        size, products = path.stat().st_size, index["products"]
        if size != index["bytes"] or index["sha256"] != _seal(path, products) or products.keys() != shapes.keys():
            return None
        if size > (free := free_memory(torch.device("cpu"))):
            sizes = f"{size / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"
            log_once(logging.WARNING, f"the weights take {sizes}, so parts of them are read from disk again and again")
        whole = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        found = {}
        for name, (begin, count, strips, groups, *form) in products.items():
            if begin < 0 or begin % _PAGE:
                return None
            of = Packed(whole[begin : begin + count].view(strips, groups, -1), *form)
            if not of.fits(*shapes[name]):
                return None
            found[name] = of
        return found
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError):
        return None


def _seal(path: Path, products: Any) -> str:
    """A SHA-256 of where the products lie and, in part, of the file."""
    return hashlib.sha256(f"{fingerprint(path)} {json.dumps(products, sort_keys=True)}".encode()).hexdigest()


def _make(path: Path, products: Mapping[str, Callable[[], Packed]]) -> None:
    """One product at a time, so that no more than that is held besides. The index comes last. What a process that was
    killed has left goes, and so does what was packed in other ways before."""
    older = [one for one in path.parent.glob(f"{path.stem.rpartition('-')[0]}-v*") if one.stem != path.stem]
    for stale in (path.with_suffix(".json"), *path.parent.glob(f".{path.name}.*"), *older):
        stale.unlink(missing_ok=True)
    places = {}
    with replacing(path) as unfinished, unfinished.open("wb") as file:
        for name, pack in products.items():
            strips, *form = pack()
            places[name] = [file.tell(), strips.nbytes, *strips.shape[:2], *form]
            file.write(strips.numpy().data)
            file.write(bytes(-file.tell() % _PAGE))
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
        unfinished.chmod(0o600)
    index = path.with_suffix(".json")
    write_json(index, {"bytes": size, "products": places, "sha256": _seal(path, places)})
    index.chmod(0o600)
