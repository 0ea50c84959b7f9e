"""Linear layers with packed weights: the same results, and the original model after closing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from tot.decoders.kernels.linear import PackedLinears
from tot.decoders.kernels.native import library as native

WEIGHTS = 2 * (48 * 96 + 96 * 40)
"""Bytes of the weights in bfloat16."""
packs = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="needs a processor that oneDNN packs bfloat16 for"
)


def layers(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 96), nn.SiLU(), nn.Linear(96, 40, bias=False)).to(dtype)


@packs
@pytest.mark.parametrize("rows", [1, 2, 9, 64, 200])
def test_packed_layers_give_the_same_results(rows: int) -> None:
    model = layers()
    x = torch.randn(1, rows, 48).bfloat16()
    with torch.inference_mode():
        before = model(x)
        packed = PackedLinears(model)
        assert len(packed) == 2
        after = model(x)
    assert after.shape == before.shape
    assert torch.allclose(after.float(), before.float(), atol=1e-2)
    assert (after == before).float().mean() > 0.9  # some sums are in another order


@packs
def test_closing_restores_the_layers() -> None:
    model = layers()
    first, second = PackedLinears(model), PackedLinears(model)
    assert (len(first), len(second)) == (2, 0)  # packed already
    second.close()
    assert "forward" in vars(model[0])
    first.close()
    assert "forward" not in vars(model[0])
    model[0].weight.data.zero_()
    model[0].bias.data.zero_()
    assert not model(torch.randn(3, 48).bfloat16()).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_layers_of_other_dtypes_are_not_packed(dtype: torch.dtype) -> None:
    assert len(PackedLinears(layers(dtype))) == 0


@packs
def test_packing_needs_three_times_the_weights_memory(monkeypatch: Any) -> None:
    for free, packed in ((3 * WEIGHTS, 2), (3 * WEIGHTS - 1, 0)):
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=free: SimpleNamespace(available=free))
        made = PackedLinears(layers())
        assert len(made) == packed
        made.close()


def test_if_memory_is_short_nothing_is_packed_with_one_warning(
    monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    native.log_once.cache_clear()
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=3 * WEIGHTS - 1))
    assert [len(PackedLinears(layers())) for _ in range(2)] == [0, 0]
    assert caplog.messages == [
        "decoding is slower, as packing the weights of linear layers needs 0.0 GiB, and 0.0 are free: free memory "
        "to decode faster"
    ]
