"""Draw a tree of thoughts: boxes from left to right, coloured by value, the chosen path bold. Needs matplotlib.

Thoughts are plain text, without mathtext or control characters. Of large trees, the page of `tot report` shows more.
"""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tot.decoders.files import replacing, writing
from tot.report.plots import new_figure
from tot.report.terminal import plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tot.tree.tree import Node, ThoughtTree

_LETTERS, _LETTER, _LINE = 38, 0.062, 0.14
"""Characters per line of a box, character width and line height; all lengths are inches."""
_ACROSS, _BETWEEN, _MARGIN = 0.6, 0.2, 0.15
_LARGEST = 300.0
_CHOSEN, _EDGE, _NONE = "#5168dc", "#a19d94", "#d4d1ca"


def draw(tree: ThoughtTree) -> Figure:
    """Draw the tree as a figure. Raises OptionError if matplotlib is not installed."""
    rows = _rows(tree)
    leaves = 1 + round(max(rows.values()))
    labels = {node.id: _label(tree, node) for node in tree}
    wide = max((len(line) for lines in labels.values() for line in lines), default=0) * _LETTER
    across, row = wide + _ACROSS, max(map(len, labels.values())) * _LINE + _BETWEEN
    width = max(node.depth for node in tree) * across + wide + 2 * _MARGIN
    height = leaves * row + 2 * _MARGIN
    figure: Figure = new_figure(min(width, _LARGEST), min(height, _LARGEST))
    figure.set_layout_engine("none")
    figure.patch.set_alpha(0)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-_MARGIN, width - _MARGIN), ylim=(height - _MARGIN - row / 2, -_MARGIN - row / 2))
    axes.axis("off")
    places = {node.id: (node.depth * across, rows[node.id] * row) for node in tree}
    _edges(axes, tree, places, wide)
    _boxes(axes, tree, places, labels)
    return figure


def svg(tree: ThoughtTree) -> str:
    """Return the picture as SVG with selectable text. Raises OptionError if matplotlib is not installed."""
    file = io.StringIO()
    _render(tree, file, "svg")
    return file.getvalue()


def save(tree: ThoughtTree, path: Path) -> None:
    """Write the picture to a .png or .svg file.

    Raises TaskError if it can't be written, and OptionError if matplotlib is not installed.
    """
    with writing(path), replacing(path) as file:
        _render(tree, file, path.suffix[1:].lower())


def _render(tree: ThoughtTree, file: Any, kind: str) -> None:
    figure = draw(tree)
    from matplotlib import rc_context

    dpi = 130 if max(figure.get_size_inches()) < 100 else 60
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "tot"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        figure.savefig(file, format=kind, dpi=dpi, metadata={"Date": None} if kind == "svg" else None)


def _rows(tree: ThoughtTree) -> dict[int, float]:
    """Return each node's row: leaves in consecutive rows, parents midway between their first and last child."""
    order = list(tree.below(tree.root))
    below: defaultdict[int | None, list[int]] = defaultdict(list)
    for node in order:
        below[node.parent].append(node.id)
    rows: dict[int, float] = {}
    for node in order:
        if node.id not in below:
            rows[node.id] = len(rows)
    for node in reversed(order):
        if node.id in below:
            rows[node.id] = (rows[below[node.id][0]] + rows[below[node.id][-1]]) / 2
    return rows


def _label(tree: ThoughtTree, node: Node) -> list[str]:
    """Return the lines of a box: the thought, its observation and its value."""

    def lines(text: str, most: int) -> list[str]:
        return textwrap.wrap(plain(" ".join(text[:400].split())), _LETTERS, max_lines=most, placeholder=" …")

    label = lines(tree.state(node).question if node.thought is None else node.thought.text, 2)
    if node.thought is not None and node.thought.observation is not None:
        label += lines(f"⇒ {node.thought.observation.text}", 1)
    return label if node.value is None else [*label, f"{node.value:.2g}"]


def _edges(axes: Any, tree: ThoughtTree, places: dict[int, tuple[float, float]], wide: float) -> None:
    from matplotlib.collections import LineCollection

    def line(tail: Node, head: Node) -> list[tuple[float, float]]:
        (x, y), end = places[tail.id], places[head.id]
        return [(x, y), (x + wide, y), end]  # the box covers the first part

    edges = [(tree[node.parent], node) for node in tree if node.parent is not None]
    kinds = {
        (_EDGE, 1.0, "-"): [line(*ends) for ends in edges if not ends[1].chosen],
        (_EDGE, 1.0, "--"): [line(tail, head) for tail, head, _ in tree.links()],
        (_CHOSEN, 2.2, "-"): [line(*ends) for ends in edges if ends[1].chosen],
    }
    for (colour, linewidth, style), lines in kinds.items():
        axes.add_collection(LineCollection(lines, colors=colour, linewidths=linewidth, linestyles=style))


def _boxes(axes: Any, tree: ThoughtTree, places: dict[int, tuple[float, float]], labels: dict[int, list[str]]) -> None:
    colours = _colours(tree)
    for node in tree:
        box = {"boxstyle": "round", "facecolor": "white", "edgecolor": colours[node.id], "linewidth": 1.2}
        if node.chosen:
            box |= {"edgecolor": _CHOSEN, "linewidth": 2.2}
        style = {"fontweight": "bold" if node.thought is None else "normal", "color": "#22252b"}
        if node.pruned:
            style["color"] = "#8d929a"
        text = "\n".join(labels[node.id])
        axes.text(*places[node.id], text, fontsize=7, va="center", parse_math=False, bbox=box, **style)


def _colours(tree: ThoughtTree) -> dict[int, Any]:
    """Return each node's colour by its value relative to all values; grey without a value."""
    from matplotlib.colors import LinearSegmentedColormap

    scale = LinearSegmentedColormap.from_list("value", ["#e2a15a", "#86a75c", "#1f7a8c"])
    values = {node.id: node.value for node in tree if node.value is not None and math.isfinite(node.value)}
    low, high = min(values.values(), default=0.0), max(values.values(), default=0.0)
    scaled = {number: (value - low) / (high - low) if high > low else 1.0 for number, value in values.items()}
    return {node.id: scale(scaled[node.id]) if node.id in scaled else _NONE for node in tree}
