"""The forward in C (forward.c): all layers of a Llama-like model in one call, weights packed as they are read.

For the families whose layers it knows, on CPUs with AVX-512, AVX2 or NEON. A model that is the engine's own gives up
the weights that only this reads; else the model stays as it is, and can compute elsewhere.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_double, c_float, c_int64, c_void_p, sizeof
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from tot.decoders.kernels.native import compiling
from tot.decoders.kernels.native.library import address, lanes, library, sizes_agree
from tot.decoders.kernels.native.packed_file import packed_in_file
from tot.decoders.kernels.native.packing import (
    GROUP,
    Packed,
    Weights,
    beside,
    copy_the_rest,
    joined,
    packed,
    room_for,
)
from tot.decoders.kernels.native.tiles import SIZES, CTiles, Tiles, kernels_run, make_tiles
from tot.decoders.models.given_up import give_up
from tot.decoders.models.supported import LLAMA_LIKE, window_of
from tot.decoders.timeline import add_spans

Quantization = Literal["int8-dynamic", "gguf"]
_TABLE = 1024
"""Positions whose cosines and sines are computed at once, at least."""
_BYTES: dict[Weights, float] = {
    "float32": 4,
    "bfloat16": 2,
    "int8-dynamic": 1 + 4 / GROUP,
    "gguf": 0,
}
"""That a packed weight takes, at most; those of a GGUF file are not held, but mapped."""
_SPARE = 2
"""Packed where so many times what that takes is free."""


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
    """Layers in one product, as C knows them, and the tensors that it has the addresses of."""

    matrix: _Matrix
    held: list[Tensor]


class NativeForward:
    """The backend in C: a model's forward over the given stores of keys and values.

    What another forward has packed of the same layers is `shared`. With `owned`, layers give up their weights.
    """

    cut = staticmethod(make_tiles)

    def __init__(
        self,
        model: Any,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        weights: Weights,
        owned: bool = False,
        shared: NativeForward | None = None,
    ) -> None:
        if owned and weights != "gguf":
            copy_the_rest(model)
        self.weights = weights
        """How they are packed; float32 ones that are all bfloat16 numbers are kept as such, exactly."""
        self._owned = owned
        self._packed: dict[nn.Module, _Product] = {} if shared is None else shared._packed
        """By the first of the layers in one product."""
        config, body = model.config, model.model
        self._rotary = body.rotary_emb
        self._held: list[Any] = [keys, values]  # C has their addresses only
        products = [_products(layer) for layer in body.layers]
        head = body.embed_tokens if config.tie_word_embeddings and weights == "gguf" else model.lm_head
        if weights == "gguf" and shared is None:
            self._read_file(model, products, head)
        layers = (_Layer * len(body.layers))()
        for layer, parts, place, key, value in zip(body.layers, products, layers, keys, values, strict=True):
            for name, together in parts.items():
                setattr(place, name, self._matrix(together, name == "gate_up"))
            attention = layer.self_attn
            place.norm_in = self._numbers(layer.input_layernorm.weight)
            place.norm_mlp = self._numbers(layer.post_attention_layernorm.weight)
            if hasattr(attention, "q_norm"):
                place.norm_query = self._numbers(attention.q_norm.weight)
                place.norm_key = self._numbers(attention.k_norm.weight)
            place.keys, place.values = address(key, model.dtype), address(value, model.dtype)
        self._held.append(layers)
        embedding, table = None, _Matrix()
        if weights == "gguf":
            table = self._matrix([body.embed_tokens])
        else:
            self._held.append(body.embed_tokens.weight.detach())
            embedding = address(self._held[-1], model.dtype)
        heads = config.num_attention_heads
        self._model = _Model(
            ctypes.addressof(layers), embedding, self._numbers(body.norm.weight), self._matrix([head]), table,
            len(layers), config.hidden_size, config.intermediate_size, heads, heads // attention.num_key_value_groups,
            keys[0].stride(0), keys[0].stride(1), keys[0].shape[2], body.norm.variance_epsilon, attention.scaling,
        )  # fmt: skip
        self._vocabulary, self._hidden = model.lm_head.weight.shape[0], config.hidden_size
        self._space = torch.empty(0)
        self._table = (torch.empty(0), torch.empty(0))

    def use(self, functions: ctypes.CDLL) -> None:
        """Compute with these, which were compiled for such a model and such weights."""
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
        """Let go of the packed weights and of the stores."""
        del self._functions
        self._packed, self._held, self._model, self._space = {}, [], _Model(), torch.empty(0)

    def forward(
        self, tokens: Tensor, positions: Tensor, write: Tensor, keep: Tensor, pieces: Tiles, layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        rows, kept = tokens.shape[1], len(keep)
        cosines, sines, turns = self._turns(positions)
        logits = torch.empty((kept, self._vocabulary), dtype=torch.float32)
        states, wanted = torch.empty((kept, len(layers), self._hidden)), torch.tensor(layers, dtype=torch.int64)
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

    def _numbers(self, tensor: Tensor) -> int:
        held = tensor.detach().float().contiguous()
        self._held.append(held)
        return held.data_ptr()

    def _matrix(self, layers: Sequence[Any], interleaved: bool = False) -> _Matrix:
        if layers[0] not in self._packed:
            self._hold(layers, self._pack(layers, interleaved), interleaved)
            if self._owned:
                for layer in layers:
                    give_up(layer)
        return self._packed[layers[0]].matrix

    def _pack(self, layers: Sequence[Any], interleaved: bool) -> Packed:
        weights = [layer.weight.in_file() if self.weights == "gguf" else layer.weight.detach() for layer in layers]
        return packed(joined(weights, interleaved), self.weights)

    def _hold(self, layers: Sequence[Any], of: Packed, interleaved: bool) -> None:
        strips, *form = of
        outputs, inputs = _shape(layers)
        matrix = _Matrix(strips.data_ptr(), None, inputs, outputs, *form)
        self._packed[layers[0]] = _Product(matrix, [strips])
        if getattr(layers[0], "bias", None) is not None:
            bias = beside([layer.bias.detach() for layer in layers], interleaved).float().contiguous()
            matrix.bias = bias.data_ptr()
            self._packed[layers[0]].held.append(bias)

    def _read_file(self, model: Any, products: Sequence[dict[str, list[Any]]], head: Any) -> None:
        """Hold what a GGUF file has, packed once and kept: `products` of each layer, the head and the embedding."""
        found = {f"{number}.{name}": part for number, parts in enumerate(products) for name, part in parts.items()}
        found |= {"head": [head]} | ({} if head is model.model.embed_tokens else {"table": [model.model.embed_tokens]})
        made = {name: partial(self._pack, part, name.endswith("gate_up")) for name, part in found.items()}
        shapes = {name: _shape(part) for name, part in found.items()}
        for name, of in packed_in_file(model.packed_in, made, shapes).items():
            self._hold(found[name], of, name.endswith("gate_up"))
        model.let_go_of_file()


def _shape(layers: Sequence[Any]) -> tuple[int, int]:
    """Outputs, all together, and inputs of layers in one product."""
    return sum(layer.weight.shape[0] for layer in layers), layers[0].weight.shape[1]


def _products(layer: Any) -> dict[str, list[Any]]:
    """By its name in C, the linear layers that are one product."""
    attention, mlp = layer.self_attn, layer.mlp
    return {
        "qkv": [attention.q_proj, attention.k_proj, attention.v_proj],
        "out": [attention.o_proj],
        "gate_up": [mlp.gate_proj, mlp.up_proj],
        "down": [mlp.down_proj],
    }


def native_forward(
    model: Any,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    quantize: Quantization | None = None,
    owned: bool = False,
    shared: NativeForward | None = None,
) -> NativeForward | None:
    """The forward in C for a model and its stores of keys and values; None where there is none for them here.

    With `owned` nobody else reads the model's weights. `shared` is that of a model whose layers these are.
    """
    if shared is None and not _known(model, quantize):
        return None
    head_dim, groups = keys[0].shape[2], model.model.layers[0].self_attn.num_key_value_groups
    if not kernels_run(head_dim, groups, model.dtype, model.device):
        return None
    if shared is not None:
        kind = shared.weights
    else:
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        kind = quantize or _kind(linears)
        if quantize is not None and any(layer.in_features % GROUP for layer in linears):
            return None
        takes = [layer.weight.numel() * _BYTES[kind] for layer in linears]
        needed = _SPARE * (max(takes) if owned else sum(takes))
        if not room_for("the weights for the forward in C", needed, model.device):
            return None
    weights = kind if kind in ("float32", "bfloat16") else "whole"
    functions = library(*compiling.forward(head_dim, model.dtype == torch.float32, weights, lanes()))
    if functions is None or not sizes_agree(functions, "attention_sizes", SIZES):
        return None
    if not sizes_agree(functions, "forward_sizes", [*map(sizeof, (_Matrix, _Layer, _Model, _Batch)), lanes()]):
        return None
    made = NativeForward(model, keys, values, kind, owned, shared)
    made.use(functions)
    return made


def _kind(linears: Sequence[nn.Linear]) -> Weights:
    """How weights are packed that are to be kept exactly."""
    narrow = all(
        layer.weight.dtype == torch.bfloat16 or bool((layer.weight == layer.weight.bfloat16()).all())
        for layer in linears
    )
    return "bfloat16" if narrow else "float32"


def _known(model: Any, quantize: Quantization | None) -> bool:
    """Whether forward.c does what this model does."""
    config = model.config
    if config.model_type not in LLAMA_LIKE or config.hidden_act != "silu" or window_of(config) is not None:
        return False
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    plain = all(type(module) is nn.Linear for module in linears)
    held = quantize == "gguf" or not any("forward" in vars(module) for module in linears)
    table, here = model.model.embed_tokens.weight, all(weight.device.type == "cpu" for weight in model.parameters())
    held = held and here and table.dtype == model.dtype and (quantize == "gguf" or table.is_contiguous())
    return plain and held and config.hidden_size % 16 == 0 and config.intermediate_size % 16 == 0
