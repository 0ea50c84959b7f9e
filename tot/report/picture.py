"""Draw a tree of thoughts: boxes from left to right, coloured by value, the chosen path bold. Needs matplotlib.

Thoughts are plain text, without mathtext or control characters. Large trees are drawn as dots.
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

_LETTERS, _LETTER, _LINE = 38, 0.056, 0.14
"""Characters per line of a box, character width and line height; all lengths are inches."""
_ACROSS, _BETWEEN = 0.6, 0.12
_DOT_ACROSS, _DOT_ROW = 0.9, 0.11
_BOXES = 120
"""Maximum number of leaves, and a tenth of the thoughts, of a tree that is drawn with boxes instead of dots."""
_LARGEST = 300.0
_CHOSEN, _EDGE, _NONE = "#5168dc", "#a19d94", "#d4d1ca"


def draw(tree: ThoughtTree) -> Figure:
    """Draw the tree as a figure. Raises OptionError if matplotlib is not installed."""
    rows = _rows(tree)
    leaves = 1 + round(max(rows.values()))
    dots = leaves > _BOXES or len(tree) > 10 * _BOXES
    labels = {} if dots else {node.id: _label(tree, node) for node in tree}
    wide, high = _size(labels)
    across, row = (_DOT_ACROSS, _DOT_ROW) if dots else (wide + _ACROSS, high + _BETWEEN)
    deepest = max(node.depth for node in tree)
    width, height = deepest * across + wide + 0.3, leaves * row + 0.3
    figure: Figure = new_figure(min(width, _LARGEST), min(height, _LARGEST))
    figure.set_layout_engine("none")
    figure.patch.set_alpha(0)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-0.15, width - 0.15), ylim=(height - 0.15 - row / 2, -0.15 - row / 2))
    axes.axis("off")
    places = {node.id: (node.depth * across, rows[node.id] * row) for node in tree}
    _edges(axes, tree, places, wide)
    if dots:
        _dots(axes, tree, places)
    else:
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


def _edges(axes: Any, tree: ThoughtTree, places: dict[int, tuple[float, float]], width: float) -> None:
    from matplotlib.collections import PathCollection
    from matplotlib.path import Path as Curve

    def curve(tail: Node, head: Node) -> Any:
        (x, y), (to_x, to_y) = places[tail.id], places[head.id]
        middle = (x + width + to_x) / 2
        points = [(x + width, y), (middle, y), (middle, to_y), (to_x, to_y)]
        return Curve(points, [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4])

    edges = [(tree[node.parent], node) for node in tree if node.parent is not None]
    kinds = {
        (_EDGE, 1.0, "-"): [curve(*ends) for ends in edges if not ends[1].chosen],
        (_EDGE, 1.0, "--"): [curve(tail, head) for tail, head, _ in tree.links()],
        (_CHOSEN, 2.2, "-"): [curve(*ends) for ends in edges if ends[1].chosen],
    }
    for (colour, linewidth, style), curves in kinds.items():
        axes.add_collection(
            PathCollection(curves, facecolors="none", edgecolors=colour, linewidths=linewidth, linestyles=style)
        )


def _label(tree: ThoughtTree, node: Node) -> str:
    text = tree.state(node).question if node.thought is None else node.thought.text
    lines = textwrap.wrap(plain(" ".join(text[:400].split())), _LETTERS, max_lines=2, placeholder=" …")
    if node.thought is not None and (observation := node.thought.observation) is not None:
        result = plain(" ".join(f"⇒ {observation.text[:400]}".split()))
        lines += textwrap.wrap(result, _LETTERS, max_lines=1, placeholder=" …")
    return "\n".join(lines)


def _size(labels: dict[int, str]) -> tuple[float, float]:
    """Return the width and height of a box for the largest label, with space for a value beside its last line."""
    lines = [label.split("\n") for label in labels.values()]
    characters = max((len(line) for label in lines for line in label), default=0)
    return (characters + 9) * _LETTER if lines else 0.0, (max(map(len, lines), default=1) + 1) * _LINE


def _boxes(axes: Any, tree: ThoughtTree, places: dict[int, tuple[float, float]], labels: dict[int, str]) -> None:
    from matplotlib.patches import FancyBboxPatch

    colours = _colours(tree)
    wide, high = _size(labels)
    for node in tree:
        x, y = places[node.id]
        box = FancyBboxPatch(
            (x, y - high / 2),
            wide,
            high,
            boxstyle="round,pad=0,rounding_size=0.06",
            facecolor="white",
            edgecolor=_CHOSEN if node.chosen else _EDGE,
            linewidth=2.2 if node.chosen else 0.8,
            alpha=0.55 if node.pruned else 1.0,
        )
        axes.add_patch(box)
        half = high / 2 - 0.06
        axes.plot([x + 0.06] * 2, [y - half, y + half], color=colours[node.id], linewidth=3.5, solid_capstyle="round")
        style = {"parse_math": False, "verticalalignment": "center", "color": "#5f646d" if node.pruned else "#22252b"}
        weight = "bold" if node.thought is None else "normal"
        axes.text(x + 0.14, y, labels[node.id], fontsize=7, fontweight=weight, **style)
        if node.value is not None:
            below = y + high / 2 - _LINE
            axes.text(x + wide - 0.06, below, f"{node.value:.2g}", fontsize=6, ha="right", **style)


def _dots(axes: Any, tree: ThoughtTree, places: dict[int, tuple[float, float]]) -> None:
    colours = _colours(tree)
    nodes = list(tree)
    xs, ys = zip(*(places[node.id] for node in nodes), strict=True)
    axes.scatter(
        xs,
        ys,
        s=[34 if node.chosen else 16 for node in nodes],
        c=[colours[node.id] for node in nodes],
        edgecolors=[_CHOSEN if node.chosen else "none" for node in nodes],
        zorder=3,
    )


def _colours(tree: ThoughtTree) -> dict[int, Any]:
    """Return each node's colour by its value relative to all values; grey without a value."""
    from matplotlib.colors import LinearSegmentedColormap

    scale = LinearSegmentedColormap.from_list("value", ["#e2a15a", "#86a75c", "#1f7a8c"])
    values = [node.value for node in tree if node.value is not None and math.isfinite(node.value)]
    low, high = min(values, default=0.0), max(values, default=0.0)

    def colour(value: float | None) -> Any:
        if value is None or not math.isfinite(value):
            return _NONE
        return scale((value - low) / (high - low) if high > low else 1.0)

    return {node.id: colour(node.value) for node in tree}
