"""Resume interrupted work with the same result: settings of a folder, checkpoints and learning rate schedule."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tot.decoders.errors import OptionError
from tot.decoders.files import replacing, write_json


def check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings of a folder to `path` in it. Raises OptionError if the folder was started with others."""
    saved = json.loads(path.read_text()) if path.exists() else settings
    for name, value in settings.items():
        if saved.get(name) != value:
            raise OptionError(
                f"{path.parent} was started with {name}={saved.get(name)!r}, not {value!r}: resume with the same "
                "options, or give another folder"
            )
    write_json(path, settings)


def set_learning_rate(optimizer: Any, peak: float, step: int, steps: int) -> None:
    """Set the learning rate: a linear warmup to `peak` over 5% of the steps, then a cosine decay to a tenth of it.

    It depends only on the step, so a checkpoint does not need to contain it.
    """
    warmup, decay = (step + 1) / max(1, steps // 20), 0.55 + 0.45 * math.cos(math.pi * step / steps)
    for group in optimizer.param_groups:
        group["lr"] = peak * min(1.0, warmup) * decay


def save_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, path: Path) -> None:
    """Write the trained weights, the optimizer's moments and the step to `path`, replacing an existing file."""
    state = {f"model.{name}": weight.detach() for name, weight in _trained(model).items()}
    for i, moments in optimizer.state_dict()["state"].items():
        state |= {f"optimizer.{i}.{name}": value for name, value in moments.items()}
    with replacing(path) as file:
        save_file({name: value.contiguous() for name, value in state.items()}, file.name, {"step": str(step)})


def load_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> int:
    """Load a checkpoint. Returns the step to resume from, or 0 if there is no checkpoint."""
    if not path.exists():
        return 0
    moments: dict[int, dict[str, Tensor]] = {}
    weights = _trained(model)
    with safe_open(path, "pt") as file, torch.no_grad():
        for key in file.keys():  # noqa: SIM118 - not a mapping
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
