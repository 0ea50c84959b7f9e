"""Hashes of model files: correct, cached, and different for different models."""

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


def test_a_file_is_hashed_once_and_again_after_a_change(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"abc")
    first, then = fingerprint.hash_path(file), file.stat().st_mtime_ns
    file.write_bytes(b"xyz")
    os.utime(file, ns=(then, then))  # equal size and time: the cache cannot notice this change
    assert fingerprint.hash_path(file) == first
    os.utime(file, ns=(then, then + 1))
    assert fingerprint.hash_path(file) == hashlib.sha256(b"xyz").hexdigest()
    (cached,) = (cache / "sha256").iterdir()
    cached.write_text("{")
    assert fingerprint.hash_path(file) == hashlib.sha256(b"xyz").hexdigest()


def test_the_hash_of_a_folder_covers_all_files_on_which_its_texts_depend(tmp_path: Path) -> None:
    hashes = []
    names = ["a.safetensors", "config.json", "a.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.json"]
    names += ["tokenizer.model", "merges.txt", "special_tokens_map.json", "generation_config.json"]
    names += ["chat_template.jinja", "chat_template.jinja"]
    for number, name in enumerate([*names, "README.md", "trainer_state.json"]):
        (tmp_path / name).write_text("x" * number)
        hashes.append(fingerprint.hash_model(tmp_path))
    assert len(set(hashes)) == len(names)
    assert len(set(hashes[len(names) - 1 :])) == 1


def test_models_with_different_weights_have_different_hashes(tiny: Any) -> None:
    with tiny() as one, tiny() as same, tiny() as other:
        next(iter(other.model.parameters())).data[0, 0] += 1
        first, second, third = (fingerprint.hash_model(decoder.model) for decoder in (one, same, other))
    assert first == second != third
    assert fingerprint.hash_model(None) is None


def test_a_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="absent can't be read: No such file"):
        fingerprint.hash_path(tmp_path / "absent")
    with pytest.raises(ModelError, match="unknown model 'gpt'"):
        fingerprint.hash_model("gpt")
