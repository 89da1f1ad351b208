"""Scales that weights cannot have, held to what the weights' own values come to."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from polysilicon.weights.encodings import (
    E8M0,
    Dense,
    GroupAffine,
    GroupFloat,
    Scales,
    SuperScaled,
    Weight,
    pack_codes,
)
from polysilicon.weights.scale_checks import scale_problem

ROWS, COLUMNS, GROUP = 3, 64, 32
SHAPE = (ROWS, COLUMNS // GROUP)
LARGEST = float(np.finfo(np.float32).max)


def affine(
    code: int, scale: Scales, bias: Scales | None = None, *, bits: int = 4, offset: int = 0
) -> GroupAffine:
    codes = pack_codes(np.full((ROWS, COLUMNS), code, np.uint8), bits)
    return GroupAffine(
        shape=(ROWS, COLUMNS), bits=bits, group=GROUP, codes=codes, scale=scale, bias=bias,
        offset=offset,
    )  # fmt: skip


def floats(code: int, scale: Scales, format: str = "f4_e2m1", bits: int = 4) -> GroupFloat:
    codes = pack_codes(np.full((ROWS, COLUMNS), code, np.uint8), bits)
    return GroupFloat(shape=(ROWS, COLUMNS), format=format, group=GROUP, codes=codes, scale=scale)


def numbers(value: float, dtype: type = np.float32) -> np.ndarray:
    """Ordinary numbers, of which one is this."""
    made = np.full(SHAPE, -0.5, dtype)
    made[1, 1] = value
    return made


def super_scaled(value: float, *, offset: int = 0) -> SuperScaled:
    codes = pack_codes(np.full(SHAPE, 63, np.uint8), 6)
    scale = numbers(value)[:, :1].copy()
    scale[2, 0] = value
    return SuperScaled(codes=codes, bits=6, offset=offset, count=2, scale=scale, group=2)


# Largest codes under the largest scales that go, and under scales just above them.
AT_THE_LIMIT = {
    "affine": lambda up: affine(15, numbers(up * LARGEST / 15)),
    "below the offset": lambda up: affine(0, numbers(-up * LARGEST / 12), offset=12),
    "above the offset": lambda up: affine(15, numbers(up * LARGEST / 12), offset=3),
    "both": lambda up: affine(15, numbers(up * LARGEST / 30), numbers(up * LARGEST / 2)),
    "super scale": lambda up: affine(15, super_scaled(up * LARGEST / 15 / 63)),
    "super scale, offset": lambda up: affine(15, super_scaled(up * LARGEST / 15 / 43, offset=20)),
    "super bias": lambda up: affine(0, numbers(0), super_scaled(-up * LARGEST / 63)),
    "f4": lambda up: floats(7, numbers(up * LARGEST / 6)),
    "f8 e4m3": lambda up: floats(0x7E, numbers(up * LARGEST / 448), "f8_e4m3", 8),
    "f8 e5m2": lambda up: floats(0xFB, numbers(-up * LARGEST / 57344), "f8_e5m2", 8),
}


@pytest.mark.parametrize("name", AT_THE_LIMIT)
def test_scales_are_refused_where_values_overflow(name: str) -> None:
    fits, large = (AT_THE_LIMIT[name](up) for up in (1 - 1e-6, 1 + 1e-6))
    assert scale_problem(fits) is None
    assert np.isfinite(fits.dequantize()).all()
    problem = scale_problem(large)
    assert problem is not None
    assert "so large" in problem
    assert not np.isfinite(large.dequantize()).all()


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_scales_that_are_not_finite(value: float, dtype: type) -> None:
    bad = numbers(value, dtype)
    good = numbers(1, dtype)
    for weight in (
        affine(1, bad), affine(1, good, bad), affine(1, good, super_scaled(value)), floats(1, bad),
        affine(1, bad.T.copy().T), floats(1, np.repeat(bad, 2, axis=1)[:, ::2]),
    ):  # fmt: skip
        assert scale_problem(weight) == "scales or biases that are not finite"


@pytest.mark.parametrize(
    "weight",
    [
        Dense(array=np.full((2, 2), np.inf, np.float32)),
        affine(15, numbers(65504, np.float16), numbers(-65504, np.float16)),
        floats(7, np.full(SHAPE, E8M0[251])),
        dataclasses.replace(
            affine(0, numbers(1)), shape=(0, COLUMNS), codes=np.zeros((0, 32), np.uint8),
            scale=np.zeros((0, 2), np.float32),
        ),
    ],
)  # fmt: skip
def test_what_is_taken(weight: Weight) -> None:
    assert scale_problem(weight) is None
