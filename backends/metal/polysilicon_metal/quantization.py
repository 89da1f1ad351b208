"""From the canonical encodings to what MLX multiplies with, on the host and without a loss.

MLX's affine mode wants groups of 32, 64 or 128 inputs and 2 to 6 or 8 bits; its code words are the
canonical bit stream. What differs is brought to that exactly:

- a longer group repeats its scale, 7 bits become 8, and inputs are padded with zeros;
- groups of 16 come as `halves`: the scales of the even and of the odd groups, each for 32 inputs,
  so that a product is the sum of two, each with the other half's inputs at zero;
- an offset goes into the bias;
- fp4 under scales that neither MXFP4 nor NVFP4 has is affine: twice its values are whole numbers
  from -12 to 12, in 5 bits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from polysilicon.backend import (
    Dense,
    GroupAffine,
    GroupFloat,
    Weight,
    pack_codes,
    scale_values,
    unpack_codes,
)

Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]

GROUPS = (128, 64, 32)
_FP4_STEPS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8) + 12
_E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
"""The values of e4m3 that are not negative, by code."""

_ROUNDING = np.float32(2.0**-22)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """A matrix `[N, K]`, or a stack of them, as MLX's quantised products take it.

    codes: uint32 `[..., N, width * bits / 32]`. width: K, padded to a multiple of 32.
    scales, biases: float32 `[..., N, width / group]` each, two of both for `halves`; in the modes
    of floats scales are codes of 8 bits, and there are no biases.
    factor: on every value, None for 1.
    order: `GroupAffine.input_order`.
    """

    inputs: int
    width: int
    bits: int
    group: int
    mode: str
    codes: npt.NDArray[np.uint32]
    scales: tuple[npt.NDArray[Any], ...]
    biases: tuple[Float32, ...] = ()
    factor: float | None = None
    order: npt.NDArray[np.int32] | None = None

    def fits(self, other: Packed) -> bool:
        """Whether both can be one matrix."""
        same = ("inputs", "width", "bits", "group", "mode", "factor")
        return (
            self.order is None
            and other.order is None
            and len(self.scales) == len(other.scales)
            and all(getattr(self, name) == getattr(other, name) for name in same)
        )


def fuse(parts: list[Packed]) -> Packed:
    """Parts that fit each other, one below the other."""
    if len(parts) == 1:
        return parts[0]

    def stacked(name: str) -> tuple[npt.NDArray[Any], ...]:
        columns = zip(*(getattr(part, name) for part in parts), strict=True)
        return tuple(np.concatenate(arrays, axis=-2) for arrays in columns)

    return dataclasses.replace(
        parts[0],
        codes=np.concatenate([part.codes for part in parts], axis=-2),
        scales=stacked("scales"),
        biases=stacked("biases"),
    )


def pack(weight: Weight) -> Packed | None:
    """A quantised weight for MLX, or None where it has to be expanded."""
    if isinstance(weight, GroupAffine):
        return _pack_affine(weight)
    if isinstance(weight, GroupFloat) and weight.block is None:
        return _pack_float(weight)
    return None


def cut_columns(weight: Weight, begin: int, end: int) -> Weight:
    """Inputs `[begin, end)` of a matrix or a stack."""
    columns = weight.shape[-1]
    if (begin, end) == (0, columns):
        return weight
    if (
        not isinstance(weight, GroupAffine | GroupFloat)
        or weight.input_order is not None
        or (isinstance(weight, GroupFloat) and weight.block is not None)
        or begin % weight.group
        or end % weight.group
    ):
        return Dense(array=np.ascontiguousarray(weight.dequantize()[..., begin:end]))
    codes = unpack_codes(weight.codes, weight.bits, columns)[..., begin:end]
    groups = slice(begin // weight.group, end // weight.group)
    changes: dict[str, Any] = {
        "shape": (*weight.shape[:-1], end - begin),
        "codes": pack_codes(np.ascontiguousarray(codes), weight.bits),
        "scale": scale_values(weight.scale)[..., groups],
    }
    if isinstance(weight, GroupAffine) and weight.bias is not None:
        changes["bias"] = scale_values(weight.bias)[..., groups]
    return dataclasses.replace(weight, **changes)


def _pack_affine(weight: GroupAffine) -> Packed | None:
    columns, group = weight.shape[-1], weight.group
    halved = group % 32 != 0 and group != columns
    if halved and group % 16:
        return None
    if halved:
        size = 32
    else:
        whole = columns if group == columns else group
        size = next((size for size in GROUPS if whole % size == 0), 32)
    width = -(-columns // size) * size
    scale = scale_values(weight.scale)
    bias = scale * np.float32(-weight.offset)
    if weight.bias is not None:
        bias = bias + scale_values(weight.bias)
    starts = np.arange(0, width, size)
    halves = (starts, starts + 16) if halved else (starts,)
    # What is padded has no group: its inputs are zeros, so that any scale will do.
    picks = [np.minimum(start, columns - 1) // group for start in halves]
    return Packed(
        inputs=columns,
        width=width,
        bits=8 if weight.bits == 7 else weight.bits,
        group=size,
        mode="affine",
        codes=_code_words(weight.codes, weight.bits, columns, width),
        scales=tuple(scale[..., pick] for pick in picks),
        biases=tuple(bias[..., pick] for pick in picks),
        order=weight.input_order,
    )


def _code_words(codes: UInt8, bits: int, columns: int, width: int) -> npt.NDArray[np.uint32]:
    """Packed codes as words of 32 bits: as they are, or padded, or widened from 7 bits."""
    if bits == 7 or width != columns:
        plain = unpack_codes(codes, bits, columns)
        rows = [(0, 0)] * (plain.ndim - 1)
        codes = pack_codes(np.pad(plain, [*rows, (0, width - columns)]), 8 if bits == 7 else bits)
    return np.ascontiguousarray(codes).view("<u4")


def _pack_float(weight: GroupFloat) -> Packed | None:
    scale = scale_values(weight.scale)
    columns = weight.shape[-1]
    if weight.format == "f4_e2m1" and weight.group == 16 and columns % 32 == 0:
        fitting = _e4m3_scales(scale)
        if fitting is not None:
            return _in_mode(weight, "nvfp4", *fitting)
    if weight.format in ("f4_e2m1", "f8_e4m3") and weight.group == 32:
        exponents = _e8m0_scales(scale)
        if exponents is not None:
            return _in_mode(weight, "mxfp4" if weight.bits == 4 else "mxfp8", exponents, None)
    if weight.format == "f4_e2m1":
        steps = _FP4_STEPS.astype(np.uint8)[unpack_codes(weight.codes, 4, columns)]
        return _pack_affine(
            GroupAffine(
                shape=weight.shape,
                bits=5,
                group=weight.group,
                codes=pack_codes(steps, 5),
                scale=scale * np.float32(0.5),
                offset=12,
                input_order=weight.input_order,
            )
        )
    return None


def _in_mode(weight: GroupFloat, mode: str, scales: UInt8, factor: float | None) -> Packed:
    return Packed(
        inputs=weight.shape[-1],
        width=weight.shape[-1],
        bits=weight.bits,
        group=weight.group,
        mode=mode,
        codes=np.ascontiguousarray(weight.codes).view("<u4"),
        scales=(scales,),
        factor=factor,
        order=weight.input_order,
    )


def _e8m0_scales(scale: Float32) -> UInt8 | None:
    """Codes of scales that are powers of two from 2^-126 to 2^127, else None. The code of 2^e is
    e + 127, float32's own exponent."""
    bits = np.ascontiguousarray(scale).view(np.uint32)
    exponent = bits >> 23
    if ((bits & 0x7FFFFF) != 0).any() or (exponent == 0).any() or (exponent > 254).any():
        return None
    return exponent.astype(np.uint8)


def _e4m3_scales(scale: Float32) -> tuple[UInt8, float | None] | None:
    """Codes of scales that are a common factor times values of e4m3, to a float32's precision, and
    that factor; else None. Looked for: 1, and those that make the largest scale a value of e4m3."""
    distinct = np.unique(scale)
    if len(distinct) > len(_E4M3) or distinct[0] < 0 or not 0 < distinct[-1] < np.inf:
        return None
    for factor in (np.float32(1), *(distinct[-1] / _E4M3[:0:-1])):
        above = np.searchsorted(_E4M3, distinct / factor).clip(1, len(_E4M3) - 1)
        nearer = np.abs(_E4M3[above - 1] * factor - distinct) < np.abs(
            _E4M3[above] * factor - distinct
        )
        codes = above - nearer
        if (np.abs(_E4M3[codes] * factor - distinct) <= distinct * _ROUNDING).all():
            own = codes[np.searchsorted(distinct, scale)].astype(np.uint8)
            return own, None if factor == 1 else float(factor)
    return None
