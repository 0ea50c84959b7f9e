"""The cache of converted models: one conversion, even among several processes or after a killed one."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ml_dtypes import bfloat16

from tot.decoders import ModelError, Request, Sampling, load_decoder
from tot.decoders.kernels import backend
from tot.decoders.kernels.native.tiles import kernels_run
from tot.decoders.models.gguf_cache import read_manifest
from tot.decoders.models.loading import load_model, open_model
from tot.decoders.models.weights import hash_weights
from tot.decoders.training.cllm.trajectories import collect, trajectories
from tot.decoders.training.options import CollectOptions
from tot.evaluation.fingerprint import hash_model


def test_a_gguf_is_converted_once(
    tiny: Any, tmp_path: Path, conversions: list[Path], logits: Callable[..., torch.Tensor]
) -> None:
    first = load_model(tiny.path, cache_dir=tmp_path)
    second = load_model(tiny.path, cache_dir=tmp_path)
    assert len(conversions) == 1
    assert torch.equal(logits(first.model), logits(second.model))


def test_a_gguf_whose_module_computes_is_converted_once(
    tiny: Any, tmp_path: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the backend in C is not available."""
    monkeypatch.setenv("TOT_CACHE", str(tmp_path))
    monkeypatch.setattr(backend, "native_forward", lambda *given: None)
    for _ in range(2):
        with load_decoder("ar", tiny.path, dtype="fp32") as decoder:
            assert decoder.engine.runner.backend.name.startswith("transformers")
    assert len(conversions) == 1
    assert len([*(tmp_path / "models").glob("*/model.safetensors")]) == 1


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_matrices_left_in_the_file_are_not_converted(
    tmp_path: Path, write_gguf: Callable[..., Any], family: str
) -> None:
    """The converted and the unconverted model have the same identity, biases and norms."""
    path = write_gguf(tmp_path / "a.gguf", family).path
    whole = load_model(path, dtype="fp32", cache_dir=tmp_path)
    unread = open_model(path, dtype="fp32", cache_dir=tmp_path, unread=True)
    assert unread.identity == whole.identity
    assert hash_weights(unread.weights) == hash_model(whole.model)
    vectors = {name: weight for name, weight in whole.model.named_parameters() if weight.dim() == 1}
    assert vectors
    for name, weight in vectors.items():
        assert np.array_equal(unread.weights.array(name), weight.numpy())
    packed = next(tmp_path.glob("models/*-packed/model.safetensors"))
    assert packed.stat().st_size < 0.3 * (next(tmp_path.glob("models/*v?/model.safetensors"))).stat().st_size
    name = "model.layers.0.self_attn.q_proj.weight"
    expected = whole.weights.array(name).astype(bfloat16)
    assert np.array_equal(unread.weights.array(name).astype(bfloat16), expected)
    assert unread.module is None
    assert torch.equal(unread.model.get_parameter(name), whole.model.get_parameter(name))


def test_trajectories_of_a_gguf_decoder_fit_the_fully_loaded_model(
    tmp_path: Path, write_gguf: Callable[..., Any]
) -> None:
    """The decoder has released its matrices. Training on its trajectories uses a model that holds them."""
    if not kernels_run(16, 2, np.dtype(np.float32), "cpu"):
        pytest.skip("needs a C compiler, and a processor with AVX2")
    path, out = write_gguf(tmp_path / "a.gguf").path, tmp_path / "trajectories"
    with load_decoder("ar", path, dtype="fp32", quantize="gguf", kv_budget=500) as decoder:
        collect(decoder.engine, [Request(prompt="hello", sampling=Sampling(max_tokens=8))], out, CollectOptions(n=4))
    assert "weights" in json.loads((out / "settings.json").read_text())
    for dtype in ("fp32", "bf16"):
        assert len(list(trajectories(out, load_model(path, dtype=dtype)))) <= 1
    for seed, family in ((1, "llama"), (0, "qwen2")):
        other = write_gguf(tmp_path / "other.gguf", family, seed=seed).path
        with pytest.raises(ModelError, match=r"holds trajectories of .*a\.gguf \(weights"):
            list(trajectories(out, load_model(other)))


def test_other_content_under_the_same_name_is_another_model(
    tmp_path: Path, conversions: list[Path], write_gguf: Callable[..., Any]
) -> None:
    path = tmp_path / "same.gguf"
    for family in ("llama", "qwen3"):
        write_gguf(path, family)
        assert load_model(path, cache_dir=tmp_path).model.config.model_type == family
    assert len(conversions) == 2


def test_tot_cache_sets_the_folder(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOT_CACHE", str(tmp_path / "mine"))
    load_model(tiny.path)
    assert [read_manifest(place) is not None for place in (tmp_path / "mine" / "models").glob("tiny*/")] == [True]


@pytest.mark.processes
def test_two_processes_convert_once_between_them(
    tiny: Any, tmp_path: Path, run_python: Callable[..., subprocess.Popen[str]]
) -> None:
    code = """
import sys, time
from pathlib import Path
from tot.decoders.models import gguf_cache
def slow(*args, real=gguf_cache.convert):
    print("converts", flush=True)
    real(*args)
    time.sleep(2)
gguf_cache.convert = slow
import torch, transformers
Path(sys.argv[3]).touch()
while len(list(Path(sys.argv[3]).parent.glob("ready*"))) < 2:
    time.sleep(0.01)
print(gguf_cache.cached_model(Path(sys.argv[1]), Path(sys.argv[2])).build)
"""
    runs = [run_python(code, tiny.path, tmp_path / "models", tmp_path / f"ready{i}") for i in range(2)]
    outputs = [run.communicate(timeout=60) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    words = [output.split() for output, _ in outputs]
    assert sorted(map(len, words)) == [1, 2]  # one converted, the other waited
    assert words[0][-1] == words[1][-1]
    assert not list((tmp_path / "models").glob("*.tmp-*"))


@pytest.mark.processes
def test_a_killed_conversion_leaves_nothing_usable(
    tiny: Any,
    tmp_path: Path,
    conversions: list[Path],
    run_python: Callable[..., subprocess.Popen[str]],
    logits: Callable[..., torch.Tensor],
) -> None:
    code = """
import sys, time
from pathlib import Path
import safetensors.numpy
from tot.decoders.models import gguf_cache
def stuck(weights, path, metadata):
    Path(path).write_bytes(b"half")
    print("half written", flush=True)
    time.sleep(60)
safetensors.numpy.save_file = stuck
gguf_cache.cached_model(Path(sys.argv[1]), Path(sys.argv[2]))
"""
    run = run_python(code, tiny.path, tmp_path / "models")
    assert run.stdout is not None
    assert run.stdout.readline() == "half written\n"
    run.kill()
    run.communicate()
    (left,) = (tmp_path / "models").glob("*/")
    assert ".tmp-" in left.name
    loaded = load_model(tiny.path, dtype="fp32", device="cpu", cache_dir=tmp_path)
    assert torch.equal(logits(loaded.model), logits(tiny.model))
    assert len(conversions) == 1
    assert not left.exists()
