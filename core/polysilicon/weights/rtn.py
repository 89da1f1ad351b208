"""Round to nearest: the grid that the values of each group may take, and codes on it.

A grid is chosen before anything is rounded, so that every rounding method (nearest, GPTQ) works
with every format.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from polysilicon.weights.encodings import (
    DENSE_DTYPES,
    Float32,
    GroupAffine,
    GroupFloat,
    Scales,
    pack_codes,
    scale_values,
)

Codes = npt.NDArray[np.uint8]

_CHUNK_ELEMENTS = 1 << 17
_TINY = np.float32(1e-30)
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_LARGEST_E4M3 = np.float32(448)
_LARGEST = {
    DENSE_DTYPES["f32"]: 3.4028234e38,
    DENSE_DTYPES["f16"]: 65504.0,
    DENSE_DTYPES["bf16"]: 3.3895314e38,
}

# How far a search of scales stretches (below 1) and clips (above 1) the range of a group.
_STRETCHES = np.linspace(0.85, 1.35, 11, dtype=np.float32)
# From this width on, the range itself is as good as any search.
_WIDE_BITS = 8


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """The values that the elements of each group of a matrix `[N, K]` may take.

    They are `scale[n, g] * (code - offset) + bias[n, g]`, codes below `2**bits`; the fields mean
    what they mean in `GroupAffine`, and are already in the precision in which they are stored.
    """

    bits: int
    group: int
    scale: Scales
    offset: int = 0
    bias: Scales | None = None

    @property
    def levels(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    def steps(self) -> tuple[Float32, Float32]:
        """The distance between two values, and the value of code 0: float32 `[N, G]` each."""
        scale = scale_values(self.scale)
        origin = scale * np.float32(-self.offset)
        return scale, origin if self.bias is None else origin + scale_values(self.bias)

    def nearest(self, weight: Float32) -> Codes:
        """The code of the nearest value: float32 `[N, K]` to uint8 `[N, K]`."""
        scale, origin = self.steps()
        inverse = reciprocal(scale)
        codes = np.empty(weight.shape, np.uint8)
        for rows in row_chunks(weight):
            groups = _grouped(weight[rows], self.group) - origin[rows, :, None]
            groups *= inverse[rows, :, None]
            codes[rows] = _rounded(groups, self.levels).reshape(codes[rows].shape)
        return codes

    def weight(self, codes: Codes) -> GroupAffine:
        """The matrix of these codes, uint8 `[N, K]`."""
        return GroupAffine(
            shape=codes.shape,
            bits=self.bits,
            group=self.group,
            codes=pack_codes(codes, self.bits),
            scale=self.scale,
            offset=self.offset,
            bias=self.bias,
        )


Fit = Callable[[Float32, Float32 | None], Grid]
"""Chooses a grid for a matrix `[N, K]`; the second argument is the importance of each of its K
columns, as `error_weights` takes it."""


def quantize_affine(weight: Float32, *, bits: int, group: int) -> GroupAffine:
    """Asymmetric round-to-nearest over the range of each group, scales and biases in f16.

    weight: finite float32 `[N, K]`; `group` divides K. Values beyond f16's range saturate.
    """
    shape = (len(weight), weight.shape[1] // group)
    scale, bias = np.empty(shape, np.float16), np.empty(shape, np.float16)
    for rows in row_chunks(weight):
        groups = _grouped(weight[rows], group)
        low, high = groups.min(axis=-1), groups.max(axis=-1)
        scale[rows] = in_dtype(np.float16, (high - low) / np.float32((1 << bits) - 1))
        bias[rows] = in_dtype(np.float16, low)
    grid = Grid(bits=bits, group=group, scale=scale, bias=bias)
    return grid.weight(grid.nearest(weight))


def quantize_symmetric(weight: Float32, *, bits: int, group: int) -> GroupAffine:
    """Symmetric round-to-nearest, scales in f16; the codes `offset` away from 0 stay unused."""
    grid = fit_symmetric(weight, None, bits=bits, group=group, dtype="f16", search=False)
    return grid.weight(grid.nearest(weight))


def quantize_float8(weight: Float32) -> GroupFloat:
    """fp8 e4m3 with one float32 scale a row, the largest value of a row at the largest code."""
    largest = np.abs(weight).max(axis=1, keepdims=True)
    scale = np.maximum(largest / _LARGEST_E4M3, _TINY)
    codes = np.empty(weight.shape, np.uint8)
    for rows in row_chunks(weight):
        scaled = np.clip(weight[rows] / scale[rows], -_LARGEST_E4M3, _LARGEST_E4M3)
        codes[rows] = scaled.astype(_E4M3).view(np.uint8)
    return GroupFloat(
        shape=weight.shape, format="f8_e4m3", group=weight.shape[1], codes=codes, scale=scale
    )


def fit_symmetric(
    weight: Float32,
    importance: Float32 | None,
    *,
    bits: int,
    group: int,
    dtype: str,
    search: bool = True,
    signed: bool = False,
) -> Grid:
    """A grid around 0: `scale * (code - 2**(bits - 1))`.

    importance: as in `error_weights`. dtype: of the scales, a key of `DENSE_DTYPES`. search: the
    scale of the least squared error among several stretches of the range, instead of the range.
    signed: scales may be negative, which gives the one code more that the negative side has to the
    side of the largest value.
    """
    half = np.float32(1 << (bits - 1))
    scale = np.empty((len(weight), weight.shape[1] // group), DENSE_DTYPES[dtype])
    for rows in row_chunks(weight):
        groups = _grouped(weight[rows], group)
        if search and bits < _WIDE_BITS:
            found = search_symmetric(groups, error_weights(groups, importance), half, signed)
        else:
            found = np.abs(groups).max(axis=-1) / (half - 1)
        scale[rows] = in_dtype(DENSE_DTYPES[dtype], found)
    return Grid(bits=bits, group=group, scale=scale, offset=1 << (bits - 1))


def error_weights(groups: Float32, importance: Float32 | None) -> Float32:
    """Weights of the squared errors of elements `[N, G, g]`, by which a search weighs them.

    Errors of large elements count for more, as outputs hang on them more than on the others: a
    weight is x^2, and the group's mean of that. With equal weights clipping wins too often (the
    perplexity of a 135M model in 4 bits and groups of 64 is about 1.5 % higher). importance:
    float32 `[K]`, how much each column counts beside that; None for equally.
    """
    squares = groups * groups
    weights: Float32 = squares + squares.mean(axis=-1, keepdims=True) + _TINY
    return weights if importance is None else weights * _grouped(importance, groups.shape[-1])


def search_symmetric(groups: Float32, weights: Float32, half: np.float32, signed: bool) -> Float32:
    """The scale of each group `[..., g]` whose least-squares fit leaves the smallest error.

    weights: of the squared errors, broadcastable to `groups`. half: codes run from -half to
    half - 1. signed: as in `fit_symmetric`.
    """
    largest = np.abs(groups).max(axis=-1)
    if signed:
        place = np.abs(groups).argmax(axis=-1, keepdims=True)
        unit = reciprocal(-np.take_along_axis(groups, place, axis=-1)[..., 0]) * half
    else:
        unit = reciprocal(largest) * (half - np.float32(0.5))
    weighted = groups * weights
    best = np.full(largest.shape, -1, np.float32)
    scale: Float32 = np.zeros_like(largest)
    for stretch in _STRETCHES:
        codes = np.rint(groups * (unit * stretch)[..., None])
        np.clip(codes, -half, half - 1, out=codes)
        product = _dot(weighted, codes)
        square = _dot(codes * weights, codes)
        # The least-squares scale p / s leaves an error of sum(w x^2) - p^2 / s.
        fitted = product / np.maximum(square, _TINY)
        gain = product * fitted
        better = gain > best
        np.copyto(best, gain, where=better)
        np.copyto(scale, fitted, where=better)
    return scale


def fit_zero_point(
    weight: Float32, importance: Float32 | None, *, bits: int, group: int, dtype: str
) -> Grid:
    """A grid `scale * (code - zero)` with an integer zero in `[0, 2**bits)`, one a group.

    It is held as a bias of `-scale * zero`, float32, which is exact; `zero_points` reads it back.
    """
    levels = np.float32((1 << bits) - 1)
    shape = (len(weight), weight.shape[1] // group)
    scale, bias = np.empty(shape, DENSE_DTYPES[dtype]), np.empty(shape, np.float32)
    for rows in row_chunks(weight):
        groups = _grouped(weight[rows], group)
        # Zero itself must be among the values.
        low, high = np.minimum(groups.min(axis=-1), 0), np.maximum(groups.max(axis=-1), 0)
        weights = error_weights(groups, importance)
        found, zero = _search_zero_point(groups, weights, low, high, levels)
        stored = in_dtype(DENSE_DTYPES[dtype], found)
        scale[rows] = stored
        bias[rows] = -(stored.astype(np.float32) * zero)
    return Grid(bits=bits, group=group, scale=scale, bias=bias)


def _search_zero_point(
    groups: Float32, weights: Float32, low: Float32, high: Float32, levels: np.float32
) -> tuple[Float32, Float32]:
    unit = reciprocal(high - low) * levels
    weighted = groups * weights
    best = np.full(low.shape, -1, np.float32)
    scale, zero = np.zeros_like(low), np.zeros_like(low)
    for stretch in (np.float32(1), *(_STRETCHES if levels < 255 else ())):
        inverse = unit * stretch
        # Clipping takes as much from both ends, but for what rounding the zero moves.
        centred = np.floor(levels / 2 - (low + high) / 2 * inverse)
        for middle in (np.clip(centred, 0, levels), np.clip(centred + 1, 0, levels)):
            codes = np.rint(groups * inverse[..., None])
            np.clip(codes, -middle[..., None], (levels - middle)[..., None], out=codes)
            product = _dot(weighted, codes)
            fitted = product / np.maximum(_dot(codes * weights, codes), _TINY)
            gain = product * fitted
            better = gain > best
            for target, value in ((best, gain), (scale, fitted), (zero, middle)):
                np.copyto(target, value, where=better)
    return scale, zero


def zero_points(grid_or_weight: Grid | GroupAffine) -> Codes:
    """The integer zeros of what `fit_zero_point` made, uint8 `[N, G]`; `offset` where there is no
    bias."""
    scale = scale_values(grid_or_weight.scale)
    if grid_or_weight.bias is None:
        return np.full(scale.shape, grid_or_weight.offset, np.uint8)
    bias = scale_values(grid_or_weight.bias)
    zeros = np.rint(-bias * reciprocal(scale)) + grid_or_weight.offset
    assert 0 <= zeros.min(initial=0) <= zeros.max(initial=0) < 1 << grid_or_weight.bits
    result: Codes = zeros.astype(np.uint8)
    return result


def fit_affine(
    weight: Float32, importance: Float32 | None, *, bits: int, group: int, dtype: str
) -> Grid:
    """A grid `scale * code + bias` that has 0 among its values, but for the rounding of the bias.

    A bias that is free leaves a smaller error of the weights, and yet a perplexity that is 3 %
    higher on the same model: that small weights stay small is worth more.
    """
    grid = fit_zero_point(weight, importance, bits=bits, group=group, dtype=dtype)
    assert isinstance(grid.bias, np.ndarray)
    return dataclasses.replace(grid, bias=in_dtype(DENSE_DTYPES[dtype], grid.bias))


def search_affine(
    groups: Float32, weights: Float32, bits: int, *, from_zero: bool = False
) -> tuple[Float32, Float32]:
    """Scale and bias of each group `[..., g]` whose least-squares fit leaves the smallest error.

    weights: of the squared errors, broadcastable to `groups`. from_zero: the bias is at most 0, as
    formats that store a minimum to subtract need it.
    """
    levels = np.float32((1 << bits) - 1)
    shift = np.zeros(groups.shape[:-1], np.float32) if from_zero else groups.min(axis=-1)
    groups = groups - shift[..., None]
    low, high = np.minimum(groups.min(axis=-1), 0), groups.max(axis=-1)
    unit = reciprocal(high - low) * levels
    weighted = groups * weights
    mass = weights.sum(axis=-1)
    total = weighted.sum(axis=-1)
    best = np.full(low.shape, np.inf, np.float32)
    scale, bias = np.zeros_like(low), np.zeros_like(low)
    for stretch in (np.float32(1), *(_STRETCHES if bits < _WIDE_BITS else ())):
        inverse = unit * stretch
        start = levels / 2 - (low + high) / 2 * inverse
        codes = np.rint(groups * inverse[..., None] + start[..., None])
        np.clip(codes, 0, levels, out=codes)
        product = _dot(weighted, codes)
        in_codes = codes * weights
        first, second = in_codes.sum(axis=-1), _dot(in_codes, codes)
        # Normal equations of x = s q + b, weighted.
        determinant = mass * second - first * first
        s = (mass * product - first * total) / np.maximum(determinant, _TINY)
        b = (total - s * first) / np.maximum(mass, _TINY)
        degenerate = determinant <= 0
        if from_zero:
            alone = product / np.maximum(second, _TINY)
            above = (b > 0) | degenerate
            s, b = np.where(above, alone, s), np.where(above, np.float32(0), b)
        else:
            s, b = np.where(degenerate, np.float32(0), s), np.where(degenerate, low, b)
        # Up to sum(w x^2), which is the same for all.
        error = s * s * second + 2 * s * b * first + b * b * mass - 2 * (s * product + b * total)
        better = error < best
        for target, value in ((best, error), (scale, s), (bias, b)):
            np.copyto(target, value, where=better)
    return scale, bias + shift


def row_chunks(weight: Float32) -> Iterator[slice]:
    """The rows of a matrix in chunks whose temporaries stay in the processor's cache."""
    step = max(1, _CHUNK_ELEMENTS // weight.shape[1])
    for start in range(0, len(weight), step):
        yield slice(start, start + step)


def _grouped(values: Float32, group: int) -> Float32:
    return values.reshape(*values.shape[:-1], values.shape[-1] // group, group)


def _rounded(values: Float32, levels: int) -> Codes:
    np.rint(values, out=values)
    np.clip(values, 0, levels, out=values)
    return values.astype(np.uint8)


def reciprocal(values: Float32) -> Float32:
    """`1 / values`, and 0 where that is too large for float32."""
    usable = np.abs(values) > _TINY
    result: Float32 = np.where(usable, 1 / np.where(usable, values, np.float32(1)), np.float32(0))
    return result


def _dot(a: Float32, b: Float32) -> Float32:
    result: Float32 = np.einsum("...g,...g->...", a, b)
    return result


def in_dtype(dtype: npt.DTypeLike, values: Float32) -> npt.NDArray[np.floating[Any]]:
    """Values in a 16-bit dtype, saturated where they are beyond its range."""
    largest = np.float32(_LARGEST[np.dtype(dtype)])
    result: npt.NDArray[np.floating[Any]] = np.clip(values, -largest, largest).astype(dtype)
    return result
