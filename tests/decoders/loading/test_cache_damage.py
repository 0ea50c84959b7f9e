"""The cache of converted models: a damaged conversion is repeated and never opened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tot.decoders.errors import ModelError
from tot.decoders.models import gguf_cache, gguf_convert
from tot.decoders.models.gguf_cache import cached_model, read_manifest
from tot.decoders.models.loading import load_model, open_model


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
    """Write JSON that is not a tokenizer. The tokenizers library raises a plain Exception for it."""
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


def zero_weights(made: Path) -> None:
    weights = made / "model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))


def flip_a_weight(made: Path) -> None:
    content = bytearray((made / "model.safetensors").read_bytes())
    content[-100] ^= 64
    (made / "model.safetensors").write_bytes(content)


def change_config(made: Path) -> None:
    text = (made / "config.json").read_text()
    assert '"num_hidden_layers": 2' in text
    (made / "config.json").write_text(text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))


def add_template(made: Path) -> None:
    (made / "additional_chat_templates").mkdir()
    (made / "added_tokens.json").write_text("{}")


def nest_manifest(made: Path) -> None:
    (made / "manifest.json").write_text("[" * 100_000)


def empty_manifest(made: Path) -> None:
    manifest = json.loads((made / "manifest.json").read_text())
    (made / "manifest.json").write_text(json.dumps({**manifest, "files": {}}))


def open_to_all(made: Path) -> None:
    made.chmod(0o777)


def open_file_to_all(made: Path) -> None:
    (made / "config.json").chmod(0o666)


@pytest.mark.parametrize(
    "damage",
    [
        zero_weights,
        flip_a_weight,
        change_config,
        add_template,
        nest_manifest,
        empty_manifest,
        open_to_all,
        open_file_to_all,
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
def test_a_damaged_conversion_is_repeated(
    damage: Any, tiny: Any, tmp_path: Path, conversions: list[Path], logits: Callable[..., torch.Tensor]
) -> None:
    made = cached_model(tiny.path, tmp_path / "models")
    damage(made.folder)
    loaded = load_model(tiny.path, dtype="fp32", device="cpu", cache_dir=tmp_path)
    assert torch.equal(logits(loaded.model), logits(tiny.model))
    assert loaded.tokenizer.encode("hello") != []
    assert len(conversions) == 2
    assert cached_model(tiny.path, tmp_path / "models").build != made.build


@pytest.mark.parametrize(
    "damage", [cut_weights, change_config, flip_a_weight, lose_manifest, break_manifest, lose_config]
)
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


def test_a_cache_on_a_disk_without_owners_is_refused(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_line: Callable[..., str]
) -> None:
    """On such a disk other users can write everything, regardless of modes."""
    monkeypatch.setattr(gguf_cache, "others_could_write", lambda path, trust_root: "can be written to by others")
    with pytest.raises(ModelError, match=r"converted model in .* can be written to by others: set TOT_CACHE") as error:
        load_model(tiny.path, cache_dir=tmp_path)
    one_line(error)


def lose_weight(weights: dict[str, torch.Tensor]) -> None:
    weights.pop("model.layers.1.mlp.down_proj.weight")


def shorten_vector(weights: dict[str, torch.Tensor]) -> None:
    weights["model.norm.weight"] = weights["model.norm.weight"][:8].clone()


def square_matrix(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(8, 8)


@pytest.mark.parametrize("change", [lose_weight, shorten_vector, square_matrix])
def test_weights_that_do_not_fit_the_config_are_converted_again_even_if_the_manifest_fits(
    tiny: Any, tmp_path: Path, conversions: list[Path], change: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    """The C code reads the number of values that config.json implies."""
    made = cached_model(tiny.path, tmp_path / "models", matrices=False)
    weights = load_file(made.folder / "model.safetensors")
    change(weights)
    save_file(weights, made.folder / "model.safetensors", metadata={"format": "pt"})
    gguf_cache._write_manifest(made.folder)
    assert read_manifest(made.folder) is not None
    loaded = open_model(tiny.path, cache_dir=tmp_path, unread=True)
    assert len(conversions) == 2
    assert loaded.weights.array("model.norm.weight").shape == (64,)


@pytest.mark.parametrize("cached_hash", ["../../elsewhere", "0" * 63, "0" * 65, "G" * 64, 3, None, ["0" * 64]])
def test_an_invalid_cached_hash_is_recomputed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached_hash: object
) -> None:
    """The hash becomes part of a folder's name."""
    monkeypatch.setenv("TOT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "file").write_text("content")
    digest = gguf_cache.hash_file(tmp_path / "file")
    (record,) = (tmp_path / "cache" / "sha256").iterdir()
    record.write_text(json.dumps({**json.loads(record.read_text()), "sha256": cached_hash}))
    assert gguf_cache.hash_file(tmp_path / "file") == digest
    assert json.loads(record.read_text())["sha256"] == digest


def test_a_cached_hash_that_others_could_write_is_recomputed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "file").write_text("content")
    digest = gguf_cache.hash_file(tmp_path / "file")
    (record,) = (tmp_path / "cache" / "sha256").iterdir()
    record.write_text(json.dumps({**json.loads(record.read_text()), "sha256": "0" * 64}))
    assert gguf_cache.hash_file(tmp_path / "file") == "0" * 64
    record.chmod(0o666)
    assert gguf_cache.hash_file(tmp_path / "file") == digest
    assert record.stat().st_mode & 0o777 == 0o600
