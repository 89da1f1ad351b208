"""The tiny Llama as mlx-lm stores it."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

from .checkpoints import Case, Float32, Module, Rng, packed, rounded_to_nearest

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FP4 = np.concatenate([E2M1, -E2M1])
LAST = "model.layers.1.mlp.down_proj"
FIRST = "model.layers.0.mlp.gate_proj"


def affine(weight: Float32, bits: int, group: int, dtype: Any) -> Module:
    codes, scale, zero = rounded_to_nearest(weight, bits, group, symmetric=False, dtype=dtype)
    bias = (-scale.astype(np.float32) * zero).astype(dtype)
    step, shift = (np.repeat(part.astype(np.float64), group, axis=-1) for part in (scale, bias))
    return Module(
        stored={"weight": packed(codes, bits).view("<u4"), "scales": scale, "biases": bias},
        values=(step * codes + shift).astype(np.float32),
    )


def scale_values(codes: np.ndarray, mode: str) -> np.ndarray:
    """What bytes of scales stand for: E8M0 in the mx modes, E4M3 in nvfp4."""
    if mode != "nvfp4":
        return 2.0 ** (codes.astype(np.float64) - 127)
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def floating(weight: Float32, mode: str) -> Module:
    bits, group = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}[mode]
    table = FP4 if bits == 4 else np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    table = table.astype(np.float64)
    finite = np.flatnonzero(np.isfinite(table))
    groups = weight.reshape(len(weight), -1, group).astype(np.float64)
    wanted = np.abs(groups).max(-1) / np.abs(table[finite]).max()
    if mode == "nvfp4":
        scales = wanted.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    else:
        scales = (np.ceil(np.log2(wanted)) + 127).clip(0, 254).astype(np.uint8)
    step = scale_values(scales, mode)[..., None]
    codes = finite[np.abs(groups[..., None] / step[..., None] - table[finite]).argmin(-1)]
    values = (step * table[codes]).astype(np.float32).reshape(weight.shape)
    return Module(
        stored={
            "weight": packed(codes.reshape(weight.shape), bits).view("<u4"),
            "scales": scales,
        },
        values=values,
    )


def quantize(
    rng: Rng, name: str, weight: Float32, *, mode: str, bits: int, group: int, dtype: Any
) -> Module | None:
    """Embeddings and head too; one module is left alone, and one has parameters of its own."""
    if name == LAST:
        return None
    if name == FIRST:
        return affine(weight, 6, 32, np.float16)
    return affine(weight, bits, group, dtype) if mode == "affine" else floating(weight, mode)


def case(mode: str, bits: int, group: int, dtype: Any = np.float16) -> Case:
    own = {} if mode == "affine" else {"mode": mode}
    settings = {
        "group_size": group,
        "bits": bits,
        **own,
        LAST: False,
        FIRST: {"group_size": 32, "bits": 6},
    }
    return Case(
        name=f"mlx-{mode}-{bits}-{group}",
        config={"quantization": settings, "quantization_config": settings},
        quantize=functools.partial(quantize, mode=mode, bits=bits, group=group, dtype=dtype),
        type=f"mlx:{bits if mode == 'affine' else mode}",
        # Scales and biases of 16 bits are exact; their sum is rounded where exponents differ.
        ulps=2,
    )


CASES = [
    case("affine", 2, 32),
    case("affine", 3, 32, ml_dtypes.bfloat16),
    case("affine", 4, 32, ml_dtypes.bfloat16),
    case("affine", 5, 32),
    case("affine", 6, 32, np.float32),
    case("affine", 8, 32),
    case("mxfp4", 4, 32),
    case("mxfp8", 8, 32),
    case("nvfp4", 4, 16),
]
