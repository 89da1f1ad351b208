"""Small floats made by the tests themselves: values from the definition of their bits."""

from __future__ import annotations

import numpy as np

from .checkpoints import Array, Codes, Float32


def values_of(exponent_bits: int, mantissa_bits: int) -> np.ndarray:
    """float64 by code: a sign, an exponent with the usual bias, a mantissa; subnormals below."""
    codes = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    exponent = codes >> mantissa_bits & ((1 << exponent_bits) - 1)
    fraction = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    bias = (1 << (exponent_bits - 1)) - 1
    size = np.where(
        exponent == 0,
        np.ldexp(fraction, 1 - bias),
        np.ldexp(1 + fraction, exponent - bias),
    )
    return np.where(codes >> (exponent_bits + mantissa_bits), -size, size)


E2M1 = values_of(2, 1)
E2M3 = values_of(2, 3)
E4M3 = values_of(4, 3)
E4M3[[0x7F, 0xFF]] = np.nan
E5M2 = values_of(5, 2)
E5M2[(np.arange(256) & 0x7C) == 0x7C] = np.nan

LARGEST = {"e2m1": 6.0, "e2m3": 7.5, "e4m3": 448.0, "e5m2": 57344.0}
TABLES = {"e2m1": E2M1, "e2m3": E2M3, "e4m3": E4M3, "e5m2": E5M2}


def nearest(values: Array, name: str) -> Codes:
    """Codes of the nearest values, one a byte."""
    table = TABLES[name]
    finite = np.flatnonzero(np.isfinite(table))
    ordered = finite[np.argsort(table[finite], kind="stable")]
    above = np.searchsorted(table[ordered], values).clip(1, len(ordered) - 1)
    low, high = ordered[above - 1], ordered[above]
    take_low = values - table[low] < table[high] - values
    return np.where(take_low, low, high).astype(np.uint8)


def scaled(codes: Codes, name: str, scale: Array) -> Float32:
    """`scale * value` in float64, rounded once; scale broadcasts over the elements."""
    return (TABLES[name][codes] * scale.astype(np.float64)).astype(np.float32)


def pairs(codes: Codes) -> Codes:
    """4-bit codes two a byte, the first in the lower half."""
    return codes[..., ::2] | codes[..., 1::2] << np.uint8(4)


def largest_of_groups(weight: Float32, group: int) -> Float32:
    """[N, K / group]"""
    return np.abs(weight.reshape(len(weight), -1, group)).max(-1)


def largest_of_blocks(weight: Float32, block: tuple[int, int]) -> Float32:
    """[ceil(N / rows), ceil(K / columns)]"""
    rows, columns = weight.shape
    padded = np.zeros((-(-rows // block[0]) * block[0], -(-columns // block[1]) * block[1]))
    padded[:rows, :columns] = np.abs(weight)
    tiles = padded.reshape(-1, block[0], padded.shape[1] // block[1], block[1])
    return tiles.max((1, 3)).astype(np.float32)


def over_blocks(scale: Array, block: tuple[int, int], shape: tuple[int, int]) -> Array:
    """Scales of blocks for every element, `[N, K]`."""
    rows = np.arange(shape[0])[:, None] // block[0]
    return scale[rows, np.arange(shape[1]) // block[1]]


def power_of_two_codes(scale: Array) -> Codes:
    """e8m0 codes of the powers of two at or below."""
    return (np.floor(np.log2(scale)) + 127).astype(np.uint8)


def quantized_blocks(
    weight: Float32, block: tuple[int, int], name: str = "e4m3"
) -> tuple[Codes, Float32, Float32]:
    """(codes, scales of blocks, values)."""
    scale = (largest_of_blocks(weight, block) / LARGEST[name]).astype(np.float32)
    spread = over_blocks(scale, block, weight.shape)
    codes = nearest(weight / spread, name)
    return codes, scale, scaled(codes, name, spread)


def quantized_nvfp4(weight: Float32, factor: float) -> tuple[Codes, Codes, Float32]:
    """(packed codes, e4m3 codes of scales, values): scales are rounded to float32 once."""
    scale = nearest(largest_of_groups(weight, 16) / 6 / factor, "e4m3")
    total = (E4M3[scale] * np.float64(np.float32(factor))).astype(np.float32)
    spread = np.repeat(total, 16, axis=1)
    codes = nearest(weight / np.maximum(spread, 1e-9), "e2m1")
    return pairs(codes), scale, scaled(codes, "e2m1", spread)


def quantized_mx(weight: Float32, name: str) -> tuple[Codes, Codes, Float32]:
    """(codes, e8m0 codes of scales of 32, values)."""
    exponents = power_of_two_codes(largest_of_groups(weight, 32) / (LARGEST[name] / 2))
    spread = np.repeat(2.0 ** (exponents.astype(np.float64) - 127), 32, axis=1)
    codes = nearest(weight / spread, name)
    return codes, exponents, scaled(codes, name, spread)
