"""The forward in C (forward.c): all layers of a Llama-like model in one call, weights packed as they are read.

For the families whose layers it knows, on CPUs with AVX-512, AVX2 or NEON. It needs a config and a mapping of weights,
and no transformers module.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, byref, c_double, c_float, c_int64, c_void_p, sizeof
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tot.decoders.errors import ModelError
from tot.decoders.kernels.native import compiling
from tot.decoders.kernels.native.library import address, lanes, library, sizes_agree
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
from tot.decoders.kernels.native.tiles import SIZES, CTiles, Tiles, kernels_run, make_tiles
from tot.decoders.models.kv_store import Store
from tot.decoders.models.loaded import LoadedModel
from tot.decoders.models.shapes import EMBEDDING, Heads, weight_shapes
from tot.decoders.models.supported import LLAMA_LIKE, window_of
from tot.decoders.models.weights import GGUFWeights, Weights
from tot.decoders.timeline import add_spans

Quantization = Literal["int8-dynamic", "gguf"]
_TABLE = 1024
"""Positions whose cosines and sines are computed at once, at least."""
_BYTES: dict[PackedKind, float] = {
    "float32": 4,
    "bfloat16": 2,
    "int8-dynamic": 1 + 4 / GROUP,
    "gguf": 0,
}
"""That a packed weight takes, at most; those of a GGUF file are not held, but mapped."""
_SPARE = 2
"""A module's weights are packed where so many times what that takes is free."""


class _Matrix(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("strips", "bias")),
        *((name, c_int64) for name in ("inputs", "outputs", "bits", "group")),
        *((name, c_double) for name in ("unit", "middle")),
    ]


class _Layer(Structure):
    _fields_ = [
        *((name, _Matrix) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("norm_in", "norm_mlp", "norm_query", "norm_key", "keys", "values")),
    ]


class _Model(Structure):
    _fields_ = [
        ("layers", c_void_p),
        ("embedding", c_void_p),
        ("norm", c_void_p),
        ("head", _Matrix),
        ("table", _Matrix),
        *(
            (name, c_int64)
            for name in (
                *("layer_count", "hidden", "intermediate", "heads", "kv_heads"),
                *("kv_head_stride", "slot_stride", "turned"),
            )
        ),
        ("epsilon", c_float),
        ("scale", c_float),
    ]


class _Batch(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("tokens", "turns", "write", "keep", "cosines", "sines")),
        *((name, c_void_p) for name in ("logits", "states", "layers", "space", "seconds")),
        ("tiles", CTiles),
        *((name, c_int64) for name in ("rows", "kept", "wanted", "threads")),
    ]


class _Product(NamedTuple):
    """Linear layers in one product, as C knows them, and the tensors that it has the addresses of."""

    matrix: _Matrix
    held: list[Tensor]


