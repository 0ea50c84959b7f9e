"""The attention kernel in C: compiled once for this processor with the compiler at hand, kept in the cache folder.

Where there is no compiler, or the processor has no bfloat16 products, there is none, and attention goes through
torch's operations. The kernel knows slots and rows; what rows see is cut in `tiles.py`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import shutil
import subprocess
import sysconfig
import tempfile
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from tot.decoders.engine.gguf_cache import cache_folder
from tot.decoders.engine.tiles import Tiles

log = logging.getLogger(__name__)

_NEEDED = {"avx512f", "avx512bw", "avx512vl", "avx512_bf16"}
_MOST_GROUPS = 16
_HEAD_DIMS = (32, 64, 96, 128, 256)


class Kernel:
    """Attention over tiles, for one head dimension."""

    def __init__(self, library: Path) -> None:
        self._attend = ctypes.CDLL(str(library)).attend
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._attend.argtypes = [
            *(pointer, number, number, pointer, pointer, number, number, pointer, pointer, pointer, pointer),
            *(number, number, number, number, ctypes.c_float, number),
        ]
        self._attend.restype = None

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, tiles: Tiles, scale: float) -> Tensor:
        """Shapes: query (heads, rows, head_dim); keys, values (kv_heads, slots, head_dim); all bfloat16 on the CPU.

        Returns (rows, heads, head_dim).
        """
        heads, rows, head_dim = query.shape
        if query.stride(2) != 1:
            query = query.contiguous()
        out = torch.empty((rows, heads, head_dim), dtype=query.dtype)
        kv_heads = keys.shape[0]
        self._attend(
            query.data_ptr(), query.stride(0), query.stride(1),
            keys.data_ptr(), values.data_ptr(), keys.stride(0), keys.stride(1), out.data_ptr(),
            tiles.slots.ctypes.data, tiles.pieces.ctypes.data, tiles.starts.ctypes.data,
            len(tiles.starts) - 1, rows, kv_heads, heads // kv_heads, scale, torch.get_num_threads(),
        )  # fmt: skip
        return out


def kernel_for(head_dim: int, groups: int, dtype: torch.dtype, device: torch.device) -> Kernel | None:
    """The kernel for a model whose `groups` query heads share a key-value head; None where torch has to do it."""
    fits = dtype == torch.bfloat16 and device.type == "cpu" and head_dim in _HEAD_DIMS and groups <= _MOST_GROUPS
    return _compiled(head_dim) if fits else None


@functools.cache
def _compiled(head_dim: int) -> Kernel | None:
    flags = _flags()
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not flags >= _NEEDED or sysconfig.get_platform() != "linux-x86_64":
        return None
    source = files("tot.decoders.engine").joinpath("attention.c").read_bytes()
    about = "\0".join([compiler, str(head_dim), *sorted(flags)]).encode()
    digest = hashlib.sha256(source + about).hexdigest()[:16]
    library = cache_folder() / "native" / f"attention-{digest}.so"
    try:
        if library.exists():
            with suppress(OSError, AttributeError):  # damaged: made anew
                return Kernel(library)
        _compile(compiler, source, head_dim, library)
        return Kernel(library)
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        log.warning("the attention kernel can't be compiled, so attention is slower: %s", reason.strip()[:500])
        return None


def _compile(compiler: str, source: bytes, head_dim: int, library: Path) -> None:
    """To a file of its own first, so that whoever finds the library finds all of it."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        code, made = Path(folder) / "attention.c", Path(folder) / "attention.so"
        code.write_bytes(source)
        options = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", f"-DHEAD_DIM={head_dim}"]
        command = [compiler, *options, str(code), "-o", str(made), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        made.replace(library)


def _flags() -> set[str]:
    """What the processor can do."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return set(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())
