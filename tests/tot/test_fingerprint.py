"""Hashes of what a run was made with: right, remembered, and others for other models."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from tot.decoders import ModelError, OptionError
from tot.evaluation import fingerprint


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_files_hash_is_its_sha256(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert fingerprint.hash_path(tmp_path / "x") == hashlib.sha256(b"abc").hexdigest()


def test_a_file_is_hashed_once_and_again_when_it_has_changed(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"abc")
    first, then = fingerprint.hash_path(file), file.stat().st_mtime_ns
    file.write_bytes(b"xyz")
    os.utime(file, ns=(then, then))  # of the same size and time: what it can't tell
    assert fingerprint.hash_path(file) == first
    os.utime(file, ns=(then, then + 1))
    assert fingerprint.hash_path(file) == hashlib.sha256(b"xyz").hexdigest()
    (kept,) = (cache / "sha256").iterdir()
    kept.write_text("{")
    assert fingerprint.hash_path(file) == hashlib.sha256(b"xyz").hexdigest()


def test_a_folders_hash_is_of_its_weights_configuration_and_vocabulary(tmp_path: Path) -> None:
    hashes = []
    for name, text in (("a.safetensors", "1"), ("config.json", "{}"), ("a.safetensors", "22"), ("README.md", "hello")):
        (tmp_path / name).write_text(text)
        hashes.append(fingerprint.hash_model(tmp_path))
    assert len(set(hashes)) == 3
    assert hashes[2] == hashes[3]


def test_models_of_other_weights_have_other_hashes(tiny: Any) -> None:
    with tiny() as one, tiny() as same, tiny() as other:
        next(iter(other.model.parameters())).data[0, 0] += 1
        first, second, third = (fingerprint.hash_model(decoder.model) for decoder in (one, same, other))
    assert first == second != third
    assert fingerprint.hash_model(None) is None


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="absent can't be read: No such file"):
        fingerprint.hash_path(tmp_path / "absent")
    with pytest.raises(ModelError, match="unknown model 'gpt'"):
        fingerprint.hash_model("gpt")
