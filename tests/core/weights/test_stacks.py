"""Stacks of matrices: exactly their values, in their encoding wherever one holds them all."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from polysilicon.weights.encodings import (
    Dense,
    GroupAffine,
    GroupFloat,
    SuperScaled,
    Weight,
    pack_codes,
)
from polysilicon.weights.stacks import have_one_form, stack_weights, take_matrix

ROWS, COLUMNS, GROUP = 5, 64, 16


def packed(rng: np.random.Generator, bits: int, columns: int = COLUMNS) -> np.ndarray:
    return pack_codes(rng.integers(0, 1 << bits, (ROWS, columns), np.uint8), bits)


def scales(rng: np.random.Generator, dtype: object = np.float16) -> np.ndarray:
    return rng.normal(size=(ROWS, COLUMNS // GROUP)).astype(dtype)


def affine(seed: int, **changes: object) -> GroupAffine:
    rng = np.random.default_rng(seed)
    weight = GroupAffine(
        shape=(ROWS, COLUMNS),
        bits=4,
        group=GROUP,
        codes=packed(rng, 4),
        scale=scales(rng),
        bias=scales(rng),
        input_order=np.arange(COLUMNS, dtype=np.int32)[::-1].copy(),
        input_scale=0.5,
    )
    return dataclasses.replace(weight, **changes)


def super_scaled(seed: int) -> GroupAffine:
    rng = np.random.default_rng(seed)
    count = COLUMNS // GROUP
    codes = SuperScaled(
        codes=packed(rng, 6, count),
        bits=6,
        offset=32,
        count=count,
        scale=rng.normal(size=(ROWS, count // 2)).astype(np.float16),
        group=2,
    )
    return affine(seed, scale=codes, bias=None, offset=8)


def blocks(seed: int) -> GroupFloat:
    rng = np.random.default_rng(seed)
    return GroupFloat(
        shape=(ROWS, COLUMNS),
        format="f8_e4m3",
        group=32,
        codes=rng.integers(0, 120, (ROWS, COLUMNS), np.uint8),
        scale=rng.normal(size=(3, 2)).astype(np.float32),
        block=(2, 32),
    )


def codebook(seed: int, table_seed: int = 0) -> GroupFloat:
    rng = np.random.default_rng(seed)
    return GroupFloat(
        shape=(ROWS, COLUMNS),
        format="codebook",
        group=GROUP,
        codes=packed(rng, 4),
        scale=scales(rng, ml_dtypes.bfloat16),
        table=np.random.default_rng(table_seed).normal(size=16).astype(np.float32),
    )


def dense(seed: int, dtype: object = ml_dtypes.bfloat16) -> Dense:
    return Dense(array=np.random.default_rng(seed).normal(size=(ROWS, COLUMNS)).astype(dtype))


@pytest.mark.parametrize("make", [affine, super_scaled, blocks, codebook, dense])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_stack_has_the_values_and_the_encoding_of_its_matrices(make, count: int) -> None:
    weights = [make(seed) for seed in range(count)]
    stack = stack_weights(weights)
    assert stack.shape == (count, ROWS, COLUMNS)
    assert stack.encoding == weights[0].encoding
    assert stack.nbytes == sum(weight.nbytes for weight in weights)
    expected = np.stack([weight.dequantize() for weight in weights])
    np.testing.assert_array_equal(stack.dequantize(), expected)
    rows = np.array([4, 0, 2])
    np.testing.assert_array_equal(stack.take_rows(rows).dequantize(), expected[:, rows])


@pytest.mark.parametrize("make", [affine, super_scaled, blocks, codebook, dense])
def test_a_matrix_of_a_stack_is_what_it_was(make) -> None:
    weights = [make(seed) for seed in range(3)]
    stack = stack_weights(weights)
    for index, weight in enumerate(weights):
        taken = take_matrix(stack, index)
        assert (taken.shape, taken.encoding) == (weight.shape, weight.encoding)
        np.testing.assert_array_equal(taken.dequantize(), weight.dequantize())


@pytest.mark.parametrize(
    "other",
    [
        affine(1, bits=8, codes=packed(np.random.default_rng(1), 8)),
        affine(1, offset=8),
        affine(1, bias=None),
        affine(1, scale=scales(np.random.default_rng(2), np.float32)),
        affine(1, input_order=None),
        affine(1, input_order=np.arange(COLUMNS, dtype=np.int32)),
        super_scaled(1),
        codebook(1),
        dense(1),
    ],
)
def test_matrices_that_differ_have_no_one_form(other: Weight) -> None:
    assert not have_one_form([affine(0), affine(2), other])
    assert have_one_form([other, other])


def test_scales_of_inputs_are_kept_where_they_are_equal() -> None:
    same = stack_weights([affine(0), affine(1)])
    other = stack_weights([affine(0), affine(1, input_scale=0.25)])
    assert isinstance(same, GroupAffine)
    assert isinstance(other, GroupAffine)
    assert same.input_scale == 0.5
    assert other.input_scale is None
