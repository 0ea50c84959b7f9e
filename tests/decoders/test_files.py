"""Files: checks of who could have written a file, and atomic writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tot.decoders import TaskError
from tot.decoders.files import others_could_write, write_json, write_text


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
