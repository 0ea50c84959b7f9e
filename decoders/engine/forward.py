"""The forward in C (forward.c): all layers of a Llama-like model in one call, weights packed as they are read.

For the families whose layers it knows, on CPUs with AVX-512; the model itself stays as it is, and computes elsewhere.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, Structure, byref, c_double, c_float, c_int64, c_void_p, sizeof
from typing import Any, Literal, get_args

import psutil
import torch
from torch import Tensor, nn

from tot.decoders.engine.attention import Plan
from tot.decoders.engine.kernel import SIZES, CTiles, kernel_options
from tot.decoders.engine.native import address, library, processor_flags, sizes_agree
from tot.decoders.engine.parts import counted
from tot.decoders.errors import OptionError, unknown

Weights = Literal["float32", "bfloat16", "int8", "int8-dynamic"]

Quantization = Literal["int8", "int8-dynamic"]
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_LINE = 16
"""Outputs beside each other in a line; a strip is of two lines."""
_GROUP = 32
"""Inputs that share a step in int8: GROUP in forward.c."""
_TABLE = 1024
"""Positions whose cosines and sines are computed at once, at least."""
_BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings whose angles depend on how long the text is."""
_SPARE = 2
"""Packed where so many times the packed weights' size is free."""
_FEW: dict[Weights, int] = {"int8": 8, "int8-dynamic": 16}
"""Rows up to which eight bits are read faster than bfloat16 is multiplied; where there are bfloat16 products."""
BYTES: dict[Weights, float] = {"float32": 4, "bfloat16": 2, "int8": 1 + 8 / _GROUP, "int8-dynamic": 1 + 8 / _GROUP}
"""That a packed weight takes."""
_COMPILED: dict[Weights, tuple[str, ...]] = {
    "float32": ("-DWEIGHTS=32",),
    "bfloat16": ("-DWEIGHTS=16",),
    "int8": ("-DWEIGHTS=8", "-DINPUTS=16"),
    "int8-dynamic": ("-DWEIGHTS=8", "-DINPUTS=8"),
}


class _Matrix(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("strips", "bias")),
        ("inputs", c_int64),
        ("outputs", c_int64),
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
        *((name, c_void_p) for name in ("logits", "space", "seconds")),
        ("tiles", CTiles),
        *((name, c_int64) for name in ("rows", "kept", "threads")),
    ]


