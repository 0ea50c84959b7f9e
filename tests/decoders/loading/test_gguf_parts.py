"""GGUF files of several parts, of floats, and of types that cannot be read."""

from __future__ import annotations

import copy
import itertools
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tot.decoders import ModelError, Request, Sampling, load_decoder
from tot.decoders.engine.engine import Engine
from tot.decoders.engine.runner import Runner
from tot.decoders.kernels.native.library import log_once
from tot.decoders.kernels.native.tiles import kernels_run
from tot.decoders.models.gguf_model import GGUFWeights
from tot.decoders.models.gguf_reader import read_gguf
from tot.decoders.models.loading import load_model, open_model
from tot.decoders.models.model_names import find_model, gguf_parts, has_chat_template, model_key
from tot.evaluation.fingerprint import hash_model

Tensors = dict[str, Any]
REQUEST = Request(prompt="the rain", sampling=Sampling(max_tokens=8, ignore_eos=True))


def rewrite(source: Path, target: Path, tensors: Tensors | None = None, split: int = 0, **added: int) -> list[Path]:
    """Write a GGUF file with other values of some tensors, which give the type, in parts of `split` tensors."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents(), split_max_tensors=split)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1])
    for key, value in added.items():
        writer.add_uint16(key.replace("__", "."), value)
    for tensor in reader.tensors:
        values, kind = (tensors or {}).get(tensor.name, (tensor.data, tensor.tensor_type))
        writer.add_tensor(tensor.name, np.array(values), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(target.parent.glob(f"{target.stem}*.gguf"))


@pytest.fixture
def parts(tiny: Any, tmp_path: Path) -> list[Path]:
    """A model in several files, as llama.cpp's converter writes them."""
    found = rewrite(tiny.path, tmp_path / "many.gguf", split=8)
    assert [path.name for path in found] == [f"many-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    return found


def tokens(path: Path) -> Sequence[int]:
    with load_decoder("ar", path, kv_budget=100) as decoder:
        return decoder.generate([REQUEST])[0].tokens


def test_any_part_opens_the_whole_model(tiny: Any, parts: list[Path], tmp_path: Path) -> None:
    whole, joined = read_gguf(tiny.path), read_gguf(parts[1])
    assert list(joined.tensors) == list(whole.tensors)
    assert all(np.array_equal(joined.tensors[name].data, whole.tensors[name].data) for name in whole.tensors)
    assert joined.setting("block_count") == whole.setting("block_count")
    for part in parts:
        assert gguf_parts(part) == parts
        assert find_model(part) == parts[0]
        assert has_chat_template(part)
    assert len({hash_model(part) for part in parts}) == 1
    assert len({model_key(part)[1:] for part in parts}) == 1
    assert tokens(parts[2]) == tokens(tiny.path)
    loaded = load_model(parts[1], dtype="fp32")
    original = load_model(tiny.path, dtype="fp32")
    assert torch.equal(loaded.model.lm_head.weight, original.model.lm_head.weight)


def test_a_changed_part_changes_the_models_identity(parts: list[Path]) -> None:
    before = hash_model(parts[0]), model_key(parts[0])
    content = parts[2].read_bytes()
    parts[2].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    after = hash_model(parts[0]), model_key(parts[0])
    assert before[0] != after[0]
    assert before[1] != after[1]


@pytest.mark.parametrize(("lost", "named"), [((0,), 0), ((2,), 2), ((0, 1), 0)])
def test_a_missing_part_is_named(
    parts: list[Path], one_line: Callable[..., str], lost: tuple[int, ...], named: int
) -> None:
    for number in lost:
        parts[number].unlink()
    given = next(part for part in parts if part.exists())
    more = " and 1 more" if len(lost) > 1 else ""
    with pytest.raises(ModelError, match=rf"{parts[named].name}{more} are missing: download all parts") as error:
        load_decoder("ar", given, kv_budget=100)
    one_line(error)


def copied(parts: list[Path]) -> None:
    """Replace the second part by the third."""
    shutil.copy(parts[2], parts[1])


def of_a_larger_model(parts: list[Path]) -> None:
    """The part has the right number and count, but the model has other tensors in all."""
    content = parts[1].read_bytes()
    key = b"split.tensors.count"
    place = content.index(key) + len(key) + 4
    (total,) = struct.unpack("<i", content[place : place + 4])
    parts[1].write_bytes(content[:place] + struct.pack("<i", total + 3) + content[place + 4 :])


@pytest.mark.parametrize("damage", [copied, of_a_larger_model])
def test_a_part_of_another_model_is_refused(
    tiny: Any, tmp_path: Path, one_line: Callable[..., str], damage: Callable[[list[Path]], None]
) -> None:
    place = tmp_path / "model"
    place.mkdir()
    damage(rewrite(tiny.path, place / "many.gguf", split=8))
    with pytest.raises(ModelError, match=r"the header of .* says .*: download all parts of one model") as error:
        load_model(min(place.glob("*.gguf")))
    one_line(error)


def test_a_truncated_part_is_refused(parts: list[Path], tmp_path: Path) -> None:
    parts[2].write_bytes(parts[2].read_bytes()[:-40])
    with pytest.raises(
        ModelError, match=r"00003-of-00003\.gguf is not a readable GGUF file \(its tensor .* ends at byte"
    ):
        load_model(parts[0])


@pytest.mark.parametrize("name", ["a-00000-of-00000.gguf", "a-00003-of-00002.gguf", "a-1-of-2.gguf", "a.gguf"])
def test_other_names_are_single_files(tmp_path: Path, name: str) -> None:
    assert gguf_parts(tmp_path / name) == [tmp_path / name]


def weights(path: Path, kinds: Sequence[str]) -> Tensors:
    """Return random values for the tensors of a file: matrices of each type in turn, vectors in float32."""
    random, new, turn = np.random.default_rng(0), {}, itertools.cycle(kinds)
    for tensor in gguf.GGUFReader(path).tensors:
        kind = gguf.GGMLQuantizationType[next(turn) if len(tensor.shape) == 2 else "F32"]
        values = random.standard_normal(tensor.shape[::-1], np.float32) * np.float32(0.2)
        new[tensor.name] = gguf.quantize(values, kind), kind
    return new


@pytest.mark.parametrize(
    ("kinds", "kept"),
    [(["BF16"], "bfloat16"), (["F16"], "float32"), (["F32"], "float32"), (["F16", "BF16"], "float32")],
)
def test_a_file_of_floats_is_computed_exactly(tiny: Any, tmp_path: Path, kinds: list[str], kept: str) -> None:
    if not kernels_run(16, 2, np.dtype(np.float32), "cpu"):
        pytest.skip("needs a C compiler, and a processor with AVX2")
    new = weights(tiny.path, kinds)
    (path,) = rewrite(tiny.path, tmp_path / "floats.gguf", new)
    loaded = open_model(path, integers=True)
    assert isinstance(loaded.stored, GGUFWeights)
    assert not loaded.stored.quantized
    if kept == "bfloat16":  # whose inputs would be rounded, too
        loaded = open_model(path, dtype="fp32", integers=True)
    names = ["model.embed_tokens.weight"]
    if kept == "float32":
        assert loaded.dtype == np.float32
        names.append("model.norm.weight")
    for name, source in zip(names, ("token_embd.weight", "output_norm.weight"), strict=False):
        assert np.array_equal(loaded.weights.array(name).astype(np.float32), gguf.dequantize(*new[source]))
    reference = copy.deepcopy(tiny.model)
    for name, weight in reference.named_parameters():
        weight.data = torch.from_numpy(loaded.weights.array(name).astype(np.float32))
    with load_decoder("ar", engine=Engine(loaded, 100, owned=True)) as decoder:
        assert decoder.engine.runner.backend.name == f"C, weights kept in {kept}"
        text = list(decoder.engine.codec.encode_prompt(REQUEST.prompt))
        for token in decoder.generate([REQUEST])[0].tokens:
            assert token == int(reference(torch.tensor([text])).logits[0, -1].argmax())
            text.append(token)


def test_floats_beside_integers_are_rounded_to_eight_bits(tiny: Any, tmp_path: Path, caplog: Any) -> None:
    if not kernels_run(16, 2, np.dtype(np.float32), "cpu"):
        pytest.skip("needs a C compiler, and a processor with AVX2")
    new = weights(tiny.path, ["F16", "Q8_0", "BF16"])
    (path,) = rewrite(tiny.path, tmp_path / "mixed.gguf", new)
    loaded = open_model(path, dtype="fp32", integers=True)
    assert isinstance(loaded.stored, GGUFWeights)
    assert loaded.stored.quantized
    log_once.cache_clear()
    with caplog.at_level("INFO", logger="tot"):
        runner = Runner(loaded, 100)
    assert runner.backend.name == "C, weights kept in gguf"
    assert "rounded to eight bits" in caplog.text
    runner.close()
