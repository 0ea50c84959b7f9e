"""The forward pass in C (forward.c): all layers of a model in one call, with packed weights.

Supports the families in FAMILIES, on CPUs with AVX-512, AVX2 or NEON. Needs a config and a mapping of weights, but no
transformers module.
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Sequence
from ctypes import POINTER, byref, c_int, c_int64
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from tot.decoders.errors import ModelError
from tot.decoders.kernels.native import compiling
from tot.decoders.kernels.native.library import Library, address, empty, lanes, lazy_zeros, library, log_once
from tot.decoders.kernels.native.packed_file import PackedWeights, pack_model
from tot.decoders.kernels.native.packing import GROUP, PRODUCTS, PackedKind, beside, product_shape, products_of
from tot.decoders.kernels.native.structures import structure
from tot.decoders.kernels.native.tiles import Run, Tiles, kernels_run, make_tiles
from tot.decoders.machine import free_memory, processor, threads
from tot.decoders.models.families import (
    ACTIVATIONS,
    CLAMPED,
    FAMILIES,
    Mixture,
    Scales,
    activation_of,
    family_of,
    layer_windows,
    setting,
)
from tot.decoders.models.gguf_model import GGUFWeights
from tot.decoders.models.loaded import LoadedModel
from tot.decoders.models.rotary import RotaryTable, layer_ropes
from tot.decoders.models.shapes import EMBEDDING, SINKS, Array, Heads, weight_shapes
from tot.decoders.models.weights import Weights

_TABLE = 1024
"""Minimum number of positions whose cosines and sines are computed at a time."""
_GATE = 2
"""The first activation function of Epilogue in linear.h."""


class NativeForward:
    """The C backend, with packed weights and a key-value store."""

    def __init__(self, loaded: LoadedModel, weights: PackedWeights, functions: Library) -> None:
        """`functions` are forward.c, compiled for the model's head dimension and the weights' format."""
        self.weights = weights.kind
        """Format of the packed weights. float32 weights that are exact in bfloat16 are packed as bfloat16."""
        self._config, self._dtype = loaded.config, loaded.dtype
        self._store_dtype = loaded.store_dtype or loaded.dtype
        ropes, self._layer_ropes = layer_ropes(loaded.config)
        self._rotary = [RotaryTable(loaded.config, rope) for rope in ropes]
        self._layer_windows = layer_windows(loaded.config)
        windows = dict.fromkeys(self._layer_windows)
        self._windows = sorted(windows, key=lambda window: -1 if window is None else window)
        """The windows of the layers, each once."""
        self._references: list[Any] = []  # C gets addresses only
        self._strips = [packed.strips for packed in weights.products.values()]
        self._layers = (structure("Layer") * loaded.config.num_hidden_layers)()
        self._model = self._make_model(weights)
        self.weight_bytes = sum(strips.nbytes for strips in self._strips) / sum(
            math.prod(product_shape(weights.shapes, parts))
            for parts in products_of(loaded.config, weights.kind).values()
        )
        self._scratch = np.empty(0, np.float32)
        self._tables: list[tuple[Array, Array]] = []
        self._store: Array | None = None
        self._functions: Library | None = functions
        arguments = [POINTER(structure("Model")), POINTER(structure("Batch"))]
        functions.forward.argtypes, functions.forward.restype = arguments, None
        functions.scratch_floats.argtypes, functions.scratch_floats.restype = arguments, c_int64

    def _make_model(self, weights: PackedWeights) -> Any:
        config = self._config
        products = {
            name: self._matrix(weights, name, parts) for name, parts in products_of(config, weights.kind).items()
        }
        for number, layer in enumerate(self._layers):
            self._fill_layer(layer, number, weights, products)
        embedding, table, scales = None, structure("Matrix")(), Scales.of(config)
        if weights.kind == "gguf":
            tied = "table" not in products
            table = structure("Matrix").from_buffer_copy(products["head" if tied else "table"])
            table.unit /= scales.logits if tied else 1.0
        else:
            self._references.append(np.ascontiguousarray(weights.array(EMBEDDING), self._dtype))
            embedding = address(self._references[-1], self._dtype)
        heads, mixture = Heads.of(config), Mixture.of(config)
        inner = config.intermediate_size if mixture is None else mixture.inner
        return structure("Model")(
            ctypes.addressof(self._layers), embedding, self._norm(weights, "model.norm.weight"),
            products["head"], table, len(self._layers), config.hidden_size, inner, heads.query,
            heads.kv, 0, 0, self._rotary[0].dim, _GATE + ACTIVATIONS.index(activation_of(config)),
            *((0, 0, 0) if mixture is None else (mixture.experts, mixture.chosen, mixture.normalized)),
            config.rms_norm_eps, scales.attention, scales.attention_cap, scales.embedding, scales.logit_cap,
        )  # fmt: skip

    def _matrix(self, weights: PackedWeights, name: str, parts: Sequence[str]) -> Any:
        """Return the struct of one product, with its biases. Scales of the config are factors of its results."""
        strips, bits, group, unit, *form, codebook = weights.products[name]
        scales = Scales.of(self._config)
        factor = scales.logits if name == "head" else scales.residual if name.endswith((".out", ".down")) else 1.0
        outputs, inputs = product_shape(weights.shapes, parts)
        bias = None
        if f"{parts[0]}.bias" in weights:
            biases = [weights.array(f"{part}.bias") for part in parts]
            bias = self._float_address(np.array(beside(biases, name.endswith("gate_up")), dtype=np.float32) * factor)
        begin = address(strips, strips.dtype)
        matrix = structure("Matrix")(begin, bias, inputs, outputs, bits, group, unit * factor, *form)
        matrix.codebook[: len(codebook)] = codebook
        return matrix

    def _fill_layer(self, layer: Any, number: int, weights: Weights, products: dict[str, Any]) -> None:
        """Set the fields of one layer."""
        family, place = family_of(self._config), f"model.layers.{number}."
        for name in PRODUCTS:
            setattr(layer, name, products[f"{number}.{name}"])
        for name, stem in family.norms.items():
            setattr(layer, name, self._norm(weights, f"{place}{stem}.weight"))
        if family.sinks:
            layer.sinks = self._float_address(weights.array(place + SINKS))
        if family.experts is not None:
            router = place + family.experts.router
            layer.router.weight = self._float_address(weights.array(f"{router}.weight"))
            if family.experts.biased:
                layer.router.bias = self._float_address(weights.array(f"{router}.bias"))
        layer.window = self._windows.index(self._layer_windows[number])
        layer.rope = self._layer_ropes[number]

    def _norm(self, weights: Weights, name: str) -> int:
        return self._float_address(weights.array(name).astype(np.float32) + family_of(self._config).norm_offset)

    def _float_address(self, vector: Array) -> int:
        self._references.append(np.array(vector, dtype=np.float32))
        return address(self._references[-1], np.float32)

    @property
    def name(self) -> str:
        return f"C, weights kept in {self.weights}"

    @property
    def code(self) -> str:
        """Identifies what computes keys and values from weights: the library, the number formats, the processor."""
        assert self._functions is not None
        seal = self._functions.path.read_bytes()[-compiling.SEAL :]
        return f"{seal.hex()} {self.weights} {self._dtype} {self._store_dtype} {processor()}"

    def reserve(self, slots: int) -> None:
        heads = Heads.of(self._config)
        self._store = lazy_zeros((len(self._layers), 2, heads.kv, slots, heads.dim), self._store_dtype)
        for layer, (keys, values) in zip(self._layers, self._store, strict=True):
            layer.keys, layer.values = address(keys, self._store_dtype), address(values, self._store_dtype)
        self._model.kv_head_stride, self._model.slot_stride = slots * heads.dim, heads.dim

    def read_slots(self, slots: Sequence[int]) -> bytes:
        assert self._store is not None
        return bytes(self._store.view(np.uint8)[:, :, :, slots].tobytes())

    def write_slots(self, slots: Sequence[int], content: memoryview) -> None:
        assert self._store is not None
        view = self._store.view(np.uint8)
        view[:, :, :, slots] = np.frombuffer(content, np.uint8).reshape(*view.shape[:3], len(slots), -1)

    def cut(self, runs: Sequence[Run]) -> tuple[list[int], list[Tiles]]:
        """Return the packing order of the runs, and the tiles of each window."""
        order, tiles = make_tiles(runs, self._windows[0])
        ordered = [runs[run] for run in order]
        return order, [tiles, *(make_tiles(ordered, window)[1] for window in self._windows[1:])]

    def forward(self, rows: Array, keep: Array, pieces: Sequence[Tiles]) -> Array:
        assert self._functions is not None
        tokens, positions, write = rows
        count, kept = len(tokens), len(keep)
        tables = self._rope_tables(int(positions.max()) + 1)
        logits = empty((kept, self._config.vocab_size), np.float32)
        saturated = c_int()
        batch = structure("Batch")(*(address(array, np.int64) for array in (tokens, positions, write, keep)))
        for kind, table in enumerate(tables):
            batch.cosines[kind], batch.sines[kind] = (address(part, np.float32) for part in table)
        for kind, tiles in enumerate(pieces):
            batch.tiles[kind] = tiles.addresses()
        batch.logits, batch.saturated = address(logits, np.float32), ctypes.addressof(saturated)
        batch.rows, batch.kept, batch.threads = count, kept, threads()
        if len(self._scratch) < (needed := self._functions.scratch_floats(byref(self._model), byref(batch))):
            self._scratch = empty((needed,), np.float32)
        batch.scratch = address(self._scratch, np.float32)
        self._functions.forward(byref(self._model), byref(batch))
        if saturated.value:
            raise ModelError(
                f"{saturated.value:,} keys and values are beyond 65,504, the largest of float16, in which they are "
                "stored: use dtype=fp32, and quantize=gguf to keep the integers of a .gguf file"
            )
        return logits

    def _rope_tables(self, needed: int) -> list[tuple[Array, Array]]:
        """Return the cosines and sines (positions, rotary_dim) of at least `needed` positions, by kind."""
        if not self._tables or len(self._tables[0][0]) < needed:
            self._tables = [rotary.rows(max(_TABLE, 2 * needed)) for rotary in self._rotary]
        return self._tables

    def close(self) -> None:
        """Free the packed weights and the store."""
        self._references, self._strips, self._model = [], [], None
        self._scratch, self._store, self._functions = np.empty(0, np.float32), None, None


def native_forward(loaded: LoadedModel) -> NativeForward | None:
    """Return the C backend for a model, or None if it is unavailable here.

    Integers of the files are always packed, and the floats of a GGUF file without integers are packed exactly. The
    weights of a GGUF file are released: the model then has its packed weights.

    Raises ModelError if the shape of a weight differs from the config.
    """
    config, heads = loaded.config, Heads.of(loaded.config)
    supported = _is_supported(config) and _has_plain_layers(loaded)
    if not supported or not kernels_run(heads.dim, heads.query // heads.kv, loaded.dtype, loaded.device):
        return None
    weights = loaded.weights
    kind = weights.kind if isinstance(weights, PackedWeights) else _kind_of(loaded)
    if kind is None:
        return None
    half = loaded.store_dtype == np.float16
    functions = library(*compiling.forward(heads.dim, loaded.dtype == np.float32, kind, lanes(), half))
    if functions is None:
        return None
    if not isinstance(weights, PackedWeights):
        packed = pack_model(loaded, kind)
        if isinstance(weights, GGUFWeights):
            loaded.stored = packed
        weights = packed
    return NativeForward(loaded, weights, functions)


def _kind_of(loaded: LoadedModel) -> PackedKind | None:
    """Return the format in which to pack the weights; None if a size does not allow it, or memory does not suffice."""
    weights = loaded.weights
    for name, shape in weight_shapes(loaded.config).items():
        if weights.shapes.get(name) != shape:
            raise ModelError(f"the shape of {name} is {weights.shapes.get(name)}, but the config requires {shape}")
    linear = [f"{part}.weight" for parts in products_of(loaded.config, "float32").values() for part in parts]
    if weights.quantized:
        return None if any(weights.shapes[name][1] % GROUP for name in linear) else "gguf"
    kind = _exact_kind(weights, linear)
    if isinstance(weights, GGUFWeights):  # memory-mapped
        return kind
    needed = (4 if kind == "float32" else 2) * sum(math.prod(weights.shapes[name]) for name in linear)
    if loaded.module is not None:  # its weights stay in memory beside the packed ones: pack only if memory is plentiful
        needed *= 2
    if needed > (free := free_memory(loaded.device)):
        message = f"needs {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} are free: free memory to decode faster"
        log_once(logging.WARNING, f"decoding is slower, as packing the weights for the forward in C {message}")
        return None
    return kind


def _exact_kind(weights: Weights, names: Sequence[str]) -> PackedKind:
    """Return the smallest packed format that keeps the weights exactly."""
    if isinstance(weights, GGUFWeights) and not weights.integers:
        return "bfloat16"
    narrow = all(
        weight.dtype == bfloat16 or bool((weight == weight.astype(bfloat16)).all())
        for weight in (weights[name] for name in names)
        if isinstance(weight, np.ndarray)
    )
    return "bfloat16" if narrow else "float32"


def _is_supported(config: Any) -> bool:
    """Return whether forward.c supports the sizes and the layers of a model."""
    if config.model_type not in FAMILIES or activation_of(config) not in ACTIVATIONS:
        return False
    limits = setting(config, "swiglu_alpha"), setting(config, "swiglu_limit")
    some = setting(config, "mlp_only_layers") or (setting(config, "decoder_sparse_step") or 1) > 1
    if some or limits not in (CLAMPED, (None, None)):  # experts in some layers only, or with other limits
        return False
    mixture, strip = Mixture.of(config), 2 * lanes()
    if mixture is not None:  # the outputs of an expert are whole strips
        return config.hidden_size % strip == 0 and 2 * mixture.inner % strip == 0
    return bool(config.hidden_size % 16 == 0 and config.intermediate_size % 16 == 0)


def _has_plain_layers(loaded: LoadedModel) -> bool:
    """Return whether the module, if loaded, has only plain, unpatched linear layers, on the CPU."""
    if loaded.module is None and loaded.stored is not None:
        return True
    model: Any = loaded.model
    from torch import nn

    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not all(type(module) is nn.Linear and "forward" not in vars(module) for module in linears):
        return False
    table: Any = model.model.embed_tokens.weight
    on_cpu = all(weight.device.type == "cpu" for weight in model.parameters())
    return on_cpu and str(table.dtype) == f"torch.{loaded.dtype}"
