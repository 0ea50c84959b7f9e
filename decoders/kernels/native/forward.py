"""The forward pass in C (forward.c): all layers of a model in one call, with packed weights.

Supports the families in FAMILIES, on CPUs with AVX-512, AVX2 or NEON. Needs a config and a mapping of weights, but no
transformers module.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from ctypes import POINTER, byref, c_int, c_int64, c_uint8, c_void_p
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from ml_dtypes import bfloat16

from tot.decoders.errors import ModelError
from tot.decoders.kernels.native import compiling
from tot.decoders.kernels.native.library import address, empty, lanes, lazy_zeros, library, log_once, sizes_agree
from tot.decoders.kernels.native.packed_file import packed_in_file
from tot.decoders.kernels.native.packing import (
    GROUP,
    Packed,
    PackedKind,
    beside,
    joined,
    packed,
    room_for,
)
from tot.decoders.kernels.native.shared_prefixes import Run
from tot.decoders.kernels.native.structures import KINDS, SIZES, Batch, Layer, Matrix, Model
from tot.decoders.kernels.native.tiles import CTiles, Tiles, kernels_run, make_tiles
from tot.decoders.machine import processor, threads
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
from tot.decoders.models.gguf_numbers import Whole
from tot.decoders.models.kv_store import Store
from tot.decoders.models.loaded import LoadedModel
from tot.decoders.models.rotary import RotaryTable, layer_ropes
from tot.decoders.models.shapes import EMBEDDING, EXPERTS, SINKS, Array, Heads, weight_shapes
from tot.decoders.models.weights import GGUFWeights, Weights

Quantization = Literal["int8-dynamic", "gguf"]
_TABLE = 1024
"""Minimum number of positions whose cosines and sines are computed at a time."""
_BYTES: dict[PackedKind, float] = {
    "float32": 4,
    "bfloat16": 2,
    "int8-dynamic": 1 + 4 / GROUP,
    "gguf": 0,
}
"""Maximum bytes of a packed weight. The weights of a GGUF file are memory-mapped, so they need none."""
_FREE_MEMORY_FACTOR = 2
"""Pack a module's weights only if this multiple of their packed size is free."""


class _Product(NamedTuple):
    """Linear layers of one product: the C struct, and the arrays that it points to."""

    matrix: Matrix
    arrays: list[Array]


