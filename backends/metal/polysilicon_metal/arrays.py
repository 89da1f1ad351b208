"""Arrays between numpy and MLX, and the sizes that a step's arrays are padded to."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)

DTYPES = {
    "f32": mx.float32,
    "f16": mx.float16,
    "bf16": mx.bfloat16,
    "int8": mx.int8,
    "fp8_e4m3": mx.uint8,
}
"""MLX dtypes by the contract's names. It has none of 8-bit floats, whose codes are uint8."""


def to_device(array: Array) -> mx.array:
    """A copy of a numpy array, bfloat16 and float8 of ml_dtypes included."""
    if array.dtype == BFLOAT16:
        return mx.array(np.ascontiguousarray(array).view(np.uint16)).view(mx.bfloat16)
    if array.dtype == FLOAT8:
        return mx.array(array.view(np.uint8))
    return mx.array(array)


def to_host(array: mx.array) -> Array:
    """A copy of an MLX array, evaluated where it is not yet."""
    if array.dtype == mx.bfloat16:
        return np.array(array.view(mx.uint16)).view(BFLOAT16)
    return np.array(array)


def bucket(count: int) -> int:
    """The least power of two that is at least `count`, and at least one."""
    return 1 << max(0, count - 1).bit_length()


def fine_bucket(count: int) -> int:
    """As `bucket`, with three quarters of every power from 32 on: for what costs by its size."""
    size = bucket(count)
    return size * 3 // 4 if size >= 32 and size * 3 // 4 >= count else size


def padded(array: Array, size: int, fill: int = 0) -> Array:
    """The array with its first axis filled up to `size`."""
    result = np.full((size, *array.shape[1:]), fill, array.dtype)
    result[: len(array)] = array
    return result
