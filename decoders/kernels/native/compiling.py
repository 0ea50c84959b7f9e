"""Compilation of the C libraries: processor levels, and compiler options by model.

A wheel contains a library for every level. `setup.py` builds them by running this file alone, so it may import the
standard library only. Without a wheel, `library.py` compiles a library when it is first needed.
"""

from __future__ import annotations

import hashlib
import platform
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

SOURCES = Path(__file__).parent
BUILT = "built"
"""The folder of a wheel's libraries, next to the sources."""
SEAL = hashlib.sha256().digest_size
"""Bytes of the SHA-256 at the end of a library."""
HEADS = (64, 96, 128, 256)
"""Head dimensions that a wheel's libraries support; others are compiled at first use."""
EXPORTS: dict[str, tuple[str, ...]] = {
    "forward": ("forward", "scratch_floats"),
    "sampling": ("read_rows",),
    "pool": (),
}
"""The names that a C file shares. In a library each has a suffix, so that one library holds several variants.

All libraries share the pool of threads: its function has no suffix, and is found in the first library with it."""


@dataclass(frozen=True)
class Level:
    """A processor level: the set of instruction set extensions, by their names in Linux, that it requires."""

    name: str
    needs: frozenset[str]
    lanes: int
    """Float32 lanes of a vector in simd.h."""
    march: str = ""
    """The compiler's -march value. If empty, each extension gets its own -m option."""

    @property
    def options(self) -> tuple[str, ...]:
        if self.march:
            return (f"-march={self.march}",)
        return tuple(sorted(f"-m{flag.replace('_', '-' if 'amx' in flag else '')}" for flag in self.needs))

    @property
    def bfloat16(self) -> bool:
        """Whether the level has bfloat16 products."""
        return "avx512_bf16" in self.needs

    @property
    def half_store(self) -> bool:
        """Whether the level converts float16, in which float32 forwards may store keys and values."""
        return "f16c" in self.needs


_AVX2 = {"avx2", "fma", "f16c"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
_LEVELS = {
    "x86_64": (
        Level("amx", frozenset(_AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"}), 16),
        Level("avx512-bf16", frozenset(_AVX512 | {"avx512_bf16"}), 16),
        Level("avx512", frozenset(_AVX512), 16),
        Level("avx2-vnni", frozenset(_AVX2 | {"avx_vnni"}), 8),
        Level("avx2", frozenset(_AVX2), 8),
    ),
    "aarch64": (
        Level("neon-dot", frozenset({"asimd", "asimddp"}), 4, "armv8.2-a+dotprod"),
        Level("neon", frozenset({"asimd"}), 4, "armv8-a"),
    ),
}
LEVELS = _LEVELS.get(platform.machine(), ())
"""The levels of this machine's architecture, best first."""

# The sources use explicit vectors: beyond -O1, code compiles more slowly and runs no faster, except where noted.
_VECTORS = ("-O1",)
_WEIGHTS = {
    "float32": ("-DWEIGHTS=32",),
    "bfloat16": ("-DWEIGHTS=16",),
    "gguf": ("-DWEIGHTS=8", "-fno-tree-ter"),  # keeps the order of the products, whose sums then stay in registers
}
SAMPLING = ("sampling", "-O3", "-fno-trapping-math", "-ffp-contract=off")
POOL = ("pool", "-O1")


def forward(head_dim: int, float32: bool, weights: str, lanes: int, half_store: bool = False) -> tuple[str, ...]:
    """Return the C file and options of the forward library. `weights`: "float32", "bfloat16" or "gguf" (integers).

    With `half_store`, a float32 forward stores keys and values in float16.
    """
    faster = ("-O3",) if weights == "gguf" and lanes == 8 else ()  # 10% faster on this level
    store = ("-DHALF_STORE",) if half_store else ()
    model = f"-DHEAD_DIM={head_dim}", *(("-DFLOAT32",) if float32 else ())
    return "forward", *_VECTORS, *model, *store, *_WEIGHTS[weights], *faster


def source(name: str) -> bytes:
    """Return the text of a C file ("forward"), followed by every file that it includes, each once."""
    pending, texts = [f"{name}.c"], {}
    while pending:
        file = pending.pop(0)
        if file not in texts:
            texts[file] = (SOURCES / file).read_bytes()
            pending += re.findall(r'^#include "([\w.]+)"', texts[file].decode(), re.MULTILINE)
    return b"\n".join(texts.values())


def suffix(name: str, options: Sequence[str]) -> str:
    """Return the suffix of a C file's names in a library: a hash of its sources, options and names."""
    return hashlib.sha256(source(name) + "\0".join((*options, *EXPORTS[name])).encode()).hexdigest()[:16]


def compile_to(path: Path, compiler: str, *units: Sequence[str]) -> None:
    """Compile C files, each a name ("forward") and options, and link them to one library, which is renamed to `path`.

    So a library at `path` is always complete. It ends with a SHA-256 of the preceding bytes, which loaders ignore and
    `open_whole` checks.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, ThreadPoolExecutor() as pool:

        def compile_unit(unit: Sequence[str]) -> str:
            name, *options = unit
            ending = suffix(name, options)
            renamed = (f"-D{export}={export}_{ending}" for export in EXPORTS[name])
            output = f"{folder}/{name}-{ending}.o"
            _run(compiler, "-c", "-fPIC", *options, *renamed, str(SOURCES / f"{name}.c"), "-o", output)
            return output

        library = Path(folder) / "library.so"
        _run(compiler, "-shared", *pool.map(compile_unit, units), "-o", str(library), "-lm", "-pthread")
        library.write_bytes(sealed(library.read_bytes()))
        library.chmod(0o700)
        library.replace(path)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)


def sealed(library: bytes) -> bytes:
    """Return a library followed by its SHA-256."""
    return library + hashlib.sha256(library).digest()


def build(folder: Path, compiler: str) -> None:
    """Compile a library for each level, with the head dimensions in HEADS, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for level in LEVELS:
        path = folder / f"{level.name}.so"
        compile_to(path, compiler, POOL, *((*unit, *level.options) for unit in _units(level)))
        path.chmod(0o755)


def _units(level: Level) -> Iterator[tuple[str, ...]]:
    """Yield the C files of a level, with their options."""
    yield SAMPLING
    for head_dim, float32 in product(HEADS, (True, False) if level.bfloat16 else (True,)):
        kinds = [kind for kind in _WEIGHTS if float32 or kind != "float32"]
        yield from (forward(head_dim, float32, kind, level.lanes) for kind in kinds)
        if level.half_store and not level.bfloat16:
            yield forward(head_dim, True, "gguf", level.lanes, half_store=True)
