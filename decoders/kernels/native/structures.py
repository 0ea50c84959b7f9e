"""The structs of forward.c, whose fields are in the same order."""

from __future__ import annotations

from ctypes import Structure, c_double, c_float, c_int32, c_int64, c_uint8, c_void_p, sizeof

from tot.decoders.kernels.native.tiles import CTiles

KINDS = 2
"""Maximum number of kinds of windows, and of rotary embeddings: KINDS in forward.c."""


class Matrix(Structure):
    """The struct Matrix."""

    _fields_ = [
        *((name, c_void_p) for name in ("strips", "bias")),
        *((name, c_int64) for name in ("inputs", "outputs", "bits", "group")),
        *((name, c_double) for name in ("unit", "zero_point")),
        ("largest", c_int64),
        ("codebook", c_uint8 * 16),
    ]


class Layer(Structure):
    """The struct Layer."""

    _fields_ = [
        *((name, Matrix) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("norm_in", "norm_mlp", "norm_attended", "norm_done", "norm_query", "norm_key")),
        *((name, c_void_p) for name in ("sinks", "router", "router_bias", "keys", "values")),
        *((name, c_int64) for name in ("window", "rope")),
    ]


class Model(Structure):
    """The struct Model."""

    _fields_ = [
        ("layers", c_void_p),
        ("embedding", c_void_p),
        ("norm", c_void_p),
        ("head", Matrix),
        ("table", Matrix),
        *(
            (name, c_int64)
            for name in (
                *("layer_count", "hidden", "intermediate", "heads", "kv_heads"),
                *("kv_head_stride", "slot_stride", "rotary_dim"),
                *("activation", "experts", "chosen", "normalized"),
            )
        ),
        *((name, c_float) for name in ("epsilon", "scale", "attention_cap", "embedding_scale", "logit_cap")),
    ]


class Batch(Structure):
    """The struct Batch."""

    _fields_ = [
        *((name, c_void_p) for name in ("tokens", "rope_rows", "write", "keep")),
        *((name, c_void_p * KINDS) for name in ("cosines", "sines")),
        *((name, c_void_p) for name in ("logits", "scratch")),
        ("tiles", CTiles * KINDS),
        *((name, c_int64) for name in ("rows", "kept", "threads")),
        ("saturated", c_void_p),
    ]


SIZES = (6 * sizeof(c_int32), *map(sizeof, (CTiles, Matrix, Layer, Model, Batch)))
"""Bytes of the structs Piece, Tiles, Matrix, Layer, Model and Batch."""