class NativeForward:
    """The C backend, with packed weights and a key-value store."""

    def __init__(self, loaded: LoadedModel, kind: PackedKind) -> None:
        self.weights = kind
        """Format of the packed weights. float32 weights that are exact in bfloat16 are packed as bfloat16."""
        self._config, self._dtype = loaded.config, loaded.dtype
        self._store_dtype = loaded.store_dtype or loaded.dtype
        self._packed: dict[str, _Product] = {}
        """By product: the number of the layer and its name in C, such as "0.qkv"."""
        ropes, self._layer_ropes = layer_ropes(loaded.config)
        self._rotary = [RotaryTable(loaded.config, rope) for rope in ropes]
        self._layer_windows = layer_windows(loaded.config)
        windows = dict.fromkeys(self._layer_windows)
        self._windows = sorted(windows, key=lambda window: -1 if window is None else window)
        """The windows of the layers, each once."""
        self._references: list[Any] = []  # C gets addresses only
        self._store: Store | None = None
        self._model = self._pack_all(loaded.weights)
        self._scratch = np.empty(0, np.float32)
        self._tables: list[tuple[Array, Array]] = []

    def _pack_all(self, weights: Weights) -> Model:
        """Pack all weights that are not packed yet. Raises ModelError if a shape differs from the config."""
        config = self._config
        expected = weight_shapes(config)
        for name, shape in expected.items():
            if weights.shapes.get(name) != shape:
                raise ModelError(f"the shape of {name} is {weights.shapes.get(name)}, but the config requires {shape}")
        tied = config.tie_word_embeddings and self.weights == "gguf"
        products = _products(config, tied, self.weights == "gguf")
        if isinstance(weights, GGUFWeights) and self.weights == "gguf" and not self._packed:
            self._map_packed(weights, products)
        for name, parts in products.items():
            if name not in self._packed:
                self._add_product(weights, name, parts, self._pack(weights, name, parts))
        heads, scales, mixture = Heads.of(config), Scales.of(config), Mixture.of(config)
        layers = (Layer * config.num_hidden_layers)()
        for number, layer in enumerate(layers):
            self._fill_layer(layer, number, weights)
        embedding, table = None, Matrix()
        if self.weights == "gguf":
            table = Matrix.from_buffer_copy(self._packed["head" if tied else "table"].matrix)
            table.unit /= self._factor("head") if tied else 1.0
        else:
            self._references.append(np.ascontiguousarray(weights.array(EMBEDDING), self._dtype))
            embedding = address(self._references[-1], self._dtype)
        if isinstance(weights, GGUFWeights):
            weights.close_file()
        self._references.append(layers)
        self._layers = layers
        inner = config.intermediate_size if mixture is None else mixture.inner
        return Model(
            ctypes.addressof(layers), embedding, self._norm(weights, "model.norm.weight"),
            self._packed["head"].matrix, table, len(layers), config.hidden_size, inner, heads.query,
             heads.kv, 0, 0, self._rotary[0].dim, _GATE + ACTIVATIONS.index(activation_of(config)),
            *((0, 0, 0) if mixture is None else (mixture.experts, mixture.chosen, mixture.normalized)),
            config.rms_norm_eps, scales.attention, scales.attention_cap, scales.embedding, scales.logit_cap,
        )  # fmt: skip

    def _fill_layer(self, layer: Layer, number: int, weights: Weights) -> None:
        """Set the fields of one layer."""
        family, place = family_of(self._config), f"model.layers.{number}."
        for name in _PARTS:
            setattr(layer, name, self._packed[f"{number}.{name}"].matrix)
        for name, stem in family.norms.items():
            setattr(layer, name, self._norm(weights, f"{place}{stem}.weight"))
        if family.sinks:
            layer.sinks = self._float_address(weights.array(place + SINKS))
        if family.experts is not None:
            router = place + family.experts.router
            weight = weights[f"{router}.weight"]
            layer.router = self._float_address(weight.floats() if isinstance(weight, Whole) else weight)
            if family.experts.biased:
                layer.router_bias = self._float_address(weights.array(f"{router}.bias"))
        layer.window = self._windows.index(self._layer_windows[number])
        layer.rope = self._layer_ropes[number]

    def _norm(self, weights: Weights, name: str) -> int:
        return self._float_address(weights.array(name).astype(np.float32) + family_of(self._config).norm_offset)

    def cut(self, runs: Sequence[Run]) -> tuple[list[int], list[Tiles]]:
        """Return the packing order of the runs, and the tiles of each window."""
        order, tiles = make_tiles(runs, self._windows[0])
        ordered = [runs[run] for run in order]
        return order, [tiles, *(make_tiles(ordered, window)[1] for window in self._windows[1:])]

    def reserve(self, slots: int) -> None:
        """Allocate the key-value store."""
        self._store = Store.allocate(self._config, slots, partial(lazy_zeros, dtype=self._store_dtype))
        for layer, keys, values in zip(self._layers, *self._store, strict=True):
            layer.keys, layer.values = address(keys, self._store_dtype), address(values, self._store_dtype)
        _, slots, dim = self._store.keys[0].shape
        self._model.kv_head_stride, self._model.slot_stride = slots * dim, dim

    def use(self, functions: ctypes.CDLL) -> None:
        """Use these C functions, compiled for the model's head dimension and weight format."""
        self._functions = functions
        functions.forward.argtypes, functions.forward.restype = [POINTER(Model), POINTER(Batch)], None
        functions.scratch_floats.argtypes = [POINTER(Model), POINTER(Batch)]
        functions.scratch_floats.restype = c_int64

    @property
    def name(self) -> str:
        return f"C, weights kept in {self.weights}"

    @property
    def store(self) -> Store | None:
        """The keys and values, once they are allocated."""
        return self._store

    @property
    def code(self) -> str:
        """Identifies what computes keys and values from weights: the library, the number formats, the processor."""
        seal = Path(self._functions._name).read_bytes()[-hashlib.sha256().digest_size :]
        return f"{seal.hex()} {self.weights} {self._dtype} {processor()}"

    @property
    def weight_bytes(self) -> float:
        products = self._packed.values()
        size = sum(product.arrays[0].nbytes for product in products)
        return float(size / sum(product.matrix.inputs * product.matrix.outputs for product in products))

    def close(self) -> None:
        """Free the packed weights and the store."""
        del self._functions
        self._packed, self._references, self._model, self._scratch = {}, [], Model(), np.empty(0, np.float32)
        self._store = self._layers = None

    def forward(self, rows: Array, keep: Array, pieces: Sequence[Tiles]) -> Array:
        tokens, positions, write = rows
        count, kept = len(tokens), len(keep)
        tables = self._rope_tables(int(positions.max()) + 1)
        logits = empty((kept, self._config.vocab_size), np.float32)
        saturated = c_int()
        batch = Batch(
            *(address(array, np.int64) for array in (tokens, positions, write, keep)),
            *((c_void_p * KINDS)(*(address(table[part], np.float32) for table in tables)) for part in (0, 1)),
            address(logits, np.float32), None,
            (CTiles * KINDS)(*map(CTiles.of, pieces)),
            count, kept, threads(), ctypes.addressof(saturated),
        )  # fmt: skip
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

    def _float_address(self, vector: Array) -> int:
        self._references.append(np.array(vector, dtype=np.float32))
        return address(self._references[-1], np.float32)

    def _pack(self, weights: Weights, name: str, parts: Sequence[str]) -> Packed:
        matrices = [weights[f"{part}.weight"] for part in parts]
        if weights.quantized and any(isinstance(matrix, np.ndarray) for matrix in matrices):
            log_once(logging.INFO, "the model stores some matrices as floats: they are rounded to eight bits")
        return packed(joined(matrices, name.endswith("gate_up")), self.weights)

    def _add_product(self, weights: Weights, name: str, parts: Sequence[str], weight: Packed) -> None:
        strips, *form, codebook = weight
        sizes = reversed(_shape(weights, parts))
        matrix = Matrix(address(strips, strips.dtype), None, *sizes, *form, (c_uint8 * 16)(*codebook))
        matrix.unit *= self._factor(name)
        product = self._packed[name] = _Product(matrix, [strips])
        if f"{parts[0]}.bias" in weights:
            biases = [weights.array(f"{part}.bias") for part in parts]
            bias = np.array(beside(biases, name.endswith("gate_up")), dtype=np.float32) * self._factor(name)
            product.arrays.append(bias.astype(np.float32))
            matrix.bias = address(product.arrays[-1], np.float32)

    def _factor(self, name: str) -> float:
        """Return the factor of the results of a product."""
        scales = Scales.of(self._config)
        return scales.logits if name == "head" else scales.residual if name.endswith((".out", ".down")) else 1.0

    def _map_packed(self, weights: GGUFWeights, products: Mapping[str, Sequence[str]]) -> None:
        """Map the packed integers of a GGUF file. They are packed once and cached in a file."""
        packers = {name: partial(self._pack, weights, name, parts) for name, parts in products.items()}
        shapes = {name: _shape(weights, parts) for name, parts in products.items()}
        for name, weight in packed_in_file(weights.folder, packers, shapes).items():
            self._add_product(weights, name, products[name], weight)


_PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("{mlp}.gate_proj", "{mlp}.up_proj"),
    "down": ("{mlp}.down_proj",),
}
"""The linear layers of each product of a layer, by its name in C."""
_GATE = 2
"""The first activation function of Epilogue in activation.h."""


def _products(config: Any, tied: bool, table: bool) -> dict[str, list[str]]:
    """Return the linear layers of each product, by name. `table` adds the embedding, which is the head if `tied`."""
    mlp = "mlp" if Mixture.of(config) is None else EXPERTS
    products = {
        f"{number}.{name}": [f"model.layers.{number}.{part.format(mlp=mlp)}" for part in parts]
        for number in range(config.num_hidden_layers)
        for name, parts in _PARTS.items()
    }
    products["head"] = ["model.embed_tokens" if tied else "lm_head"]
    if table and not tied:
        products["table"] = ["model.embed_tokens"]
    return products


def _shape(weights: Weights, parts: Sequence[str]) -> tuple[int, int]:
    """Return the total outputs, and the inputs, of the linear layers of one product."""
    shapes = [weights.shapes[f"{part}.weight"] for part in parts]
    return sum(shape[0] for shape in shapes), shapes[0][1]


def native_forward(loaded: LoadedModel, quantize: Quantization | None = None) -> NativeForward | None:
    """Return the C backend for a model, or None if it is unavailable here.

    Integers of the files are always packed, and the floats of a GGUF file without integers are packed exactly."""
    heads = Heads.of(loaded.config)
    supported = _is_supported(loaded.config) and _has_plain_layers(loaded)
    if not supported or not kernels_run(heads.dim, heads.query // heads.kv, loaded.dtype, loaded.device):
        return None
    weights = loaded.weights
    parts = [part for parts in _products(loaded.config, False, False).values() for part in parts]
    linear = [f"{part}.weight" for part in parts]
    if weights.quantized:
        quantize = quantize or "int8-dynamic"
    elif quantize == "gguf":
        quantize = None
    kind = quantize or _exact_kind(weights, linear)
    if quantize is not None and any(weights.shapes[name][1] % GROUP for name in linear):
        return None
    size = _BYTES[kind] * sum(math.prod(weights.shapes[name]) for name in linear)
    # A module's weights stay in memory next to the packed copy, so pack only if memory is plentiful.
    needed = size if loaded.module is None else _FREE_MEMORY_FACTOR * size
    if not room_for("the weights for the forward in C", needed, loaded.device):
        return None
    weight_format = kind if kind in ("float32", "bfloat16") else "whole"
    half = loaded.store_dtype == np.float16
    functions = library(*compiling.forward(heads.dim, loaded.dtype == np.float32, weight_format, lanes(), half))
    if functions is None or not sizes_agree(functions, "forward_sizes", (*SIZES, lanes())):
        return None
    backend = NativeForward(loaded, kind)
    backend.use(functions)
    return backend


def _exact_kind(weights: Weights, names: Sequence[str]) -> PackedKind:
    """Return the smallest packed format that keeps the weights exactly."""
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
