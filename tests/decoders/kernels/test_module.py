"""The reference backend: a transformers module with attention by torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tot.decoders import ModelError, load_model
from tot.decoders.engine.runner import Runner
from tot.decoders.kernels import backend, module
from tot.decoders.kernels.module import TransformersForward, attend
from tot.decoders.models.families import FAMILIES
from tot.decoders.models.loaded import LoadedModel

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.fixture
def _in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every model as a transformers module."""
    monkeypatch.setattr(backend, "native_forward", lambda *_: None)


def random_rows(dtype: torch.dtype, rows: int = 7, length: int = 40) -> tuple[Tensor, ...]:
    """Return queries of 6 heads, and keys and values of 2 heads."""
    random = torch.Generator().manual_seed(rows)
    shapes = ((6, rows, 16), (2, length, 16), (2, length, 16))
    query, keys, values = (torch.randn(*shape, generator=random, dtype=torch.float64) for shape in shapes)
    return query.to(dtype), keys.to(dtype), values.to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(
    ("window", "cap", "sink"), [(None, 0.0, False), (9, 0.0, False), (9, 5.0, False), (None, 0.0, True)]
)
def test_attention_is_softmax_attention(
    exact_attention: Callable[..., Tensor],
    device: str,
    dtype: torch.dtype,
    close: float,
    window: int | None,
    cap: float,
    sink: bool,
) -> None:
    sinks = torch.linspace(-2, 6, 6) if sink else None
    for rows in (1, 7, 40):
        query, keys, values = random_rows(dtype, rows)
        ends = range(len(keys[0]) - rows + 1, len(keys[0]) + 1)
        paths = [[*range(0 if window is None else max(0, end - window), end)] for end in ends]
        exact = exact_attention(query, keys, values, paths, cap, sinks).transpose(0, 1)
        on_device = (tensor.to(device) for tensor in (query, keys, values))
        out = attend(*on_device, 0.3, window, cap, None if sinks is None else sinks.to(device))
        assert out.dtype == dtype
        torch.testing.assert_close(out.cpu().double(), exact, atol=close, rtol=close)


@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_hides_no_nan_key(dtype: torch.dtype, cap: float) -> None:
    query, keys, values = random_rows(dtype)
    keys[0, 3, 3] = float("nan")
    finite = attend(query, keys, values, 0.3, cap=cap).isfinite().all(-1)
    assert finite[3:].all()
    assert not finite[:3].any()


@pytest.mark.usefixtures("_in_torch")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_branches_get_the_logits_of_the_model_alone(lab: Any, family: str, device: str) -> None:
    """Branches share a prefix, and are longer than the windows."""
    model = lab.known(family)
    reference, runner = copy.deepcopy(model), lab.open(model.to(device), 2000, backend=TransformersForward)
    lab.check(runner, reference, [[*lab.text(60), *lab.text(5 + 9 * i, seed=i)] for i in range(5)])


OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 1024},
    "olmo2": {"num_key_value_heads": 2},
    "phi": {},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "sliding_window": 20},
    "cohere": {"num_key_value_heads": 2},
}
"""Families outside FAMILIES, with their settings."""


def other_model(family: str, **changes: Any) -> Any:
    sizes: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 1024}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    own = OTHERS[family]
    settings = {**({} if family == "gpt2" else sizes), **ends, **own, **changes}
    config = AutoConfig.for_model(family, vocab_size=300, initializer_range=0.3, **settings)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_are_loaded_and_get_the_logits_of_the_model_alone(
    lab: Any, tokenizer: Any, family: str, tmp_path: Path
) -> None:
    model = other_model(family)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    runner = lab.open(load_model(tmp_path, dtype="fp32"), 2000, backend=TransformersForward)
    lab.check(runner, model, [[*lab.text(60), *lab.text(5 + 9 * i, seed=i)] for i in range(3)])


def test_a_model_whose_packed_branches_differ_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of another branch are visible."""

    def careless(query: Tensor, keys: Tensor, values: Tensor, scale: float, *_: Any) -> Tensor:
        return attend(query, keys.flip(1), values, scale)

    model = other_model("phi")
    before = model(torch.tensor([[5, 6, 7]])).logits
    monkeypatch.setattr(module, "attend", careless)
    with pytest.raises(ModelError, match=r"can't be run here \(it computes packed branches wrongly\): run it in a"):
        Runner(LoadedModel.of(model, name="phi"), 100)
    assert torch.equal(model(torch.tensor([[5, 6, 7]])).logits, before)


@pytest.mark.usefixtures("_in_torch")
def test_a_module_is_held_by_one_engine_and_works_again_once_it_is_closed(make_model: Callable[..., Any]) -> None:
    model, tokens = make_model("llama"), torch.tensor([[5, 6, 7]])
    before = model(tokens).logits
    runner = Runner(LoadedModel.of(model), 100)
    with pytest.raises(RuntimeError, match=r"held by an Engine: call engine.close\(\)"):
        model(tokens)
    with pytest.raises(ModelError, match="held by another Engine"):
        Runner(LoadedModel.of(model), 100)
    runner.close()
    assert torch.equal(model(tokens).logits, before)
