"""Packed weights in the cache folder: written once, packed again if damaged, and enough to open the model."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tot.decoders import Request, Sampling, load_decoder
from tot.decoders.kernels import backend
from tot.decoders.kernels.native import packed_file
from tot.decoders.kernels.native.forward import native_forward
from tot.decoders.kernels.native.library import log_once
from tot.decoders.kernels.native.packed_file import _PLACES, _SEAL, PackedWeights, _seal, open_packed
from tot.decoders.kernels.native.tiles import kernels_run
from tot.decoders.models import gguf_model
from tot.decoders.models.loading import load_model, open_model

REQUEST = Request(prompt="hello", sampling=Sampling(max_tokens=8, ignore_eos=True))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Path:
    """The folder of packed files."""
    if not kernels_run(16, 2, np.dtype(np.float32), "cpu"):
        pytest.skip("needs a C compiler, and a processor with AVX2 or NEON")
    log_once.cache_clear()
    return tmp_path / "cache" / "models"


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The packed files that were written."""
    done: list[Path] = []

    def counted(path: Path, *given: Any, write: Any = packed_file._write) -> None:
        done.append(path)
        write(path, *given)

    monkeypatch.setattr(packed_file, "_write", counted)
    return done


def pack(path: Path) -> PackedWeights:
    """Open a model as an engine does, and return its packed weights."""
    loaded = open_packed(path, dtype="fp32", device="cpu", integers=True)
    assert native_forward(loaded) is not None
    assert isinstance(loaded.stored, PackedWeights)
    return loaded.stored


def contents(weights: PackedWeights) -> dict[str, Any]:
    """Return a copy in memory, because a mapped file may change under its arrays."""
    return {name: (one.strips.tobytes(), *one[1:]) for name, one in weights.products.items()}


def tokens(path: Path, **options: Any) -> Any:
    with load_decoder("ar", path, kv_budget=100, dtype="fp32", **options) as decoder:
        return decoder.generate([REQUEST])[0].tokens