class NativeForward:
    """A model's forward over the given stores of keys and values: tensors in, logits out."""

    def __init__(self, model: Any, keys: Sequence[Tensor], values: Sequence[Tensor], weights: Weights) -> None:
        self.weights = weights
        """How they are packed; float32 ones that are all bfloat16 numbers are kept as such, exactly."""
        config, body = model.config, model.model
        self._rotary = body.rotary_emb
        self._held: list[Any] = [keys, values]  # C has their addresses only
        layers = (_Layer * len(body.layers))()
        for layer, place, key, value in zip(body.layers, layers, keys, values, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            place.qkv = self._matrix([attention.q_proj, attention.k_proj, attention.v_proj])
            place.out = self._matrix([attention.o_proj])
            place.gate_up = self._matrix([mlp.gate_proj, mlp.up_proj], interleaved=True)
            place.down = self._matrix([mlp.down_proj])
            place.norm_in = self._numbers(layer.input_layernorm.weight)
            place.norm_mlp = self._numbers(layer.post_attention_layernorm.weight)
            if hasattr(attention, "q_norm"):
                place.norm_query = self._numbers(attention.q_norm.weight)
                place.norm_key = self._numbers(attention.k_norm.weight)
            place.keys, place.values = address(key, model.dtype), address(value, model.dtype)
        self._held.append(layers)
        attention = body.layers[0].self_attn
        embedding = body.embed_tokens.weight.detach()
        self._held.append(embedding)
        heads = config.num_attention_heads
        self._model = _Model(
            ctypes.addressof(layers), address(embedding, model.dtype), self._numbers(body.norm.weight),
            self._matrix([model.lm_head]), len(layers), embedding.shape[1], config.intermediate_size,
            heads, heads // attention.num_key_value_groups, keys[0].stride(0), keys[0].stride(1), keys[0].shape[2],
            body.norm.variance_epsilon, attention.scaling,
        )  # fmt: skip
        self.many: NativeForward | None = None
        """Computes more than `_FEW` rows instead, where that is faster."""
        self._vocabulary = model.lm_head.out_features
        self._space = torch.empty(0)
        self._table = (torch.empty(0), torch.empty(0))

    def use(self, functions: ctypes.CDLL) -> None:
        """Compute with these, which were compiled for such a model and such weights."""
        self._forward, self._space_for = functions.forward, functions.space_for
        self._forward.argtypes, self._forward.restype = [POINTER(_Model), POINTER(_Batch)], None
        self._space_for.argtypes, self._space_for.restype = [POINTER(_Model), POINTER(_Batch)], c_int64

    def __call__(self, tokens: Tensor, positions: Tensor, keep: Tensor, plan: Plan) -> Tensor:
        """Shapes: tokens and positions (1, rows), keep (kept,), all int64. Returns (kept, vocabulary) in float32."""
        assert plan.tiles is not None
        rows, kept = tokens.shape[1], len(keep)
        if self.many is not None and rows > _FEW[self.weights]:
            return self.many(tokens, positions, keep, plan)
        cosines, sines, turns = self._turns(positions)
        logits = torch.empty((kept, self._vocabulary), dtype=torch.float32)
        seconds = (c_double * 3)()
        batch = _Batch(
            *(address(tensor, torch.int64) for tensor in (tokens, turns, plan.write, keep)),
            *(address(tensor, torch.float32) for tensor in (cosines, sines, logits)),
            None, ctypes.addressof(seconds), CTiles.of(plan.tiles), rows, kept, torch.get_num_threads(),
        )  # fmt: skip
        if len(self._space) < (needed := self._space_for(byref(self._model), byref(batch))):
            self._space = torch.empty(needed, dtype=torch.float32)
        batch.space = self._space.data_ptr()
        self._forward(byref(self._model), byref(batch))
        counted({"linear": seconds[0], "attention": seconds[1]})
        return logits

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(turns, head_dim) cosines and sines, and which of them each row takes: kept by position, where they depend on
        nothing else."""
        if any(kind in self._rotary.rope_type for kind in _BY_LENGTH):
            return *self._angles(positions), torch.arange(positions.shape[1])
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

    def _matrix(self, layers: Sequence[nn.Linear], interleaved: bool = False) -> _Matrix:
        weight = _joined([layer.weight.detach() for layer in layers], interleaved)
        matrix = _Matrix(inputs=weight.shape[1], outputs=weight.shape[0])
        if layers[0].bias is not None:
            matrix.bias = self._numbers(_joined([layer.bias.detach() for layer in layers], interleaved))
        if self.weights in ("int8", "int8-dynamic"):
            whole, scales = quantized(weight)
            strips = _strips(whole, 2 if self.weights == "int8" else 4, scales)
        else:
            strips = _strips(weight.to(getattr(torch, self.weights)), 2 if self.weights == "bfloat16" else 1)
        self._held.append(strips)
        matrix.strips = strips.data_ptr()
        return matrix


def native_forward(
    model: Any, keys: Sequence[Tensor], values: Sequence[Tensor], quantize: Quantization | None = None
) -> NativeForward | None:
    """The forward in C for a model and its stores of keys and values; None where the model has to do it itself.

    Raises OptionError for a quantization that is not known, or can't be had here.
    """
    if quantize is not None and quantize not in get_args(Quantization):
        raise OptionError(unknown("quantization", str(quantize), get_args(Quantization)))
    made = _made(model, keys, values, quantize)
    if quantize is not None and made is None:
        raise OptionError(
            f"quantize={quantize} needs a model of the families {', '.join(_FAMILIES)} whose layers' inputs are "
            f"multiples of {_GROUP}, a CPU with AVX-512 VNNI, a C compiler, and memory for a copy of the weights: "
            "leave it out"
        )
    return made


def _made(
    model: Any, keys: Sequence[Tensor], values: Sequence[Tensor], quantize: Quantization | None
) -> NativeForward | None:
    if not _known(model):
        return None
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    head_dim, groups = keys[0].shape[2], model.model.layers[0].self_attn.num_key_value_groups
    options = kernel_options(head_dim, groups, model.dtype, model.device)
    if options is None:
        return None
    kinds: list[Weights]
    if quantize is not None:
        if any(layer.in_features % _GROUP for layer in linears) or "avx512_vnni" not in processor_flags():
            return None
        kinds = [quantize] if model.dtype == torch.float32 else [quantize, "bfloat16"]
    elif all(bool((layer.weight == layer.weight.bfloat16()).all()) for layer in linears):
        kinds = ["bfloat16"]
    else:
        kinds = ["float32"]
    size = sum(layer.weight.numel() for layer in linears) * sum(BYTES[kind] for kind in kinds)
    if size * _SPARE > psutil.virtual_memory().available:
        return None
    with ThreadPoolExecutor(len(kinds)) as pool:  # they may have to be compiled: meanwhile weights are packed
        compiled = [pool.submit(library, "attention forward", *options, *_COMPILED[kind]) for kind in kinds]
        made = [NativeForward(model, keys, values, kind) for kind in kinds]
    for forward, functions in zip(made, compiled, strict=True):
        found = functions.result()
        if found is None or not (
            sizes_agree(found, "attention_sizes", SIZES)
            and sizes_agree(found, "forward_sizes", [sizeof(kind) for kind in (_Matrix, _Layer, _Model, _Batch)])
        ):
            return None
        forward.use(found)
    made[0].many = made[1] if len(made) > 1 else None
    return made[0]


def _known(model: Any) -> bool:
    """Whether forward.c does what this model does."""
    config = model.config
    if config.model_type not in _FAMILIES or config.hidden_act != "silu":
        return False
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    plain = all(type(module) is nn.Linear and "forward" not in vars(module) for module in linears)
    table, here = model.model.embed_tokens.weight, all(weight.device.type == "cpu" for weight in model.parameters())
    plain = plain and here and table.dtype == model.dtype and table.is_contiguous()
    return plain and config.hidden_size % _LINE == 0 and config.intermediate_size % _LINE == 0


def _joined(tensors: Sequence[Tensor], interleaved: bool) -> Tensor:
    """One below the other; or interleaved, a line of each in turn."""
    if not interleaved:
        return torch.cat(list(tensors))
    return torch.stack([tensor.reshape(-1, _LINE, *tensor.shape[1:]) for tensor in tensors], dim=1).flatten(0, 2)


def _strips(weight: Tensor, joined: int, scales: Tensor | None = None) -> Tensor:
    """(outputs, inputs) -> (strips, inputs / joined, 2, 16, joined), outputs padded with zeros. With scales (outputs,
    groups, 2): bytes (strips, groups, ...), of each group such lines and then (2, 2, 16) float32."""
    missing = -weight.shape[0] % (2 * _LINE)
    weight = nn.functional.pad(weight, (0, 0, 0, missing))
    cut = weight.reshape(-1, 2, _LINE, weight.shape[1] // joined, joined).permute(0, 3, 1, 2, 4)
    if scales is None:
        return cut.contiguous()
    scales = nn.functional.pad(scales, (0, 0, 0, 0, 0, missing)).reshape(len(cut), 2, _LINE, -1, 2)
    beside = scales.permute(0, 3, 1, 4, 2).contiguous().flatten(2).view(torch.uint8)
    return torch.cat([cut.reshape(len(cut), beside.shape[1], -1), beside], dim=2)


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight (outputs, inputs) as whole numbers from 0 to 255, and (outputs, groups, 2) steps and least weights.

    A weight is least + number * step of its output and group of inputs, whose least weight is 0 and whose largest 255.
    What was in four bits with a least and a step for each such group before (Q4_1) is met exactly.
    """
    groups = weight.float().reshape(len(weight), -1, _GROUP)
    least, most = groups.amin(-1), groups.amax(-1)
    step = (most - least) / 255
    whole = ((groups - least[..., None]) / step.clamp_min(1e-30)[..., None]).round().to(torch.uint8)
    return whole.flatten(1), torch.stack([step, least], -1)
