"""Quantized linear layers in safetensors files: compressed-tensors (int4, int8), AWQ and GPTQ.

The layouts are documented by the programs that write them. Other methods, and variants that the engine cannot read,
are refused by name from config.json alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tot.decoders.errors import ModelError
from tot.decoders.models.gguf_numbers import Whole
from tot.decoders.models.shapes import Array, Shape

_GROUP = 32
"""Inputs that share a scale in the C engine."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place of each of 8 outputs in a word of AWQ, from the lowest bits."""
_Tensors = Mapping[str, Array]


@dataclass(frozen=True)
class Layout:
    """How a linear layer of integers is stored: in several tensors."""

    bits: int
    group: int
    """Inputs that share a scale; 0: all inputs."""
    scale: str
    """The name of the tensor of scales. A layer without it has floats."""
    shapes: Callable[[int, int, int], dict[str, Shape]]
    """Returns the shapes of the tensors by name, for outputs, inputs and groups."""
    unpack: Callable[[_Tensors], tuple[Array, Array, Array]]
    """Unpacks numbers (outputs, inputs), scales (outputs, groups) and zero points (outputs, groups)."""

    def tensors(self, shape: Shape) -> dict[str, Shape]:
        """Return the shapes of the tensors of a layer (outputs, inputs). Raises ModelError for unsupported shapes."""
        outputs, inputs = shape
        group = self.group or inputs
        if group % _GROUP or inputs % group or outputs % 8:
            raise _refusal(f"in groups of {group} of {inputs} inputs")
        return self.shapes(outputs, inputs, inputs // group)

    def check_order(self, order: Array) -> None:
        """Raise ModelError if the inputs are not in the order of their groups."""
        if bool((order != np.arange(len(order)) // (self.group or len(order))).any()):
            raise _refusal("by GPTQ with reordered inputs (desc_act)")

    def read(self, tensors: _Tensors) -> Whole:
        """Return the weight of a layer. Raises ModelError if a tensor has another type."""
        numbers, step, zeros = self.unpack(tensors)
        step, middle = step.astype(np.float32), int(zeros.flat[0])
        whole = Whole(np.ascontiguousarray(numbers), step, None, self.bits, middle)
        if not middle or bool((zeros != middle).any()):
            whole = replace(whole, least=-step * zeros, middle=0.0)
        scales, minimums = whole.scales(_GROUP)
        return replace(whole, step=scales, least=None if whole.least is None else minimums)


def stacked(weights: Sequence[Whole]) -> Whole:
    """Return weights of one layout one below the other."""
    parts = zip(*((whole.numbers, *whole.scales(_GROUP)) for whole in weights), strict=True)
    numbers, step, least = map(np.concatenate, parts)
    same = all(whole.least is None and whole.middle == weights[0].middle for whole in weights)
    return replace(weights[0], numbers=numbers, step=step, least=None if same else least)


def _unpacked(words: Array, bits: int) -> Array:
    """Unpack the integers of 32-bit words along the last dimension, from the lowest bits."""
    parts = _typed(words, np.int32).view(np.uint8)
    if bits == 8:
        return parts
    return np.stack([parts & 15, parts >> 4], axis=-1).reshape(*parts.shape[:-1], -1)


def _typed(values: Array, dtype: type[np.integer[Any]]) -> Array:
    if values.dtype != dtype:
        raise ModelError(f"integers of the model have the type {values.dtype}, not {dtype.__name__}: download it again")
    return np.ascontiguousarray(values)


def layout_of(settings: Any) -> Layout | None:
    """Return the layout by `quantization_config` in config.json, or None without one.

    Raises ModelError for layouts that cannot be read."""
    if not isinstance(settings, dict):
        return None
    method = settings.get("quant_method")
    if method not in _METHODS:
        raise _refusal(f"by the method {method!r}")
    return _METHODS[method](settings)


def _awq(settings: dict[str, Any]) -> Layout:
    bits, version = settings.get("bits"), str(settings.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise _refusal(f"by AWQ in {bits} bits in the layout {version!r}")

    def outputs_in_order(words: Array) -> Array:
        return _unpacked(words, 4).reshape(len(words), -1, 8)[:, :, _AWQ_ORDER].reshape(len(words), -1).T

    return Layout(
        4,
        _group(settings.get("group_size")),
        "scales",
        lambda outputs, inputs, groups: {
            "qweight": (inputs, outputs // 8),
            "qzeros": (groups, outputs // 8),
            "scales": (groups, outputs),
        },
        lambda of: (outputs_in_order(of["qweight"]), of["scales"].T, outputs_in_order(of["qzeros"])),
    )


def _gptq(settings: dict[str, Any]) -> Layout:
    bits, version = settings.get("bits"), settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if bits not in (4, 8) or version not in ("gptq", "gptq_v2") or settings.get("dynamic"):
        raise _refusal(f"by GPTQ in {bits} bits in the layout {version!r}{' by layer' * bool(settings.get('dynamic'))}")
    less = np.uint8(version == "gptq")  # the first version stores zero points minus one
    word = 32 // bits
    return Layout(
        bits,
        _group(settings.get("group_size")),
        "scales",
        lambda outputs, inputs, groups: {
            "qweight": (inputs // word, outputs),
            "qzeros": (groups, outputs // word),
            "scales": (groups, outputs),
            "g_idx": (inputs,),
        },
        lambda of: (
            _unpacked(of["qweight"].T, bits),
            of["scales"].T,
            (_unpacked(of["qzeros"], bits) + less & np.uint8(2**bits - 1)).T,
        ),
    )


def _compressed_tensors(settings: dict[str, Any]) -> Layout:
    groups = settings.get("config_groups")
    schemes = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    if not schemes or any(scheme != schemes[0] or not isinstance(scheme, dict) for scheme in schemes):
        raise _refusal("by compressed-tensors with several schemes")
    kind, bits, strategy, order = (schemes[0].get(key) for key in ("type", "num_bits", "strategy", "actorder"))
    form, sparsity = settings.get("format"), settings.get("sparsity_config") or {}
    known = (form, bits) in (("pack-quantized", 4), ("pack-quantized", 8), ("int-quantized", 8))
    if not known or kind != "int" or strategy not in ("group", "channel"):
        raise _refusal(f"by compressed-tensors as {kind}{bits} by {strategy} in the format {form!r}")
    sparse = sparsity.get("format", "dense") != "dense"
    if order not in (None, "weight", "static") or settings.get("transform_config") or sparse:
        raise _refusal("by compressed-tensors with reordered inputs, transforms or sparsity")
    symmetric, packed, word = schemes[0].get("symmetric", True), form == "pack-quantized", 32 // bits

    def shapes(outputs: int, inputs: int, groups: int) -> dict[str, Shape]:
        numbers = {"weight_packed": (outputs, inputs // word)} if packed else {"weight": (outputs, inputs)}
        zeros = {"weight_zero_point": (outputs // word if packed else outputs, groups)}
        return {**numbers, "weight_scale": (outputs, groups), **({} if symmetric else zeros)}

    def unpack(of: _Tensors) -> tuple[Array, Array, Array]:
        """Signed integers are stored packed with their smallest value as zero, or as bytes."""
        scales, zeros = of["weight_scale"], np.full(of["weight_scale"].shape, 2 ** (bits - 1), np.uint8)
        if packed:
            if not symmetric:
                zeros = _unpacked(of["weight_zero_point"].T, bits).T
            return _unpacked(of["weight_packed"], bits), scales, zeros
        sign = np.uint8(128)
        if not symmetric:
            zeros = _typed(of["weight_zero_point"], np.int8).view(np.uint8) ^ sign
        return _typed(of["weight"], np.int8).view(np.uint8) ^ sign, scales, zeros

    size = schemes[0].get("group_size") if strategy == "group" else -1
    return Layout(bits, _group(size), "weight_scale", shapes, unpack)


_METHODS: dict[Any, Callable[[dict[str, Any]], Layout]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
}


def _group(size: Any) -> int:
    if size == -1:
        return 0
    if not isinstance(size, int) or size <= 0 or size % _GROUP:
        raise _refusal(f"in groups of {size!r} inputs")
    return size


def _refusal(how: str) -> ModelError:
    return ModelError(
        f"weights quantized {how} can't be read here: use a .gguf file of the model, or run it in a server, such as "
        "vLLM, and ask it with --decoder openai"
    )