@pytest.mark.parametrize("quantize", ["gguf", "none"])
def test_weights_are_packed_once_and_give_the_same_tokens(
    tiny: Any, cache: Path, writes: list[Path], quantize: str
) -> None:
    assert tokens(tiny.path, quantize=quantize) == tokens(tiny.path, quantize=quantize)
    (file,) = cache.glob("*.packed")
    assert writes == [file]
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "qwen3moe", "gpt-oss"])
def test_a_later_start_does_not_read_the_gguf_file(
    tmp_path: Path, write_gguf: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    path = write_gguf(tmp_path / "a.gguf", family, **({"pre": "qwen2"} if family != "llama" else {})).path
    first = open_model(path, dtype="fp32", integers=True)
    identity, vector = first.identity, first.weights.array("model.norm.weight")
    pack(path)
    module = first.model
    monkeypatch.setattr(gguf_model, "read_gguf", lambda path: pytest.fail("the file is read"))
    again = open_packed(path, dtype="fp32", integers=True)
    assert vars(again.config) == vars(first.config)
    assert (again.identity, again.end_ids, again.size) == (identity, first.end_ids, first.size)
    assert np.array_equal(again.weights.array("model.norm.weight"), vector)
    assert again.tokenizer.encode("hello  <think>5") == first.tokenizer.encode("hello  <think>5")
    assert again.tokenizer.chat_template == first.tokenizer.chat_template
    assert all(one.strips.ctypes.data % 64 == 0 for one in pack(path).products.values())
    monkeypatch.undo()
    assert all(
        np.array_equal(one.numpy(), other.numpy())
        for one, other in zip(again.model.parameters(), module.parameters(), strict=True)
    )


def test_without_the_c_backend_nothing_is_packed(tiny: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(tiny.path, quantize="none")
    next(cache.glob("*.packed")).unlink()
    monkeypatch.setattr(backend, "native_forward", lambda *given: None)
    with load_decoder("ar", tiny.path, dtype="fp32", kv_budget=100) as decoder:
        assert decoder.engine.runner.backend.name == "transformers"
        assert decoder.generate([REQUEST])[0].tokens == expected
    assert not list(cache.glob("*.packed"))


def test_files_of_older_versions_and_unfinished_ones_are_deleted(tiny: Any, cache: Path) -> None:
    pack(tiny.path)
    (file,) = cache.glob("*.packed")
    stem, _, _ = file.stem.rpartition("-")
    stale = [cache / f"{stem}-v0.packed", cache / f".{file.name}.abc.tmp"]
    other = cache / f"other-{stem}-v0.packed"
    for one in (*stale, other):
        one.write_text("")
    file.unlink()
    pack(tiny.path)
    assert sorted(cache.glob("*.packed")) == sorted([file, other])
    assert not any(one.exists() for one in stale)


def test_other_content_under_the_same_name_is_another_model(
    tmp_path: Path, write_gguf: Callable[..., Any], writes: list[Path]
) -> None:
    path = tmp_path / "same.gguf"
    for family in ("llama", "qwen3"):
        write_gguf(path, family)
        pack(path)
        assert open_packed(path, integers=True).config.model_type == family
    assert len(set(writes)) == 2


def flip(place: int) -> Callable[[Path], object]:
    def change(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[place] ^= 64
        file.write_bytes(content)

    return change


def edit(change: Callable[[Any], object]) -> Callable[[Path], None]:
    """Change the index of a packed file, with a valid seal."""

    def rewrite(file: Path) -> None:
        body = file.read_bytes()[:-_SEAL]
        head, begin = _PLACES.unpack(body[-_PLACES.size :])
        index = json.loads(body[begin : -_PLACES.size])
        change(index)
        body = body[:begin] + json.dumps(index).encode() + _PLACES.pack(head, begin)
        file.write_bytes(body)
        file.write_bytes(body + _seal(file, len(body)))

    return rewrite


NAME = "0.qkv"
BEGIN, SIZE, DTYPE, SHAPE, BITS, GROUP, UNIT, ZERO_POINT = range(8)
"""Positions in a product's index entry, by which the C code would read memory."""
WRONG: list[tuple[int, Any]] = [
    *((BEGIN, begin) for begin in (-4096, 1, 2**24, 2**70, None)),
    *((SIZE, size) for size in (0, -1, 4096, 2**40)),
    *((DTYPE, dtype) for dtype in ("float32", "object", None)),
    *((SHAPE, shape) for shape in ([], [-1, 2, 3], 3, "x")),
    *((BITS, bits) for bits in (0, 4, 16, -8)),
    *((GROUP, group) for group in (0, 16, 64, 2**40)),
    *((UNIT, unit) for unit in (0.0, math.nan, "x")),
    *((ZERO_POINT, zero_point) for zero_point in (8.0, -1.0, math.nan)),
]
DAMAGES: list[Callable[[Path], object]] = [
    lambda file: os.truncate(file, file.stat().st_size - 1),
    lambda file: os.truncate(file, 0),
    lambda file: (file.unlink(), os.mkfifo(file)),
    lambda file: file.chmod(0o666),
    lambda file: (file.rename(file.with_name("elsewhere")), file.symlink_to(file.with_name("elsewhere"))),
    *(flip(place) for place in (0, 5000, -1, -40, -200)),
    *(edit(lambda index, at=at, to=to: index["products"][NAME].__setitem__(at, to)) for at, to in WRONG),
    edit(lambda index: index["products"][NAME].append(1)),
    edit(lambda index: index["products"].pop(NAME)),
    edit(lambda index: index["products"].update({NAME: index["products"]["0.down"]})),
    edit(lambda index: index["others"].pop("model.norm.weight")),
    edit(lambda index: index["others"]["model.norm.weight"].__setitem__(0, 2**40)),
    edit(lambda index: index.update(kind="float32")),
    edit(lambda index: index["config"].update(hidden_size=128)),
    edit(lambda index: index["config"].update(model_type="mamba")),
    edit(lambda index: index.update(tokenizer=[0, 2**40])),
    edit(lambda index: index.pop("identity")),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_cannot_be_trusted_is_packed_again(
    tiny: Any, cache: Path, writes: list[Path], damage: Callable[[Path], None]
) -> None:
    """Its numbers are checked even under a valid seal."""
    whole = contents(pack(tiny.path))
    damage(next(cache.glob("*.packed")))
    assert contents(pack(tiny.path)) == whole
    assert len(writes) == 2


@pytest.mark.parametrize(
    ("full", "problem"), [(False, "can be written to by others"), (True, "No space left on device")]
)
def test_without_a_private_folder_with_space_weights_are_packed_in_memory(
    tiny: Any, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, full: bool, problem: str
) -> None:
    def fail(file: Any, array: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    expected = load_model(tiny.path, dtype="fp32").identity
    if full:
        monkeypatch.setattr(packed_file, "_add", fail)
    else:
        cache.mkdir(parents=True)
        cache.chmod(0o777)
    assert pack(tiny.path).identity == expected
    assert tokens(tiny.path, quantize="gguf") == tokens(tiny.path, quantize="gguf")
    (message,) = caplog.messages
    assert message.startswith(f"packed weights can't be kept in {cache} ({problem}), so they are packed again for")
    assert [one for one in cache.iterdir() if one.suffix != ".lock"] == []


# -- other processes ----------------------------------------------------------------------------------------------

CODE = """
import sys, time
from pathlib import Path
from tot.decoders.kernels.native import packed_file
from tot.decoders.kernels.native.forward import native_forward
from tot.decoders.kernels.native.packed_file import open_packed
packed_file.cache_folder = lambda: Path(sys.argv[2])
def slow(*args, real=packed_file._write):
    print("packs", flush=True)
    real(*args)
    time.sleep(2)
packed_file._write = slow
loaded = open_packed(Path(sys.argv[1]), dtype="fp32", integers=True)
Path(sys.argv[3]).touch()
while len(list(Path(sys.argv[3]).parent.glob("ready*"))) < 2:
    time.sleep(0.01)
native_forward(loaded)
print(loaded.identity)
"""


@pytest.mark.processes
def test_two_processes_pack_once_between_them(
    tiny: Any, tmp_path: Path, run_python: Callable[..., subprocess.Popen[str]]
) -> None:
    runs = [run_python(CODE, tiny.path, tmp_path / "cache", tmp_path / f"ready{i}") for i in range(2)]
    outputs = [run.communicate(timeout=60) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    words = [output.split() for output, _ in outputs]
    assert sorted(map(len, words)) == [1, 2]  # one packed, the other waited
    assert words[0][-1] == words[1][-1]
