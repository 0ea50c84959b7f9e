"""Plots of timelines (SEED, figures 3b and 7a) and losses. Needs matplotlib: the extra `plots`."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tot.decoders.errors import OptionError
from tot.decoders.files import replacing, writing
from tot.decoders.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {"draft": "#e69f00", "verify": "#0072b2", "sampling": "#56b4e9"}


def gantt(timeline: Timeline, title: str) -> Figure:
    """Plot drafting and verification over time: the target's lane, a lane per branch, and the queue length below."""
    figure: Figure = new_figure(9.0, 4.5)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    first = min((span.began for span in timeline.spans), default=0.0)
    branches = sorted({span.lane for span in timeline.spans} - {"target"}, key=lambda lane: int(lane.split()[-1]))
    lanes = ["target", *branches]
    names = ["target", *(f"thought {i}" for i in range(1, len(branches) + 1))]
    for kind, colour in _COLOURS.items():
        for row, lane in enumerate(lanes):
            bars = [
                (1000 * (span.began - first), 1000 * (span.ended - span.began))
                for span in timeline.spans
                if span.lane == lane and span.kind == kind
            ]
            label = kind if row == (1 if kind == "draft" else 0) else None
            upper.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, label=label)
    upper.set_yticks(range(len(lanes)), names)
    upper.invert_yaxis()
    upper.set_title(title)
    upper.legend(loc="upper right", fontsize="small")
    seconds, lengths = zip(*timeline.queue, strict=True) if timeline.queue else ((first,), (0,))
    lower.step([1000 * (second - first) for second in seconds], lengths, where="post", color="black")
    lower.set_ylabel("queue")
    lower.set_xlabel("milliseconds")
    return figure


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
