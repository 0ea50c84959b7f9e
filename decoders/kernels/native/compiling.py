"""What the parts in C are compiled for: levels of processors, and with which options for which models.

A wheel has them ready for every level (`setup.py`, which runs this file alone: it needs the standard library only);
elsewhere `native.py` compiles what is asked for.
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
"""The folder of a wheel's libraries, beside the sources."""
HEADS = (64, 128)
"""Head dimensions that a wheel's libraries are for; for others they are compiled at first use."""


@dataclass(frozen=True)
class Level:
    """A kind of processor, by what Linux calls its instructions."""

    name: str
    needs: frozenset[str]
    lanes: int
    """Float32 numbers in a vector of simd.h."""
    largest_byte: int
    """The largest weight that its add_bytes multiplies."""
    march: str = ""
    """What compilers call it; where that is nothing, they are told each kind of instructions."""

    @property
    def options(self) -> tuple[str, ...]:
        if self.march:
            return (f"-march={self.march}",)
        return tuple(sorted(f"-m{flag.replace('_', '')}" for flag in self.needs))

    @property
    def bfloat16(self) -> bool:
        """Whether it multiplies bfloat16 numbers."""
        return "avx512_bf16" in self.needs


_AVX2 = {"avx2", "fma", "f16c"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
_LEVELS = {
    "x86_64": (
        Level("avx512-bf16", frozenset(_AVX512 | {"avx512_bf16"}), 16, 255),
        Level("avx512", frozenset(_AVX512), 16, 255),
        Level("avx2-vnni", frozenset(_AVX2 | {"avx_vnni"}), 8, 255),
        Level("avx2", frozenset(_AVX2), 8, 120),
    ),
    "aarch64": (
        Level("neon-dot", frozenset({"asimd", "asimddp"}), 4, 127, "armv8.2-a+dotprod"),
        Level("neon", frozenset({"asimd"}), 4, 127, "armv8-a"),
    ),
}
LEVELS = _LEVELS.get(platform.machine(), ())
"""Of this kind of machine, the best first."""

# Vectors are spelled out: with more than -O1 it takes longer to compile, and no less to run, but where it says so.
_VECTORS = ("-O1", "-fopenmp")
_WEIGHTS = {
    "float32": ("-DWEIGHTS=32",),
    "bfloat16": ("-DWEIGHTS=16",),
    "whole": ("-DWEIGHTS=8",),
}
SAMPLING = ("sampling", "-O3", "-fno-trapping-math", "-ffp-contract=off", "-fopenmp")


def attention(head_dim: int, float32: bool) -> tuple[str, ...]:
    """The C file and options of attention alone. `float32`: of its numbers, else bfloat16."""
    return "attention", *_model(head_dim, float32)


def forward(head_dim: int, float32: bool, weights: str, lanes: int) -> tuple[str, ...]:
    """The C file and options of a whole forward. `weights`: float32, bfloat16, or whole numbers."""
    faster = ("-O3",) if weights == "whole" and lanes == 8 else ()  # by a tenth, measured there
    return "forward", *_model(head_dim, float32), *_WEIGHTS[weights], *faster


def _model(head_dim: int, float32: bool) -> tuple[str, ...]:
    return *_VECTORS, f"-DHEAD_DIM={head_dim}", *(("-DFLOAT32",) if float32 else ())


def source(name: str) -> bytes:
    """A C file ("forward"), and after it every file that it includes, each once."""
    waiting, texts = [f"{name}.c"], {}
    while waiting:
        file = waiting.pop(0)
        if file not in texts:
            texts[file] = (SOURCES / file).read_bytes()
            waiting += re.findall(r'^#include "([\w.]+)"', texts[file].decode(), re.MULTILINE)
    return b"\n".join(texts.values())


def file_name(code: bytes, name: str, options: Sequence[str]) -> str:
    """What a library is called: by all that it is made of."""
    about = hashlib.sha256(code + "\0".join(options).encode())
    return f"{name}-{about.hexdigest()[:16]}.so"


def compile_to(path: Path, compiler: str, name: str, options: Sequence[str]) -> None:
    """Compile a C file ("forward") to a temporary file and rename it, so that a library under this name is whole.

    The library ends with a SHA-256 of what precedes it, which loaders ignore and `is_whole` checks.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / "library.so"
        command = [compiler, "-shared", "-fPIC", *options, str(SOURCES / f"{name}.c"), "-o", str(made), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        made.write_bytes(sealed(made.read_bytes()))
        made.chmod(0o700)
        made.replace(path)


def sealed(library: bytes) -> bytes:
    """A library followed by its SHA-256."""
    return library + hashlib.sha256(library).digest()


def is_whole(path: Path) -> bool:
    """Whether a library is as `compile_to` wrote it. Raises OSError if it cannot be read."""
    content = path.read_bytes()
    return content == sealed(content[: -hashlib.sha256().digest_size])


def build(folder: Path, compiler: str) -> None:
    """Compile for every level what models with such heads need."""
    folder.mkdir(parents=True, exist_ok=True)

    def one(name: str, *options: str) -> None:
        path = folder / file_name(source(name), name, options)
        compile_to(path, compiler, name, options)
        path.chmod(0o755)

    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda made: one(*made), _all()))


def _all() -> Iterator[tuple[str, ...]]:
    """The C file and options of each library."""
    for level in LEVELS:
        made: list[tuple[str, ...]] = [SAMPLING]
        for head_dim, float32 in product(HEADS, (True, False) if level.bfloat16 else (True,)):
            made.append(attention(head_dim, float32))
            kinds = [kind for kind in _WEIGHTS if float32 or kind != "float32"]
            made += [forward(head_dim, float32, kind, level.lanes) for kind in kinds]
        yield from ((*one, *level.options) for one in made)
