"""The last used model stays open for the next call, in one place, until it is closed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from tot import Model, close_models, solve
from tot.decoders import ModelError, OptionError, Request, Sampling, load_decoder
from tot.decoders.engine import open_models
from tot.decoders.engine.open_models import shared_engines
from tot.decoders.kernels.native.compiling import LEVELS
from tot.decoders.models.engine_options import EngineOptions

Loads = list[tuple[str, bool]]
"""The device and the quantization of each load."""
ASKED = [Request(prompt="on and on", sampling=Sampling(max_tokens=6, temperature=1.0, ignore_eos=True))]


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_models()


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the loaded models."""
    seen: list[str] = []
    load = open_models.open_packed

    def counted(model: Any, **options: Any) -> Any:
        seen.append(Path(str(model)).name)
        return load(model, **options)

    monkeypatch.setattr(open_models, "open_packed", counted)
    return seen


@pytest.fixture
def saved(save_model: Callable[..., Path]) -> Callable[..., str]:
    return lambda name, seed=0: str(save_model(name=name, seed=seed, max_position_embeddings=4096))


def ask(model: str, dtype: Any = "auto", **options: Any) -> str:
    named = Model(model, engine=EngineOptions(dtype=dtype, kv_budget="9000"))
    found = solve("gsm8k", "What is 1 + 1?", model=named, search="cot", max_tokens=8, **options)
    assert found.usage.reused_prompt_tokens == 0  # as if the model had just been loaded
    return "\n".join(found.tree.state(node).text for node in found.tree)


def test_a_second_call_loads_nothing_and_returns_the_same(saved: Callable[..., str], loads: list[str]) -> None:
    model = saved("one")
    assert ask(model) == ask(model) == ask(model, decoder="sd")
    assert loads == ["one"]


def test_another_model_or_dtype_replaces_the_previous_one(saved: Callable[..., str], loads: list[str]) -> None:
    one, two = saved("one"), saved("two", seed=1)
    for model, options in ((one, {}), (two, {}), (two, {"dtype": "bf16"}), (two, {"dtype": "bf16"}), (one, {})):
        ask(model, **options)
    assert loads == ["one", "two", "two", "one"]


def test_a_model_that_was_saved_again_is_loaded_again(saved: Callable[..., str], loads: list[str]) -> None:
    first = ask(saved("one"))
    assert ask(saved("one", seed=7)) != first
    assert loads == ["one", "one"]


def test_closing_frees_the_model(saved: Callable[..., str], loads: list[str]) -> None:
    model = saved("one")
    with shared_engines([(model, None, EngineOptions(kv_budget="500"))]) as (engine,):
        model_reference = weakref.ref(engine.loaded.model)
    close_models()
    del engine
    gc.collect()
    assert model_reference() is None
    ask(model)
    assert loads == ["one", "one"]


def test_a_failed_engine_is_not_kept(saved: Callable[..., str], loads: list[str]) -> None:
    model = saved("one")
    with shared_engines([(model, None, EngineOptions(kv_budget="500"))]) as (engine,):
        engine.failed = ModelError("the engine has failed")
    with shared_engines([(model, None, EngineOptions(kv_budget="500"))]) as (again,):
        assert again is not engine


def test_decoders_on_one_engine_share_a_named_draft(saved: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft = saved("one"), saved("two")
    with load_decoder("ar", model, kv_budget=3000) as plain:
        expected = [one.tokens for one in plain.generate(ASKED)]
        first = load_decoder("sd", engine=plain.engine, draft=draft)
        second = load_decoder("mcsd", engine=plain.engine, draft=draft)
        assert first.drafter is second.drafter
        first.close()
        completions = second.generate(ASKED)
        assert [one.tokens for one in completions] == expected
        assert completions[0].usage.drafted > 0
        drafter: Any = second.drafter
        second.close()
        with load_decoder("sd", engine=plain.engine, draft=draft) as third:
            assert third.drafter is drafter
    assert drafter.runner._closed


# -- quantization of .gguf files ----------------------------------------------------------------------------------


@pytest.fixture
def load_calls(monkeypatch: pytest.MonkeyPatch) -> Loads:
    """The loads so far. Nothing is loaded, and one CUDA device exists."""
    seen: Loads = []

    def load(model: Any, *, device: str, integers: bool, **options: Any) -> Any:
        seen.append((device, integers))
        raise ModelError("asked for")

    monkeypatch.setattr(open_models, "open_packed", load)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(open_models, "level", lambda: LEVELS[0])
    monkeypatch.setattr(open_models, "library", lambda *names: object())
    return seen


@pytest.fixture
def gguf_of(tmp_path: Path) -> Callable[[str], Path]:
    def write(architecture: str) -> Path:
        writer = gguf.GGUFWriter(tmp_path / f"{architecture}.gguf", architecture)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return tmp_path / f"{architecture}.gguf"

    return write


@pytest.mark.parametrize(
    ("device", "architecture", "options", "expected"),
    [
        *[("cpu", name, {}, True) for name in ("llama", "qwen2", "gemma3")],
        *[("auto", "qwen2", {}, True), ("cuda", "qwen2", {}, False), ("cuda:0", "llama", {}, False)],
        *[("cpu", "mamba", {}, False), ("cpu", "qwen2", {"quantize": "gguf"}, True)],
        *[("cpu", "qwen2", {"dtype": "fp32"}, False), ("cpu", "qwen2", {"quantize": "none"}, False)],
        ("cuda", "qwen2", {"quantize": "none"}, False),
        *[("cpu", "smollm2-135m", {}, False), ("cpu", "smollm2-135m", {"quantize": "gguf"}, True)],  # floats by default
        *[("cpu", "qwen2", {"lacks": lacking}, False) for lacking in ("level", "library")],  # no kernels
    ],
)
def test_a_gguf_file_is_loaded_once_in_the_form_for_its_device(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    load_calls: Loads,
    gguf_of: Callable[[str], Path],
    device: str,
    architecture: str,
    options: dict[str, Any],
    expected: bool,
) -> None:
    settings = {name: value for name, value in options.items() if name != "lacks"}
    if "lacks" in options:
        monkeypatch.setattr(open_models, options["lacks"], lambda *names: None)
    model = request.getfixturevalue("smollm2") if architecture == "smollm2-135m" else gguf_of(architecture)
    with pytest.raises(ModelError, match="asked for"):
        open_models.open_engine(model, device=device, **settings)
    assert load_calls == [(device, expected)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "gguf", "device": "cuda:0"}, "quantize=gguf runs on the CPU only, and the device is cuda: leave"),
        ({"quantize": "int8-dynamic"}, "quantization 'int8-dynamic' was removed: give a .gguf file, or choose none"),
        ({"quantize": "int4"}, "unknown quantization 'int4': choose one of auto, gguf, none"),
    ],
)
def test_quantization_that_is_impossible_is_refused_before_loading(
    load_calls: Loads, gguf_of: Callable[[str], Path], options: Any, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        open_models.open_engine(gguf_of("qwen2"), **options)
    assert not load_calls
