"""The output folder of an evaluation, with every way its work can end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tot.decoders import OptionError
from tot.evaluation.folder import Folder


def fails(path: Path) -> None:
    with Folder(path, {}, {}, resume=False):
        (path / "trees" / "0-0.json").write_text("{}")
        raise RuntimeError("the real error")


def test_a_tree_without_its_sample_hides_no_error_and_the_lock_is_released(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the real error"):
        fails(tmp_path / "out")
    assert not (tmp_path / "out" / "trees").exists()
    Folder(tmp_path / "out", {}, {}, resume=False).close()


def test_a_locked_folder_is_rejected(tmp_path: Path) -> None:
    with Folder(tmp_path / "out", {}, {}, resume=False), pytest.raises(OptionError):
        Folder(tmp_path / "out", {}, {}, resume=False)
