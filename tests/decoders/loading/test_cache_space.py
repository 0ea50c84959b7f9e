"""The cache of converted models: full disks and unwritable folders."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import SafetensorError

from tot.decoders.errors import ModelError
from tot.decoders.models.loading import load_model


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
    ids=["OSError", "SafetensorError"],
)
def test_a_full_disk_reports_the_needed_space_and_leaves_no_files(
    failure: Exception, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_line: Callable[..., str]
) -> None:
    def full(weights: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise failure

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    with pytest.raises(ModelError, match=r"needs [\d,]+ bytes in .+, [\d,]+ are free: .*TOT_CACHE") as error:
        load_model(tiny.path, cache_dir=tmp_path)
    one_line(error)
    assert not list((tmp_path / "models").glob("*/"))
    monkeypatch.undo()
    assert load_model(tiny.path, cache_dir=tmp_path).name == str(tiny.path)


def test_too_little_space_is_reported_before_converting(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conversions: list[Path]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1_000_000))
    needed = 32 * 2**20 + 2 * sum(weight.numel() for weight in tiny.model.parameters())
    with pytest.raises(ModelError, match=f"needs {needed:,} bytes in .*, 1,000,000 are free"):
        load_model(tiny.path, cache_dir=tmp_path)
    assert conversions == []


def test_a_cache_folder_that_cannot_be_written_names_tot_cache(
    tiny: Any, tmp_path: Path, one_line: Callable[..., str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match=r"cache folder .* can't be written .*TOT_CACHE") as error:
        load_model(tiny.path, cache_dir=tmp_path / "file")
    one_line(error)


def test_a_read_only_cache_is_read_but_not_written(tiny: Any, tmp_path: Path, write_gguf: Callable[..., Any]) -> None:
    load_model(tiny.path, cache_dir=tmp_path)
    other = write_gguf(tmp_path / "other.gguf", "qwen3")
    (tmp_path / "models").chmod(0o500)
    if os.access(tmp_path / "models", os.W_OK):
        pytest.skip("this user writes everywhere")
    try:
        assert load_model(tiny.path, cache_dir=tmp_path).name == str(tiny.path)
        with pytest.raises(ModelError, match="can't be written"):
            load_model(other.path, cache_dir=tmp_path)
    finally:
        (tmp_path / "models").chmod(0o700)
