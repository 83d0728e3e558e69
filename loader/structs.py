"""Structs: what native calls take and give by address; ``csrc/host/api.cpp`` mirrors them."""

from __future__ import annotations

import ctypes

import torch


class Error(ctypes.Structure):
    """What a call refused, or which read failed."""

    _fields_ = [
        ("subject", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("wanted", ctypes.c_int64),
        ("got", ctypes.c_int64),
        ("error", ctypes.c_int64),
        ("what", ctypes.c_char * 128),
    ]


class Moe(ctypes.Structure):
    """One step of a MoE layer."""

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in (
                "tokens",
                "top_k",
                "experts",
                "dtype",
                "weight_dtype",
                "ids_are_64",
                "scratch_bytes",
            )
        ),
        *(
            (name, ctypes.c_void_p)
            for name in ("x", "ids", "weights", "expert_map", "out", "scratch")
        ),
    ]


class Linear(ctypes.Structure):
    """One step of a linear."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("tokens", "dtype", "bias_dtype", "scratch_bytes")),
        *((name, ctypes.c_void_p) for name in ("x", "bias", "out", "scratch")),
    ]


class CardLinear(ctypes.Structure):
    """One step of a linear on a card; ``LinearCall`` of csrc/launch/linear.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("tokens", "dtype", "family", "x_bytes", "out_bytes")),
        *((name, ctypes.c_void_p) for name in ("x", "out")),
    ]


FLOATS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
"""Float of ``csrc/host/activations.h``."""
