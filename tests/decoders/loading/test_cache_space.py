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
from tot.decoders.models import gguf_cache
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


def test_a_cache_folder_that_cannot_be_written_is_replaced_by_a_temporary_one(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, one_line: Callable[..., str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(gguf_cache, "temporary_cache", lambda: tmp_path / "temporary")
    assert load_model(tiny.path, cache_dir=tmp_path / "file").name == str(tiny.path)
    assert [path.name for path in (tmp_path / "temporary").iterdir()] == ["models"]
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith(f"the cache folder {tmp_path}/file/models can't be written (Not a directory), so models")
    monkeypatch.setattr(gguf_cache, "temporary_cache", lambda: tmp_path / "file")
    with pytest.raises(ModelError, match=r"temporary folder .*/file/models can't be written: .*; set TMPDIR") as error:
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
        assert load_model(other.path, cache_dir=tmp_path).name == str(other.path)
        assert not list((tmp_path / "models").glob("other*"))
    finally:
        (tmp_path / "models").chmod(0o700)
