"""Where transformers stores a model's weights, if a stored tensor holds several of them or a part of one."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, NamedTuple

from tot.decoders.models.families import Experts, Mixture, family_of
from tot.decoders.models.shapes import EXPERTS, Shape, weight_shapes


class Part(NamedTuple):
    """A weight as a part of one stored tensor, or as several tensors one after another."""

    names: tuple[str, ...]
    shape: Shape
    """The shape of each stored tensor."""
    take: Callable[[Any], Any] | None = None
    """Take the weight out of the stored array of numpy or torch; None if the array is the weight."""

    def of(self, arrays: list[Any], join: Callable[[list[Any]], Any]) -> Any:
        """Return the weight from the stored arrays."""
        whole = arrays[0] if len(arrays) == 1 else join(arrays)
        return whole if self.take is None else self.take(whole)


def stored_parts(config: Any, names: Container[str]) -> dict[str, Part]:
    """Return where each weight is stored, by name. `names` are the stored tensors: some families have two layouts."""
    family, mixture, shapes = family_of(config), Mixture.of(config), weight_shapes(config)
    parts = {name: Part((name,), shape) for name, shape in shapes.items()}
    for number in range(config.num_hidden_layers):
        layer = f"model.layers.{number}."
        for stored, stems in family.fused.items():
            total, first = sum(shapes[f"{layer}{stem}.weight"][0] for stem in stems), 0
            for stem in stems:
                outputs, inputs = shapes[name := f"{layer}{stem}.weight"]
                rows = slice(first, first := first + outputs)
                parts[name] = Part((f"{layer}{stored}.weight",), (total, inputs), _Rows(rows))
        if mixture is not None and family.experts is not None:
            parts |= _expert_parts(f"{layer}{EXPERTS}.", family.experts, mixture, config.hidden_size, names)
    return parts


class _Rows(NamedTuple):
    rows: slice

    def __call__(self, stored: Any) -> Any:
        return stored[self.rows]


class _Halves(NamedTuple):
    """Take the gates, or the ups, of all experts, which follow each other or are stored in turn, and flatten them."""

    part: slice
    transposed: bool = False

    def __call__(self, stored: Any) -> Any:
        if self.transposed:  # (experts, inputs, outputs)
            stored = stored.swapaxes(1, 2)
        return stored[:, self.part].reshape((-1, *stored.shape[2:]))


def _expert_parts(
    place: str, experts: Experts, mixture: Mixture, hidden: int, names: Container[str]
) -> dict[str, Part]:
    """Return where the experts of one layer are stored: one tensor for each kind of layer, or for each expert."""
    count, inner = mixture.count, mixture.inner
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
        f"{place}gate_proj.weight": Part(gate_up, (count, *both), _Halves(gates, turned)),
        f"{place}up_proj.weight": Part(gate_up, (count, *both), _Halves(ups, turned)),
        f"{place}down_proj.weight": Part(
            down, (count, inner, hidden) if turned else (count, hidden, inner), _Halves(slice(None), turned)
        ),
    }
    if experts.biased:
        stored = (f"{place}gate_up_proj_bias",), (count, 2 * inner)
        parts[f"{place}gate_proj.bias"] = Part(*stored, _Halves(gates))
        parts[f"{place}up_proj.bias"] = Part(*stored, _Halves(ups))
        parts[f"{place}down_proj.bias"] = Part((f"{place}down_proj_bias",), (count, hidden), _Halves(slice(None)))
    return parts
