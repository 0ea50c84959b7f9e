"""Files: fingerprints that detect damage, and checks of who could have written a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tot.decoders.files import fingerprint, others_could_write

MIB = 2**20
LARGE = 17 * MIB
WRITABLE = "can be written to by others"


@pytest.mark.parametrize("size", [1, 100, MIB, LARGE])
def test_a_fingerprint_depends_on_the_size_and_is_stable(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    prints = []
    for length in (size, size, size - 1, size + 1):
        path.touch()
        os.truncate(path, 0)
        os.truncate(path, length)
        prints.append(fingerprint(path))
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


@pytest.mark.parametrize(
    ("size", "place"),
    [(1, 0), (5000, 4999), (MIB, MIB // 2), (LARGE, 0), (LARGE, MIB - 1), (LARGE, MIB), (LARGE, 16 * MIB + 4095)],
)
def test_one_changed_byte_in_the_read_parts_changes_a_fingerprint(tmp_path: Path, size: int, place: int) -> None:
    """Files up to 16 MiB are read whole. Of larger files, the first MiB and the first page of each later MiB are
    read."""
    path = tmp_path / "file"
    path.write_bytes(bytes(size))
    before = fingerprint(path)
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"\x01")
    assert fingerprint(path) != before


def test_zeroed_parts_of_a_large_file_change_its_fingerprint(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"weights." * (LARGE // 8))
    before = fingerprint(path)
    for start in (0, 5 * MIB, LARGE - MIB):
        content = bytearray(b"weights." * (LARGE // 8))
        content[start : start + MIB] = bytes(MIB)
        path.write_bytes(content)
        assert fingerprint(path) != before


@pytest.mark.parametrize(
    ("mode", "problem"),
    [
        (0o600, ""),
        (0o644, ""),
        (0o755, ""),
        (0o620, "can be written to by others"),
        (0o602, "can be written to by others"),
    ],
)
def test_a_file_that_others_can_write_is_detected(tmp_path: Path, mode: int, problem: str) -> None:
    path = tmp_path / "file"
    path.touch()
    path.chmod(mode)
    assert others_could_write(path) == others_could_write(path, trust_root=True) == problem


def test_links_pipes_and_files_of_other_users_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch(0o600)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert others_could_write(tmp_path / "link") == "is a link"
    assert others_could_write(tmp_path / "pipe") == "is neither a file nor a folder"
    owner = (tmp_path / "file").stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert others_could_write(tmp_path / "file") == f"belongs to another user (number {owner})"
    assert bool(others_could_write(tmp_path / "file", trust_root=True)) == (owner != 0)
    with pytest.raises(FileNotFoundError):
        others_could_write(tmp_path / "missing")
