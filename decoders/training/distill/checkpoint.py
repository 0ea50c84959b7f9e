"""Checkpoints of a training run in one safetensors file: weights, optimizer and step. Whole, or not there at all."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tot.decoders.files import replacing


def keep(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, path: Path) -> None:
    """Write the trained weights, the optimizer's moments and the step to `path`, in place of what is there."""
    state = {f"model.{name}": weight.detach() for name, weight in _trained(model).items()}
    for i, moments in optimizer.state_dict()["state"].items():
        state |= {f"optimizer.{i}.{name}": value for name, value in moments.items()}
    with replacing(path) as unfinished:
        save_file({name: value.contiguous() for name, value in state.items()}, unfinished, {"step": str(step)})


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> int:
    """Read them back. Returns the step to go on from, 0 where there is no checkpoint."""
    if not path.exists():
        return 0
    moments: dict[int, dict[str, Tensor]] = {}
    weights = _trained(model)
    with safe_open(path, "pt") as file, torch.no_grad():
        for key in file.keys():  # noqa: SIM118 - it is no mapping
            kind, _, name = key.partition(".")
            if kind == "model":
                weights[name].copy_(file.get_tensor(key))
            else:
                number, _, moment = name.partition(".")
                moments.setdefault(int(number), {})[moment] = file.get_tensor(key)
        step = int(file.metadata()["step"])
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
    return step


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
