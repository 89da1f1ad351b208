"""The tiny Llama as transformers saves it with HQQ."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

from .checkpoints import Array, Case, Codes, Float32, Module, Rng, is_linear

PACKED = {8: ("8bit_u8", 1), 6: ("8bit_u8", 1), 5: ("8bit_u8", 1), 4: ("4bit_u8", 2)}
PACKED |= {3: ("3bit_32", 10), 2: ("2bit_u8", 4), 1: ("1bit_u8", 8)}
"""By bits: the packing's name, and codes of a word."""


def text(value: str) -> Array:
    return np.frombuffer(value.encode(), np.uint8)


def number(value: int, dtype: Any = np.int32) -> Array:
    return np.array(value, dtype)


def packed_rows(codes: Codes, bits: int) -> Array:
    """Codes `[R, C]` in words `[R / count, C]`: word r has rows r, r + R / count, ... from its
    highest bits down."""
    name, count = PACKED[bits]
    width = {"8bit_u8": 8}.get(name, bits)
    rows = -(-len(codes) // count)
    padded = np.pad(codes.astype(np.int64), ((0, rows * count - len(codes)), (0, 0)))
    words = sum(
        padded[part * rows : (part + 1) * rows] << (width * (count - 1 - part))
        for part in range(count)
    )
    assert isinstance(words, np.ndarray)
    return words.astype(np.int32 if bits == 3 else np.uint8)


def quantize(
    rng: Rng,
    name: str,
    weight: Float32,
    *,
    bits: int,
    group: int,
    axis: int,
    dtype: Any,
    view: bool,
) -> Module | None:
    if not is_linear(name):
        return None
    frame = weight.reshape((-1, group) if axis else (group, -1)).astype(np.float64)
    low, high = frame.min(axis, keepdims=True), frame.max(axis, keepdims=True)
    top = (1 << bits) - 1
    if bits == 1:
        # Two levels at the ends would make weights of twice the model's size.
        low, high = low / 2, high / 2
    scale = ((high - low) / top).astype(dtype)
    zero = (-low / scale.astype(np.float64)).astype(dtype)
    step, middle = (part.astype(np.float64) for part in (scale, zero))
    codes = np.round(frame / step + middle).clip(0, top).astype(np.uint8)
    if axis:
        values = (codes - middle) * step
    else:
        values = ((codes.astype(dtype) - zero) * scale).astype(np.float64)
    words = packed_rows(codes, bits)
    compute = {"float16": "float16", "bfloat16": "bfloat16"}[np.dtype(dtype).name]
    stored = {
        "W_q": words.view(dtype) if view else words,
        "scale": scale,
        "zero": zero,
        "nbits": number(bits),
        "group_size": number(group),
        "shape": np.array(weight.shape, np.int64),
        "axis": number(axis),
        "packing": text(PACKED[bits][0]),
        "unpack_view_dtype": text("torch.int32" if bits == 3 else "torch.uint8"),
        "view_as_float": number(view, np.uint8),
        "quant_scale": number(0, np.uint8),
        "quant_zero": number(0, np.uint8),
        "compute_dtype": text(f"torch.{compute}"),
        "offload_meta": number(0, np.uint8),
        "encoded_state_dict": number(1, np.uint8),
        "stores_quant_config": number(1, np.uint8),
        "channel_wise": number(1, np.uint8),
        "optimize": number(1, np.uint8),
        "round_zero": number(bits == 4, np.uint8),
    }
    return Module(stored=stored, values=values.astype(np.float32).reshape(weight.shape))


def case(
    bits: int, group: int, *, axis: int = 1, dtype: Any = np.float16, view: bool = False
) -> Case:
    return Case(
        name=f"hqq-{bits}-{group}-axis{axis}",
        config={
            "quantization_config": {
                "quant_method": "hqq",
                "quant_config": {
                    "weight_quant_params": {"nbits": bits, "group_size": group, "axis": axis}
                },
                "skip_modules": ["lm_head"],
            }
        },
        quantize=functools.partial(
            quantize, bits=bits, group=group, axis=axis, dtype=dtype, view=view
        ),
        type=f"hqq:{bits}" if axis else "hqq:axis0",
        # The product with a zero point that is no integer is rounded, and the sum.
        ulps=2 if axis else 0,
    )


CASES = [
    case(8, 64),
    case(6, 32),
    case(5, 64, dtype=ml_dtypes.bfloat16),
    case(4, 64, view=True),
    case(4, 32, dtype=ml_dtypes.bfloat16),
    case(3, 64),
    case(2, 16),
    case(1, 32),
    case(4, 64, axis=0),
    case(3, 32, axis=0, dtype=ml_dtypes.bfloat16),
]
