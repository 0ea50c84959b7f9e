"""Plots of losses. Needs matplotlib: the extra `plots`."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tot.decoders.errors import OptionError
from tot.decoders.files import replacing, writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def losses(curve: Path) -> Figure:
    """Plot the losses of a training run, from a file of JSON lines with `step` and losses in nats."""
    lines = [json.loads(line) for line in curve.read_text().splitlines()]
    figure: Figure = new_figure(7.0, 4.0)
    axes = figure.subplots()
    for name in sorted({name for line in lines for name in line} - {"step"}):
        steps, values = [line["step"] for line in lines], [line[name] for line in lines]
        axes.plot(steps, values, marker="o", markersize=3, linewidth=1, label=name)
    axes.set(xlabel="step", ylabel="nats", yscale="log")
    axes.legend(fontsize="small")
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the file extension. Raises TaskError if the file can't be written."""
    with writing(path), replacing(path) as file:
        figure.savefig(file, dpi=120, format=path.suffix[1:].lower())


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure that Jupyter displays; sizes in inches. Raises OptionError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError("plots need matplotlib: pip install matplotlib") from error

    class Picture(Figure):
        """A figure that Jupyter displays without pyplot."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
                self.savefig(file, format="png")
            return file.getvalue()

    return Picture(figsize=(width, height), layout="constrained")
