"""Grids of GGUF's K-quants: blocks of 256 elements whose scales are codes themselves."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from polysilicon.weights.encodings import Float32, SuperScaled, pack_codes
from polysilicon.weights.rtn import (
    Grid,
    error_weights,
    in_dtype,
    reciprocal,
    row_chunks,
    search_affine,
    search_symmetric,
)

BLOCK = 256

_AFFINE_GROUP = 32
_SYMMETRIC_GROUP = 16


def fit_affine_blocks(weight: Float32, importance: Float32 | None, *, bits: int) -> Grid:
    """Q4_K and Q5_K: groups of 32, scales and minimums of 6 bits under two f16 a block.

    The minimum is subtracted and never negative, so that a group's values begin at or below 0.
    """
    count = weight.shape[1] // _AFFINE_GROUP
    shape = (len(weight), count // 8, 8)
    scale, bias = np.empty(shape, np.float32), np.empty(shape, np.float32)
    for rows in row_chunks(weight):
        groups = weight[rows].reshape(-1, count, _AFFINE_GROUP)
        found = search_affine(groups, error_weights(groups, importance), bits, from_zero=True)
        scale[rows], bias[rows] = (part.reshape(-1, *shape[1:]) for part in found)
    return Grid(
        bits=bits,
        group=_AFFINE_GROUP,
        scale=_super_scaled(np.maximum(scale, 0), 6, 0, 63),
        bias=_negative(_super_scaled(np.maximum(-bias, 0), 6, 0, 63)),
    )


def fit_symmetric_blocks(weight: Float32, importance: Float32 | None) -> Grid:
    """Q6_K: groups of 16 around 0, signed scales of 8 bits under one f16 a block."""
    count = weight.shape[1] // _SYMMETRIC_GROUP
    scale = np.empty((len(weight), count // 16, 16), np.float32)
    for rows in row_chunks(weight):
        groups = weight[rows].reshape(-1, count, _SYMMETRIC_GROUP)
        found = search_symmetric(
            groups, error_weights(groups, importance), np.float32(32), signed=True
        )
        scale[rows] = found.reshape(-1, *scale.shape[1:])
    return Grid(
        bits=6,
        group=_SYMMETRIC_GROUP,
        scale=_super_scaled(scale, 8, 128, 127),
        offset=32,
    )


def _super_scaled(values: Float32, bits: int, offset: int, largest: int) -> SuperScaled:
    """Scales `[N, B, G]` of B blocks as codes under one f16 a block, the largest at `largest`."""
    peak = np.take_along_axis(values, np.abs(values).argmax(axis=-1, keepdims=True), axis=-1)
    unit: npt.NDArray[np.float16] = in_dtype(np.float16, peak[..., 0] / np.float32(largest))
    codes = np.rint(values * reciprocal(unit.astype(np.float32))[..., None])
    codes = np.clip(codes, -offset, (1 << bits) - 1 - offset) + offset
    rows, blocks, groups = values.shape
    return SuperScaled(
        codes=pack_codes(codes.astype(np.uint8).reshape(rows, blocks * groups), bits),
        bits=bits,
        offset=offset,
        count=blocks * groups,
        scale=unit,
        group=groups,
    )


def _negative(scales: SuperScaled) -> SuperScaled:
    return SuperScaled(
        codes=scales.codes,
        bits=scales.bits,
        offset=scales.offset,
        count=scales.count,
        scale=-scales.scale,
        group=scales.group,
    )