class NativeForward:
    """The backend in C: packed weights, and a store of keys and values.

    `shared` is the backend of a model with the same layers, whose packed weights are used instead of packing again.
    """

    cut = staticmethod(make_tiles)
    module = None
    """No transformers module computes."""

    def __init__(self, loaded: LoadedModel, kind: PackedKind, shared: NativeForward | None = None) -> None:
        self.weights = kind
        """How weights are packed; float32 ones that are all bfloat16 numbers are kept as such, exactly."""
        self._config, self._dtype = loaded.config, loaded.dtype
        self._packed: dict[str, _Product] = {} if shared is None else shared._packed
        """By the name of the product: a layer's number and its name in C."""
        self._rotary = LlamaRotaryEmbedding(loaded.config)
        self._held: list[Any] = []  # C has their addresses only
        self._store: Store | None = None
        self._model = self._pack_all(loaded.weights)
        self._space = torch.empty(0)
        self._table = (torch.empty(0), torch.empty(0))

    def _pack_all(self, weights: Weights) -> _Model:
        """Pack what is not packed yet. Raises ModelError for weights of other shapes than the config says."""
        config = self._config
        expected = weight_shapes(config)
        for name, shape in expected.items():
            if weights.shapes.get(name) != shape:
                raise ModelError(f"the shape of {name} is {weights.shapes.get(name)}, and the config says {shape}")
        tied = config.tie_word_embeddings and self.weights == "gguf"
        products = _products(config.num_hidden_layers, tied, self.weights == "gguf")
        if isinstance(weights, GGUFWeights) and not self._packed:
            self._map_packed(weights, products)
        for name, parts in products.items():
            if name not in self._packed:
                self._hold(weights, name, parts, self._pack(weights, name, parts))
        layers = (_Layer * config.num_hidden_layers)()
        for number, place in enumerate(layers):
            for name in _PARTS:
                setattr(place, name, self._packed[f"{number}.{name}"].matrix)
            for name, vector in _NORMS.items():
                if (whole := f"model.layers.{number}.{vector}.weight") in expected:
                    setattr(place, name, self._numbers(weights.tensor(whole)))
        embedding, table = None, _Matrix()
        if self.weights == "gguf":
            table = self._packed["head" if tied else "table"].matrix
        else:
            self._held.append(weights.tensor(EMBEDDING))
            embedding = address(self._held[-1], self._dtype)
        heads = Heads.of(config)
        self._held.append(layers)
        self._layers = layers
        return _Model(
            ctypes.addressof(layers), embedding, self._numbers(weights.tensor("model.norm.weight")),
            self._packed["head"].matrix, table, len(layers), config.hidden_size, config.intermediate_size, heads.query,
            heads.kv, 0, 0, heads.dim, config.rms_norm_eps, heads.dim**-0.5,
        )  # fmt: skip

    def reserve(self, slots: int) -> None:
        """Allocate the store of keys and values."""
        self._store = Store.allocate(self._config, slots, self._dtype, torch.device("cpu"))
        for place, keys, values in zip(self._layers, *self._store, strict=True):
            place.keys, place.values = address(keys, self._dtype), address(values, self._dtype)
        self._model.kv_head_stride, self._model.slot_stride = self._store.keys[0].stride()[:2]

    def use(self, functions: ctypes.CDLL) -> None:
        """Compute with these, which were compiled for such heads and such weights."""
        self._functions = functions
        functions.forward.argtypes, functions.forward.restype = [POINTER(_Model), POINTER(_Batch)], None
        functions.space_for.argtypes, functions.space_for.restype = [POINTER(_Model), POINTER(_Batch)], c_int64

    @property
    def name(self) -> str:
        return f"C, weights kept in {self.weights}"

    @property
    def weight_bytes(self) -> float:
        matrices = [(one.held[0].nbytes, one.matrix.inputs * one.matrix.outputs) for one in self._packed.values()]
        return float(sum(size for size, _ in matrices) / sum(count for _, count in matrices))

    def close(self) -> None:
        """Free the packed weights and the store."""
        del self._functions
        self._packed, self._held, self._model, self._space = {}, [], _Model(), torch.empty(0)
        self._store = self._layers = None

    def forward(
        self, tokens: Tensor, positions: Tensor, write: Tensor, keep: Tensor, pieces: Tiles, layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        rows, kept = tokens.shape[1], len(keep)
        cosines, sines, turns = self._turns(positions)
        logits = torch.empty((kept, self._config.vocab_size), dtype=torch.float32)
        states = torch.empty((kept, len(layers), self._config.hidden_size))
        wanted = torch.tensor(layers, dtype=torch.int64)
        seconds = (c_double * 3)()
        batch = _Batch(
            *(address(tensor, torch.int64) for tensor in (tokens, turns, write, keep)),
            *(address(tensor, torch.float32) for tensor in (cosines, sines, logits, states)),
            address(wanted, torch.int64), None, ctypes.addressof(seconds), CTiles.of(pieces),
            rows, kept, len(layers), torch.get_num_threads(),
        )  # fmt: skip
        if len(self._space) < (needed := self._functions.space_for(byref(self._model), byref(batch))):
            self._space = torch.empty(needed, dtype=torch.float32)
        batch.space = self._space.data_ptr()
        self._functions.forward(byref(self._model), byref(batch))
        add_spans({"linear": seconds[0], "attention": seconds[1]})
        return logits, states if layers else None

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(turns, head_dim) cosines and sines by position, and which of them each row takes."""
        needed = int(positions.max()) + 1
        if len(self._table[0]) < needed:
            self._table = self._angles(torch.arange(max(_TABLE, 2 * needed))[None])
        return *self._table, positions

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cosines, sines = self._rotary(torch.empty(0), position_ids=positions)
        return cosines[0].contiguous(), sines[0].contiguous()

    def _numbers(self, vector: Tensor) -> int:
        held = vector.float().contiguous()
        self._held.append(held)
        return held.data_ptr()

    def _pack(self, weights: Weights, name: str, parts: Sequence[str]) -> Packed:
        found = [weights[f"{part}.weight"] for part in parts]
        return packed(joined(found, name.endswith("gate_up")), self.weights)

    def _hold(self, weights: Weights, name: str, parts: Sequence[str], of: Packed) -> None:
        strips, *form = of
        matrix = _Matrix(strips.data_ptr(), None, *reversed(_shape(weights, parts)), *form)
        product = self._packed[name] = _Product(matrix, [strips])
        if f"{parts[0]}.bias" in weights:
            biases = [weights.tensor(f"{part}.bias") for part in parts]
            product.held.append(beside(biases, name.endswith("gate_up")).float().contiguous())
            matrix.bias = product.held[-1].data_ptr()

    def _map_packed(self, weights: GGUFWeights, products: Mapping[str, Sequence[str]]) -> None:
        """Map the numbers of a GGUF file, which are packed once and kept in a file."""
        made = {name: partial(self._pack, weights, name, parts) for name, parts in products.items()}
        shapes = {name: _shape(weights, parts) for name, parts in products.items()}
        for name, of in packed_in_file(weights.folder, made, shapes).items():
            self._hold(weights, name, products[name], of)
        weights.close_file()


_PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""By its name in C, the linear layers of a layer that are one product."""
_NORMS = {
    "norm_in": "input_layernorm",
    "norm_mlp": "post_attention_layernorm",
    "norm_query": "self_attn.q_norm",
    "norm_key": "self_attn.k_norm",
}


def _products(layers: int, tied: bool, table: bool) -> dict[str, list[str]]:
    """The linear layers in each product, by its name; with the embedding as a `table`, which is the head if `tied`."""
    found = {
        f"{number}.{name}": [f"model.layers.{number}.{part}" for part in parts]
        for number in range(layers)
        for name, parts in _PARTS.items()
    }
    found["head"] = ["model.embed_tokens" if tied else "lm_head"]
    if table and not tied:
        found["table"] = ["model.embed_tokens"]
    return found


def _shape(weights: Weights, parts: Sequence[str]) -> tuple[int, int]:
    """Outputs, all together, and inputs of the linear layers in one product."""
    shapes = [weights.shapes[f"{part}.weight"] for part in parts]
    return sum(shape[0] for shape in shapes), shapes[0][1]


def native_forward(
    loaded: LoadedModel, quantize: Quantization | None = None, shared: NativeForward | None = None
) -> NativeForward | None:
    """The forward in C for a model; None where there is none for it here. `shared` as for NativeForward."""
    heads = Heads.of(loaded.config)
    known = shared is not None or (_known(loaded) and _plain(loaded))
    if not known or not kernels_run(heads.dim, heads.query // heads.kv, loaded.dtype, loaded.device):
        return None
    weights = loaded.weights
    if shared is not None:
        kind = shared.weights
    else:
        linear = [name for name, shape in weights.shapes.items() if len(shape) == 2 and name != EMBEDDING]
        kind = quantize or _exact_kind(weights, linear)
        if quantize is not None and any(weights.shapes[name][1] % GROUP for name in linear):
            return None
        takes = _BYTES[kind] * sum(math.prod(weights.shapes[name]) for name in linear)
        # A module's weights stay beside the packed ones, so those are made only where memory is plentiful.
        needed = takes if loaded.module is None else _SPARE * takes
        if not room_for("the weights for the forward in C", needed, loaded.device):
            return None
    form = kind if kind in ("float32", "bfloat16") else "whole"
    functions = library(*compiling.forward(heads.dim, loaded.dtype == torch.float32, form, lanes()))
    if functions is None or not sizes_agree(functions, "attention_sizes", SIZES):
        return None
    if not sizes_agree(functions, "forward_sizes", [*map(sizeof, (_Matrix, _Layer, _Model, _Batch)), lanes()]):
        return None
    made = NativeForward(loaded, kind, shared)
    made.use(functions)
    return made


def _exact_kind(weights: Weights, names: Sequence[str]) -> PackedKind:
    """How weights are packed that are to be kept exactly."""
    narrow = all(
        weight.dtype == torch.bfloat16 or bool((weight == weight.bfloat16()).all())
        for weight in (weights[name] for name in names)
        if isinstance(weight, Tensor)
    )
    return "bfloat16" if narrow else "float32"


def _known(loaded: LoadedModel) -> bool:
    """Whether forward.c computes what such a config says."""
    config = loaded.config
    if config.model_type not in LLAMA_LIKE or config.hidden_act != "silu" or window_of(config) is not None:
        return False
    return bool(config.hidden_size % 16 == 0 and config.intermediate_size % 16 == 0)


def _plain(loaded: LoadedModel) -> bool:
    """Whether the module, where there is one, has plain linear layers on the CPU and nothing else in their place."""
    if loaded.module is None and loaded.stored is not None:
        return True
    model: Any = loaded.model
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not all(type(module) is nn.Linear and "forward" not in vars(module) for module in linears):
        return False
    table: Tensor = model.model.embed_tokens.weight
    here = all(weight.device.type == "cpu" for weight in model.parameters())
    return here and table.dtype == loaded.dtype and table.is_contiguous()
