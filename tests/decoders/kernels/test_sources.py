"""The C sources: each file compiles alone, with its own includes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tot.decoders.kernels.native.compiling import SOURCES, source

FILES = sorted(path.name for path in SOURCES.iterdir() if path.suffix in (".c", ".h"))
FLAGS = (SOURCES / "compile_flags.txt").read_text().split()


def checked(path: Path) -> subprocess.CompletedProcess[str]:
    """Compile one file with the flags that editors read."""
    compiler = shutil.which("cc")
    if compiler is None or "-mavx2" not in subprocess.getoutput(f"{compiler} --help=target"):
        pytest.skip("there is no C compiler for x86")
    command = [compiler, "-fsyntax-only", "-Wno-psabi", "-x", "c", *FLAGS, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", FILES)
def test_each_file_compiles_alone(name: str) -> None:
    found = checked(SOURCES / name)
    assert (found.returncode, "error" in found.stderr) == (0, False), found.stderr


def test_a_librarys_name_depends_on_all_included_files() -> None:
    text = source("forward")
    for name in ("forward.c", "attention.h", "element.h", "linear.h", "simd.h", "integers.h", "matrix.h", "threads.h"):
        assert text.count((SOURCES / name).read_bytes()) == 1
    assert (SOURCES / "sampling.c").read_bytes() not in text
