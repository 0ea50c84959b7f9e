"""What a container allows this process: the control groups that it is in (Linux, cgroup v2), and their processors."""

from __future__ import annotations

import logging
import math
import sys
from pathlib import Path, PurePosixPath

import torch

log = logging.getLogger(__name__)
_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")


def control_groups() -> list[Path]:
    """The folders of the group of this process and of those that it is in; none where there are no groups."""
    try:
        own = next(line[3:] for line in _OWN_GROUP.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return []
    inner = PurePosixPath(own.lstrip("/"))
    return [_GROUPS / group for group in (inner, *inner.parents)]


def fit_threads() -> None:
    """Compute with no more threads than a container has time for: they wait for each other many times in a forward, and
    where two share half a processor that is what they spend it on."""
    allowed = math.ceil(min((_processors(group) for group in control_groups()), default=sys.maxsize))
    if allowed < torch.get_num_threads():
        log.info("%d threads compute, as this container has no time for more", allowed)
        torch.set_num_threads(allowed)


def _processors(group: Path) -> float:
    """As many as would use up what a group may in a period."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return max(0.01, int(quota) / int(period))  # "max" where there is no quota
    except (OSError, ValueError, ZeroDivisionError):
        return sys.maxsize
