"""Files: fingerprints that detect damage, and checks of who could have written a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tot.decoders import TaskError
from tot.decoders.files import fingerprint, others_could_write, replacing, write_json, write_text

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


# -- writing ------------------------------------------------------------------------------------------------------


def test_a_link_with_the_name_of_a_temporary_file_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = iter(["taken", "free"])
    monkeypatch.setattr("tot.decoders.files.secrets.token_hex", lambda count: next(names))
    (tmp_path / "victim").write_text("precious")
    (tmp_path / ".run.json.taken.tmp").symlink_to(tmp_path / "victim")
    with pytest.raises(TaskError, match=r"run\.json can't be written: File exists"):
        write_text(tmp_path / "run.json", "mine")
    assert (tmp_path / "victim").read_text() == "precious"
    write_text(tmp_path / "run.json", "mine")
    assert (tmp_path / "run.json").read_text() == "mine"


def test_names_of_temporary_files_differ(tmp_path: Path) -> None:
    names = set()
    for _ in range(20):
        with replacing(tmp_path / "x") as file:
            names.add(file.name)
            assert Path(file.name).parent == tmp_path
    assert len(names) == 20
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_file_is_on_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[int, bool]] = []
    sync = os.fsync

    def record(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, (tmp_path / "x").exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    write_text(tmp_path / "x", ["one ", "two"])
    assert synced == [((tmp_path / "x").stat().st_ino, False), (tmp_path.stat().st_ino, True)]


def test_a_private_file_is_for_the_user_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_json(tmp_path / "open", {})
        write_json(tmp_path / "private", {}, private=True)
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("open", "private")] == [0o644, 0o600]


def test_a_device_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TaskError, match=r"pipe can't be written: not a regular file; give another file"):
        write_text(tmp_path / "pipe", "x")
    assert (tmp_path / "pipe").is_fifo()
