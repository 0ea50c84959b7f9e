"""The cache of converted models: what was damaged is made anew, and never opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tot.decoders.errors import ModelError
from tot.decoders.models import gguf_cache, gguf_convert
from tot.decoders.models.gguf_cache import cached_model, read_manifest
from tot.decoders.models.loading import load_model


def cut_weights(made: Path) -> None:
    with (made / "model.safetensors").open("r+b") as file:
        file.truncate(1000)


def break_weights(made: Path) -> None:
    with (made / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * 64)


def break_tokenizer(made: Path) -> None:
    size = (made / "tokenizer.json").stat().st_size
    (made / "tokenizer.json").write_bytes(b" " * size)


def empty_tokenizer(made: Path) -> None:
    """JSON, but no tokenizer: the tokenizers library raises a plain Exception at it."""
    size = (made / "tokenizer.json").stat().st_size
    (made / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE"}}'.ljust(size))


def break_config(made: Path) -> None:
    size = (made / "config.json").stat().st_size
    (made / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide"}'.ljust(size))


def lose_manifest(made: Path) -> None:
    (made / "manifest.json").unlink()


def break_manifest(made: Path) -> None:
    (made / "manifest.json").write_text("{")


def lose_config(made: Path) -> None:
    (made / "config.json").unlink()


@pytest.mark.parametrize(
    "damage",
    [
        cut_weights,
        break_weights,
        break_tokenizer,
        empty_tokenizer,
        break_config,
        lose_manifest,
        break_manifest,
        lose_config,
    ],
)
def test_a_damaged_conversion_is_made_anew(
    damage: Any, tiny: Any, tmp_path: Path, conversions: list[Path], logits: Callable[..., torch.Tensor]
) -> None:
    made = cached_model(tiny.path, tmp_path / "models")
    damage(made.folder)
    loaded = load_model(tiny.path, dtype="fp32", device="cpu", cache_dir=tmp_path)
    assert torch.equal(logits(loaded.model), logits(tiny.model))
    assert loaded.tokenizer.encode("hello") != []
    assert len(conversions) == 2
    assert cached_model(tiny.path, tmp_path / "models").build != made.build


@pytest.mark.parametrize("damage", [cut_weights, lose_manifest, break_manifest, lose_config])
def test_a_folder_that_does_not_fit_its_manifest_is_never_opened(damage: Any, tiny: Any, tmp_path: Path) -> None:
    made = cached_model(tiny.path, tmp_path)
    assert read_manifest(made.folder) == made
    damage(made.folder)
    assert read_manifest(made.folder) is None


def test_a_conversion_that_stays_unreadable_is_an_error(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def broken(file: Any, place: Path, matrices: bool) -> None:
        gguf_convert.convert(file, place, matrices)
        break_weights(place)
        made.append(place)

    monkeypatch.setattr(gguf_cache, "convert", broken)
    with pytest.raises(ModelError, match="can't be loaded"):
        load_model(tiny.path, cache_dir=tmp_path)
    assert len(made) == 2
