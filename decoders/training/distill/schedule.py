"""The learning rate of a training run, a function of the step alone, so that nothing of it needs to be kept."""

from __future__ import annotations

import math
from typing import Any


def set_learning_rate(optimizer: Any, peak: float, step: int, steps: int) -> None:
    """It rises to `peak` for a twentieth of the steps, then falls by a cosine to a tenth of it."""
    risen, fallen = (step + 1) / max(1, steps // 20), 0.55 + 0.45 * math.cos(math.pi * step / steps)
    for group in optimizer.param_groups:
        group["lr"] = peak * min(1.0, risen) * fallen
