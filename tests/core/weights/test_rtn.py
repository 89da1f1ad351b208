"""Grids and codes, against plain searches."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest

from polysilicon.quantization.k_quants import fit_affine_blocks, fit_symmetric_blocks
from polysilicon.weights.encodings import Float32, SuperScaled
from polysilicon.weights.rtn import (
    Fit,
    error_weights,
    fit_affine,
    fit_symmetric,
    fit_zero_point,
    quantize_affine,
    quantize_float8,
    quantize_symmetric,
    zero_points,
)

FITS: dict[str, Fit] = {
    "symmetric": functools.partial(fit_symmetric, bits=4, group=32, dtype="f16"),
    "signed": functools.partial(fit_symmetric, bits=4, group=32, dtype="f16", signed=True),
    "range": functools.partial(fit_symmetric, bits=4, group=32, dtype="f16", search=False),
    "eight": functools.partial(fit_symmetric, bits=8, group=32, dtype="bf16"),
    "zero point": functools.partial(fit_zero_point, bits=4, group=64, dtype="bf16"),
    "zero point eight": functools.partial(fit_zero_point, bits=8, group=64, dtype="f16"),
    "affine": functools.partial(fit_affine, bits=3, group=64, dtype="f16"),
    "affine eight": functools.partial(fit_affine, bits=8, group=32, dtype="f32"),
    "Q4_K": functools.partial(fit_affine_blocks, bits=4),
    "Q5_K": functools.partial(fit_affine_blocks, bits=5),
    "Q6_K": fit_symmetric_blocks,
}


def matrix(rows: int = 9, columns: int = 512) -> Float32:
    """Heavy tails, and rows that are zero, constant, of one sign, tiny and huge."""
    random = np.random.default_rng(3)
    values = random.standard_t(4, (rows, columns)).astype(np.float32)
    values[0] = 0
    values[1] = 0.25
    values[2] = -np.abs(values[2])
    values[3] = np.abs(values[3]) + 3
    values[4] *= np.float32(1e-12)
    values[5] *= np.float32(1e4)
    return values


def squared(a: Float32, weights: Float32 | float = 1.0) -> float:
    return float((np.asarray(a, np.float64) ** 2 * weights).sum())


@pytest.mark.parametrize("name", FITS)
def test_codes_are_those_of_the_nearest_values(name: str) -> None:
    values = matrix()
    grid = FITS[name](values, None)
    scale, origin = (np.repeat(part, grid.group, axis=1) for part in grid.steps())
    codes = grid.nearest(values)
    assert codes.max() <= grid.levels
    chosen = np.abs(values - (codes * scale + origin))
    for code in range(grid.levels + 1):
        other = np.abs(values - (np.float32(code) * scale + origin))
        # Halfway between two values, rounding decides.
        assert (chosen <= other * np.float32(1 + 1e-5) + np.abs(values) * np.float32(1e-6)).all()
    held = grid.weight(codes).dequantize()
    np.testing.assert_allclose(held, codes * scale + origin, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FITS)
def test_grids_hold_ordinary_values_closely(name: str) -> None:
    values = np.random.default_rng(5).standard_normal((16, 512)).astype(np.float32)
    grid = FITS[name](values, None)
    error = squared(grid.weight(grid.nearest(values)).dequantize() - values) / squared(values)
    # Half a step of a range of about 2.5 deviations to both sides, uniformly distributed, doubled.
    assert error < 2 * (2 * 2.8 / grid.levels) ** 2 / 12


@pytest.mark.parametrize("kind", ["symmetric", "zero point", "affine"])
def test_a_search_does_no_worse_than_the_range(kind: str) -> None:
    values = np.random.default_rng(1).standard_t(4, (64, 256)).astype(np.float32)
    found = {
        "symmetric": fit_symmetric(values, None, bits=4, group=32, dtype="f32"),
        "zero point": fit_zero_point(values, None, bits=4, group=32, dtype="f32"),
        "affine": fit_affine(values, None, bits=4, group=32, dtype="f32"),
    }[kind]
    if kind == "symmetric":
        ranged = fit_symmetric(values, None, bits=4, group=32, dtype="f32", search=False)
        plain = ranged.weight(ranged.nearest(values)).dequantize()
    else:
        groups = values.reshape(64, 8, 32)
        low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
        scale = (high - low) / 15
        zero = np.rint(-low / scale)
        codes = np.clip(np.rint(groups / scale) + zero, 0, 15)
        plain = (scale * (codes - zero)).reshape(values.shape)
    weights = error_weights(values.reshape(64, 8, 32), None).reshape(values.shape)
    held = found.weight(found.nearest(values)).dequantize()
    assert squared(held - values, weights) < 0.97 * squared(plain - values, weights)


@pytest.mark.parametrize("name", ["symmetric", "signed", "zero point", "affine", "Q4_K", "Q6_K"])
def test_importance_moves_the_error_to_where_it_counts_less(name: str) -> None:
    random = np.random.default_rng(2)
    values = random.standard_normal((32, 256)).astype(np.float32)
    weights = np.exp(random.standard_normal(256) * 2).astype(np.float32)
    errors = []
    for importance in (weights, np.ones(256, np.float32)):
        grid = FITS[name](values, importance)
        held = grid.weight(grid.nearest(values)).dequantize()
        errors.append(squared(held - values, weights))
    assert errors[0] < errors[1]


def test_zero_points_are_whole_and_zero_is_a_value() -> None:
    values = matrix()
    grid = fit_zero_point(values, None, bits=4, group=32, dtype="f16")
    zeros = zero_points(grid)
    assert zeros.max() <= 15
    scale = np.asarray(grid.scale, np.float32)
    np.testing.assert_array_equal(-scale * zeros, np.asarray(grid.bias))
    held = grid.weight(np.repeat(zeros, 32, axis=1)).dequantize()
    np.testing.assert_array_equal(held, 0)


def test_k_quants_store_no_negative_scale_or_minimum() -> None:
    grid = fit_affine_blocks(matrix(), None, bits=4)
    assert isinstance(grid.scale, SuperScaled)
    assert isinstance(grid.bias, SuperScaled)
    assert (grid.scale.values() >= 0).all()
    assert (grid.bias.values() <= 0).all()


def test_a_quantised_constant_and_zero_stay_what_they_are() -> None:
    values = np.zeros((2, 64), np.float32)
    values[1] = 0.5
    for held in (quantize_affine(values, bits=4, group=32), quantize_float8(values)):
        np.testing.assert_array_equal(held.dequantize(), values)
    held = quantize_symmetric(values, bits=8, group=32)
    np.testing.assert_allclose(held.dequantize(), values, rtol=2**-11)


def test_values_beyond_f16_saturate() -> None:
    values = np.full((1, 32), 1e30, np.float32)
    assert np.isfinite(quantize_affine(values, bits=4, group=32).dequantize()).all()
    assert np.isfinite(quantize_symmetric(values, bits=8, group=32).dequantize()).all()


def test_fp8_is_the_nearest_e4m3_of_every_row() -> None:
    values = np.random.default_rng(8).standard_normal((7, 96)).astype(np.float32)
    values[3] = 0
    held = quantize_float8(values)
    assert held.encoding == "float:f8_e4m3/96"
    scale = np.abs(values).max(axis=1, keepdims=True) / np.float32(448)
    scale[3] = 1
    expected = (values / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    np.testing.assert_array_equal(held.dequantize(), expected)
    largest = np.abs(held.dequantize()).max(axis=1)
    np.testing.assert_allclose(largest, np.abs(values).max(axis=1), rtol=1e-6)
