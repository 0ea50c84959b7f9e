"""A model's packed weights in one file of the cache folder, which is mapped: whoever opens the model next neither reads
nor packs them again, and processes that use one model hold it once."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from filelock import FileLock

from tot.decoders.errors import ModelError, TaskError, reason
from tot.decoders.files import replacing, write_json
from tot.decoders.kernels.native import lanes, largest_byte, log_once
from tot.decoders.kernels.packing import Packed
from tot.decoders.memory import free_memory

_FORMAT = 3
"""Of the file and of what is packed; raise it when either changes."""
_PAGE = 4096


def packed_in_file(folder: Path, products: Mapping[str, Callable[[], Packed]]) -> dict[str, Packed]:
    """What is packed of these products, by name: from the file for this processor's vectors in `folder`, which is made
    first where it is not there whole. Raises ModelError where it can't be written."""
    path = folder / f"packed-{lanes()}-{largest_byte()}-v{_FORMAT}.bin"
    found = _mapped(path)
    if found is None or found.keys() != products.keys():
        try:
            with FileLock(path.with_suffix(".lock")):
                if (found := _mapped(path)) is None or found.keys() != products.keys():
                    _make(path, products)
                    found = _mapped(path)
        except (OSError, TaskError) as error:
            raise ModelError(
                f"packed weights can't be kept in {folder} ({reason(error)}): make room there, or set TOT_CACHE to a "
                "folder on another disk"
            ) from error
    assert found is not None
    return found


def _mapped(path: Path) -> dict[str, Packed] | None:
    """What is in the file; None where it is not there, or not whole."""
    try:
        index = json.loads(path.with_suffix(".json").read_text())
        if path.stat().st_size != index["bytes"]:
            return None
        if index["bytes"] > (free := free_memory(torch.device("cpu"))):
            sizes = f"{index['bytes'] / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"
            log_once(logging.WARNING, f"the weights take {sizes}, so parts of them are read from disk again and again")
        whole = torch.from_file(str(path), shared=False, size=index["bytes"], dtype=torch.uint8)
        return {
            name: Packed(whole[begin : begin + count].view(strips, groups, -1), *form)
            for name, (begin, count, strips, groups, *form) in index["products"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return None


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
    write_json(path.with_suffix(".json"), {"bytes": size, "products": places})
