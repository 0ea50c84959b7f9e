"""Where transformers stores a model's weights, if a stored tensor holds several of them or a part of one."""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from tot.decoders.models.families import Mixture, family_of
from tot.decoders.models.shapes import EXPERTS, Shape, weight_shapes


class Part(NamedTuple):
    """A weight as a part of one stored tensor, or as several tensors one after another."""

    names: tuple[str, ...]
    shape: Shape
    """The shape of each stored tensor."""
    view: Callable[[Any], Any] = lambda stored: stored
    """Return a view of a stored array of numpy or torch; its numbers, in order, are the weight's."""


def stored_parts(config: Any, names: Container[str]) -> dict[str, Part]:
    """Return where each weight is stored, by name. `names` are the stored tensors: some families have two layouts."""
    mixture, shapes = Mixture.of(config), weight_shapes(config)
    parts = {name: Part((name,), shape) for name, shape in shapes.items()}
    parts |= {
        name: Part((stored,), shape, itemgetter(rows)) for name, (stored, rows, shape) in fused_rows(config).items()
    }
    if mixture is not None:
        for number in range(config.num_hidden_layers):
            parts |= _expert_parts(f"model.layers.{number}.{EXPERTS}.", config, mixture, names)
    return parts


def fused_rows(config: Any) -> dict[str, tuple[str, slice, Shape]]:
    """Return the weights that are rows of a larger one: its name, the rows, and its shape, by name."""
    family, shapes = family_of(config), weight_shapes(config)
    fused: dict[str, tuple[str, slice, Shape]] = {}
    for number in range(config.num_hidden_layers):
        for stored, stems in family.fused.items():
            names, first = [f"model.layers.{number}.{stem}.weight" for stem in stems], 0
            whole = (sum(shapes[name][0] for name in names), shapes[names[0]][1])
            for name in names:
                rows = slice(first, first := first + shapes[name][0])
                fused[name] = (f"model.layers.{number}.{stored}.weight", rows, whole)
    return fused


def _of_experts(stored: Any, part: slice = slice(None), transposed: bool = False) -> Any:
    """Return a view of the gates, or of the ups, of all experts, which follow each other or are stored in turn."""
    if transposed:  # (experts, inputs, outputs)
        stored = stored.swapaxes(1, 2)
    return stored[:, part]


def _expert_parts(place: str, config: Any, mixture: Mixture, names: Container[str]) -> dict[str, Part]:
    """Return where the experts of one layer are stored: one tensor for each kind of layer, or for each expert."""
    experts = family_of(config).experts
    assert experts is not None
    count, inner, hidden = mixture.experts, mixture.inner, config.hidden_size
    if f"{place}0.gate_proj.weight" in names:
        shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        return {
            f"{place}{name}_proj.weight": Part(
                tuple(f"{place}{expert}.{name}_proj.weight" for expert in range(count)), shape
            )
            for name, shape in shapes.items()
        }
    turned = experts.transposed
    both = (hidden, 2 * inner) if turned else (2 * inner, hidden)
    gates, ups = (slice(0, None, 2), slice(1, None, 2)) if turned else (slice(inner), slice(inner, None))
    gate_up, down = (f"{place}gate_up_proj",), (f"{place}down_proj",)
    parts = {
        f"{place}gate_proj.weight": Part(gate_up, (count, *both), partial(_of_experts, part=gates, transposed=turned)),
        f"{place}up_proj.weight": Part(gate_up, (count, *both), partial(_of_experts, part=ups, transposed=turned)),
        f"{place}down_proj.weight": Part(
            down, (count, inner, hidden) if turned else (count, hidden, inner), partial(_of_experts, transposed=turned)
        ),
    }
    if experts.biased:
        stored = (f"{place}gate_up_proj_bias",), (count, 2 * inner)
        parts[f"{place}gate_proj.bias"] = Part(*stored, partial(_of_experts, part=gates))
        parts[f"{place}up_proj.bias"] = Part(*stored, partial(_of_experts, part=ups))
        parts[f"{place}down_proj.bias"] = Part((f"{place}down_proj_bias",), (count, hidden), _of_experts)
    return parts
