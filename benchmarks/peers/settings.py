"""Settings of llama.cpp and vLLM, and the choice of the fastest by short trials."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.engines import SideError


class Setting(NamedTuple):
    """A setting of a peer. llama.cpp has all but `bound`; vLLM has `bound` and `lookup`."""

    file: str = "own"
    """Precision of the weights; "own" is the model's own file."""
    flash: bool = True
    """Flash attention."""
    bound: bool = False
    """Whether each thread is bound to a processor."""
    lookup: int = 0
    """Tokens that are drafted by prompt lookup (n-grams) at each step; 0 for no drafts."""

    @property
    def label(self) -> str:
        """The setting as text, such as "Q4_0, no flash attention"; empty for the default."""
        parts = [self.file] if self.file != "own" else []
        parts += ["no flash attention"] if not self.flash else []
        parts += ["bound threads"] if self.bound else []
        return ", ".join([*parts, f"{self.lookup} lookup drafts"] if self.lookup else parts)


Stage = Sequence[Mapping[str, Any]]
"""Changes of a setting, one of which may be faster."""
EXACT: Stage = [{"file": file} for file in ("Q8_0", "F16", "BF16")]
"""Precisions that keep the weights of a 4-bit file."""
FILES: Stage = [*EXACT, {"file": "Q4_0"}, {"file": "IQ4_NL"}]
FLASH: Stage = [{"flash": False}]
BOUND: Stage = [{"bound": True}]
LOOKUP: Stage = [{"lookup": 2}, {"lookup": 5}]


def fastest(
    stages: Sequence[Stage], measure: Callable[[Setting], Mapping[Any, float]], say: Callable[[str], None]
) -> list[Setting]:
    """Return the fastest settings: one for each column at most.

    Every stage changes the fastest settings so far.

    Args:
        measure: Returns the seconds of a setting at each column. A setting for which it raises SideError is left out.

    Raises:
        SideError: The default setting does not work.
    """
    tried: dict[Setting, Mapping[Any, float]] = {}

    def run(setting: Setting) -> None:
        tried[setting] = measure(setting)
        seconds = (f"{column}: {value:.2f} s".removeprefix(": ") for column, value in tried[setting].items())
        say(f"{setting.label or 'default setting'}: {', '.join(seconds)}")

    best = [Setting()]
    run(best[0])
    for stage in stages:
        for setting in [one._replace(**change) for one in best for change in stage]:
            if setting in tried:
                continue
            try:
                run(setting)
            except SideError as error:
                say(f"{setting.label}: left out, {error}")
        winners = [min(tried, key=lambda one: tried[one][column]) for column in tried[Setting()]]
        best = list(dict.fromkeys(winners))
    return best
