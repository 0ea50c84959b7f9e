"""The folder of compiled kernels: only the user's own libraries run, and a missing kernel is logged with its reason."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from tot.decoders import machine
from tot.decoders.errors import OptionError
from tot.decoders.kernels.native import compiling, tiles
from tot.decoders.kernels.native import library as native
from tot.decoders.kernels.native.compiling import BUILT, LEVELS, compile_to, sealed

OPTIONS = ("-O1",)


def forget() -> None:
    """Clear the caches, as in a new process."""
    for cached in (native._opened, native._built, native.log_once, native.temporary_cache):
        cached.cache_clear()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The kernels' folder in an empty cache."""
    if native.library("sampling", *OPTIONS) is None:
        pytest.skip("needs a C compiler")
    monkeypatch.setenv("TOT_CACHE", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache" / "native"
    forget()


def made() -> native.Library:
    """Load sampling.c like a new process."""
    native._opened.cache_clear()
    current = native.level()
    functions = native._opened("sampling", *OPTIONS, *(() if current is None else current.options))
    assert functions is not None
    assert functions.read_rows
    return functions


def test_compiled_libraries_are_accessible_to_the_user_only(cache: Path) -> None:
    before = os.umask(0)  # without explicit modes, new files are open to everyone
    try:
        assert made().path.parent == cache
    finally:
        os.umask(before)
    (library,) = cache.iterdir()
    assert (cache.stat().st_mode & 0o777, library.stat().st_mode & 0o777) == (0o700, 0o700)
    when = library.stat().st_mtime_ns
    assert made().path == library
    assert library.stat().st_mtime_ns == when


@pytest.mark.parametrize(
    ("whose", "problem"),
    [("group", "can be written to by others"), ("other", "belongs to another user"), ("link", "is a link")],
)
def test_a_library_that_another_user_could_have_planted_is_not_run(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    whose: str,
    problem: str,
) -> None:
    name = made().path.name
    ran = tmp_path / "ran"
    code = tmp_path / "planted.c"
    code.write_text(
        f'#include <stdio.h>\n__attribute__((constructor)) void run(void) {{ fclose(fopen("{ran}", "w")); }}\n'
    )
    planted = tmp_path / "planted.so"
    subprocess.run(["cc", "-shared", "-fPIC", str(code), "-o", str(planted)], check=True)
    (cache / name).unlink()
    planted.replace(cache / name)
    if whose == "group":
        cache.chmod(0o770)
    elif whose == "other":
        somebody = os.getuid() + 1
        monkeypatch.setattr(native.os, "getuid", lambda: somebody)
    else:
        cache.rename(tmp_path / "theirs")
        cache.symlink_to(tmp_path / "theirs")
    forget()
    assert made().path.parent != cache
    made()
    assert not ran.exists()
    assert caplog.text.count(f"compiled kernels, {cache}, {problem}") == 1
    assert "set TOT_CACHE" in caplog.text


def test_a_filled_cache_is_used_although_it_is_read_only(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = made().path

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for change in ("chmod", "mkdir", "write_bytes"):
        monkeypatch.setattr(native.Path, change, read_only)
    monkeypatch.setattr(native.shutil, "which", lambda name: None)  # without a compiler, too
    assert made().path == library
    assert caplog.messages == []


def test_a_folder_that_cannot_be_created_is_replaced_by_a_temporary_one(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.write_text("a file")
    elsewhere = made().path.parent
    assert elsewhere.stat().st_mode & 0o777 == 0o700
    assert cache.parent not in elsewhere.parents
    assert f"compiled kernels, {cache}, can't be created (Not a directory)" in caplog.text


def test_a_missing_compiler_is_logged_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    assert native.library("sampling", *OPTIONS) is None
    assert native.library("forward", *OPTIONS) is None
    assert caplog.messages == ["no C compiler was found, so decoding is slower: install cc, gcc or clang"]


@pytest.mark.skipif(LEVELS[-1].name != "avx2", reason="is of x86-64")
def test_missing_processor_features_are_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    native.log_once.cache_clear()
    for module in (native, tiles):
        monkeypatch.setattr(module, "processor_flags", lambda: frozenset({"avx2", "sse4_2"}))
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert not tiles.kernels_run(64, 1, np.dtype(np.float32), "cpu")
    problem = "this processor lacks f16c, fma, so torch computes in float32, which is slower"
    assert caplog.messages == [problem]


@pytest.mark.skipif(LEVELS[-1].name != "avx2", reason="is of x86-64")
def test_a_processor_level_can_be_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "processor_flags", lambda: LEVELS[2].needs | {"sse4_2"})
    assert (native.level(), native.lanes()) == (LEVELS[2], 16)
    monkeypatch.setenv("TOT_ISA", "avx2")
    assert (native.level(), native.lanes()) == (LEVELS[-1], 8)
    monkeypatch.setenv("TOT_ISA", "avx512-bf16")
    with pytest.raises(OptionError, match="TOT_ISA is avx512-bf16, and this processor lacks avx512_bf16: unset "):
        native.level()
    monkeypatch.setenv("TOT_ISA", "sse9")
    with pytest.raises(OptionError, match="unknown TOT_ISA 'sse9': choose one of amx, avx2, avx2-vnni, "):
        native.level()
    monkeypatch.delenv("TOT_ISA")
    monkeypatch.setattr(native, "processor_flags", lambda: frozenset({"sse4_2"}))
    assert native.level() is None


@pytest.mark.skipif(LEVELS[-1].name != "avx2", reason="is of x86-64")
@pytest.mark.parametrize(("permitted", "name"), [(True, "amx"), (False, "avx512-bf16")])
def test_tiles_are_used_only_if_the_kernel_permits_them(
    monkeypatch: pytest.MonkeyPatch, permitted: bool, name: str
) -> None:
    monkeypatch.setattr(machine, "processor_info", lambda what: " ".join(LEVELS[0].needs))
    monkeypatch.setattr(machine, "_may_use_tiles", lambda: permitted)
    monkeypatch.setattr(native, "processor_flags", machine.processor_flags.__wrapped__)
    selected = native.level()
    assert selected is not None
    assert selected.name == name


def flipped(content: bytes) -> bytes:
    place = len(content) // 3
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[: len(content) // 2],  # loading it would crash the process
    "empty": lambda content: b"",
    "flipped": flipped,
    "in need of another library": lambda content: sealed(b"\x7fELF"),
}


def damage(library: Path, kind: str) -> None:
    """Replace the file, because this process has mapped the old one."""
    content = DAMAGES[kind](library.read_bytes())
    library.unlink()
    library.write_bytes(content)


@pytest.fixture
def ready(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """sampling.c and pool.c compiled as in a wheel, with an empty cache."""
    current = native.level()
    assert current is not None
    (tmp_path / BUILT).mkdir()
    placed = tmp_path / BUILT / f"{current.name}.so"
    compile_to(placed, "cc", compiling.POOL, ("sampling", *OPTIONS, *current.options))
    for file in ("sampling.c", "pool.c", "threads.h", "waiting.h"):
        shutil.copy(compiling.SOURCES / file, tmp_path)
    for module in (native, compiling):
        monkeypatch.setattr(module, "SOURCES", tmp_path)
    forget()
    return placed


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("compiler", [True, False])
def test_a_broken_prebuilt_library_is_recompiled_or_left_out_with_one_warning(
    ready: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    compiler: bool,
) -> None:
    damage(ready, kind)
    if not compiler:
        monkeypatch.setattr(native.shutil, "which", lambda name: None)
    for _ in range(2):
        native._opened.cache_clear()
        found = native.library("sampling", *OPTIONS)
        assert (found and found.path.parent) == (cache if compiler else None)
    (message,) = caplog.messages
    advice = "they are compiled instead: reinstall tot to avoid this"
    missing = "no C compiler was found, so decoding is slower: install cc, gcc or clang"
    assert message.startswith("the prebuilt kernels can't be opened (")
    assert message.endswith(f"); {advice if compiler else missing}")
    assert "\n" not in message


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_library_in_the_cache_is_recompiled(cache: Path, kind: str) -> None:
    library = made().path
    damage(library, kind)
    assert made().path == library
    assert library.read_bytes() == sealed(library.read_bytes()[:-32])


def test_memory_of_zeros_is_taken_when_it_is_written_to() -> None:
    before = psutil.Process().memory_info().rss
    zeros = native.lazy_zeros((64, 2**15, 64), np.float32)  # 512 MiB
    zeros[:, 5] = 7
    assert psutil.Process().memory_info().rss - before < 2**24
    assert (zeros[:, 5] == 7).all()
    assert not zeros[:, :3].any()
    assert zeros.ctypes.data % 64 == 0
    with pytest.raises(MemoryError, match="no memory for"):
        native.lazy_zeros((2**20, 2**40), np.float32)
