"""Random weights of every encoding, each with its values worked out in float64 beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from polysilicon.backend import Dense, GroupAffine, GroupFloat, SuperScaled, Weight, pack_codes

Float64 = npt.NDArray[np.float64]
Rng = np.random.Generator

F16, F32, BF16 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)

AFFINE_VARIANTS = (
    "offset", "bias", "offset_and_bias", "bfloat16", "super_scale", "super_bias", "input_order"
)  # fmt: skip
FLOAT_VARIANTS = ("plain", "super_scale", "input_order")
FLOAT_FORMATS = ("f8_e4m3", "f8_e5m2", "f4_e2m1", "codebook:16", "codebook:256")


@dataclasses.dataclass(frozen=True, eq=False)
class Encoded:
    """A weight, and what it stands for."""

    weight: Weight
    values: Float64


def dense(rng: Rng, shape: tuple[int, ...], dtype: np.dtype[Any] = F32) -> Encoded:
    array = rng.standard_normal(shape, np.float32).astype(dtype)
    return Encoded(Dense(array=array), array.astype(np.float64))


def affine(
    rng: Rng, shape: tuple[int, ...], bits: int, group: int, variant: str = "bias"
) -> Encoded:
    """Weights of a magnitude about 1/2. group: divides the columns."""
    columns = shape[-1]
    groups = (*shape[:-1], columns // group)
    codes = rng.integers(0, 1 << bits, shape, np.uint8)
    offset = 1 << (bits - 1) if variant in ("offset", "super_scale", "input_order") else 0
    if variant == "offset_and_bias":
        offset = 1
    dtype = {"bfloat16": BF16, "offset_and_bias": F32}.get(variant, F16)
    step = 2.0**-bits
    scale: Any
    bias: Any = None
    if variant.startswith("super"):
        scale, scale_values = _super_scaled(rng, groups, 6, 0, step / 32)
    else:
        scale, scale_values = _rounded(rng.uniform(0.5, 1.5, groups) * step, dtype)
    bias_values = np.zeros(groups)
    if variant == "super_bias":
        bias, bias_values = _super_scaled(rng, groups, 6, 0, -0.5 / 32)
    elif variant in ("bias", "offset_and_bias", "bfloat16"):
        bias, bias_values = _rounded(rng.uniform(-0.75, -0.25, groups), dtype)
    values = np.repeat(scale_values, group, axis=-1) * (codes.astype(np.float64) - offset)
    values += np.repeat(bias_values, group, axis=-1)
    order = rng.permutation(columns).astype(np.int32) if variant == "input_order" else None
    weight = GroupAffine(
        shape=shape,
        bits=bits,
        group=group,
        codes=pack_codes(codes, bits),
        scale=scale,
        offset=offset,
        bias=bias,
        input_order=order,
    )
    return Encoded(weight, _reordered(values, order))


def group_float(
    rng: Rng,
    shape: tuple[int, ...],
    format: str,
    group: int,
    variant: str = "plain",
    block: tuple[int, int] | None = None,
) -> Encoded:
    """Weights of a magnitude below 1.5. format: of `FLOAT_FORMATS`, or a codebook of another size.
    block: instead of groups."""
    rows, columns = shape[-2:]
    name, _, entries = format.partition(":")
    if name == "codebook":
        table = rng.uniform(-1, 1, int(entries)).astype(np.float32)
        meaning = table.astype(np.float64)
    else:
        table = None
        meaning = _minifloat_values(name)
    finite = np.flatnonzero(np.isfinite(meaning)).astype(np.uint8)
    codes = rng.choice(finite, shape)
    step = 1 / float(np.abs(meaning[finite]).max())
    if block is not None:
        groups = (*shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
    else:
        groups = (*shape[:-1], columns // group)
    scale: Any
    if variant == "super_scale":
        scale, scale_values = _super_scaled(rng, groups, 8, 0, step / 128)
    else:
        scale, scale_values = _rounded(rng.uniform(0.5, 1.5, groups) * step, F32)
    if block is not None:
        spread = np.kron(scale_values, np.ones(block))[..., :rows, :columns]
    else:
        spread = np.repeat(scale_values, group, axis=-1)
    order = rng.permutation(columns).astype(np.int32) if variant == "input_order" else None
    weight = GroupFloat(
        shape=shape,
        format=name,
        group=group,
        codes=pack_codes(codes, (len(meaning) - 1).bit_length()),
        scale=scale,
        table=table,
        block=block,
        input_order=order,
    )
    return Encoded(weight, _reordered(meaning[codes] * spread, order))


def of_kind(kind: str) -> Callable[[Rng, tuple[int, ...]], Encoded]:
    """A generator by the short name of an encoding: `dense:f16`, `affine:4/32`, `float:.../32`."""
    family, _, rest = kind.partition(":")
    if family == "dense":
        dtype = {"f32": F32, "f16": F16, "bf16": BF16}[rest]
        return lambda rng, shape: dense(rng, shape, dtype)
    name, _, group = rest.rpartition("/")
    if family == "affine":
        return lambda rng, shape: affine(rng, shape, int(name), int(group))
    return lambda rng, shape: group_float(rng, shape, name, int(group))


def _rounded(values: Float64, dtype: np.dtype[Any]) -> tuple[npt.NDArray[Any], Float64]:
    array = values.astype(np.float32).astype(dtype)
    return array, array.astype(np.float64)


def _super_scaled(
    rng: Rng, groups: tuple[int, ...], bits: int, offset: int, step: float
) -> tuple[SuperScaled, Float64]:
    """Codes in the upper half of their range, so that no group vanishes; four groups a super-scale
    where they divide, else a row."""
    count = groups[-1]
    span = 4 if count % 4 == 0 else count
    codes = rng.integers(1 << (bits - 1), 1 << bits, groups, np.uint8)
    scale, values = _rounded(rng.uniform(0.5, 1.5, (*groups[:-1], count // span)) * step, F16)
    return (
        SuperScaled(
            codes=pack_codes(codes, bits),
            bits=bits,
            offset=offset,
            count=count,
            scale=scale,
            group=span,
        ),
        np.repeat(values, span, axis=-1) * (codes.astype(np.float64) - offset),
    )


def _minifloat_values(name: str) -> Float64:
    """The OCP minifloats from their definition: sign, exponent, mantissa; NaN where not finite."""
    exponent_bits, mantissa_bits = int(name[-3]), int(name[-1])
    count = 1 << (1 + exponent_bits + mantissa_bits)
    codes = np.arange(count)
    sign = np.where(codes >= count // 2, -1.0, 1.0)
    exponent = codes >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = codes & (1 << mantissa_bits) - 1
    bias = (1 << exponent_bits - 1) - 1
    fraction = mantissa / (1 << mantissa_bits)
    values = sign * np.where(
        exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias)
    )
    if name == "f8_e4m3":
        values[codes & 0x7F == 0x7F] = np.nan
    if name == "f8_e5m2":
        values[exponent == 31] = np.nan
    return values


def _reordered(values: Float64, order: npt.NDArray[np.int32] | None) -> Float64:
    return values if order is None else values[..., np.argsort(order)]
