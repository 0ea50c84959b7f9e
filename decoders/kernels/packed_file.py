"""A model's packed weights in one file of the cache folder, which is mapped: whoever opens the model next neither reads
nor packs them again, and processes that use one model hold it once."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from filelock import FileLock

from tot.decoders.errors import ModelError
from tot.decoders.kernels.native import lanes, largest_byte
from tot.decoders.kernels.packing import Packed

_FORMAT = 1
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
        except OSError as error:
            raise ModelError(
                f"packed weights can't be kept in {folder} ({error.strerror or error}): make room there, or set "
                "TOT_CACHE to a folder on another disk"
            ) from error
    assert found is not None
    return found


def _mapped(path: Path) -> dict[str, Packed] | None:
    """What is in the file; None where it is not there, or not whole."""
    try:
        index = json.loads(path.with_suffix(".json").read_text())
        if path.stat().st_size != index["bytes"]:
            return None
        whole = torch.from_file(str(path), shared=False, size=index["bytes"], dtype=torch.uint8)
        return {
            name: Packed(whole[begin : begin + count].view(strips, groups, -1), *form)
            for name, (begin, count, strips, groups, *form) in index["products"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return None


def _make(path: Path, products: Mapping[str, Callable[[], Packed]]) -> None:
    """One product at a time, so that no more than that is held besides. The index comes last."""
    index = path.with_suffix(".json")
    index.unlink(missing_ok=True)
    places = {}
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.stem}.tmp-") as scratch:
        for name, pack in products.items():
            strips, *form = pack()
            places[name] = [scratch.tell(), strips.nbytes, *strips.shape[:2], *form]
            scratch.write(strips.numpy().data)
            scratch.write(bytes(-scratch.tell() % _PAGE))
        scratch.flush()
        os.fsync(scratch.fileno())
        size = scratch.tell()
        path.unlink(missing_ok=True)
        os.link(scratch.name, path)
    index.write_text(json.dumps({"bytes": size, "products": places}))
