"""Copies of small host arrays to a device, without waiting for the work that the device has queued."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of `values` (numbers, nested lists or a numpy array) on a device.

    On a GPU the copy comes from pinned memory: a copy from pageable memory would wait for all queued kernels."""
    tensor = torch.as_tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
