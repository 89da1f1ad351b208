"""The canonical encodings against bit-by-bit packing and loops over single elements."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polysilicon.weights.encodings import (
    Array,
    Dense,
    Float32,
    GroupAffine,
    GroupFloat,
    SuperScaled,
    Weight,
    pack_codes,
    scale_values,
    unpack_codes,
)


def bit_stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """The packing of one row or more, one bit per element and step."""
    planes = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :bits]
    return np.packbits(planes.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256])
def test_pack_is_the_bit_stream_and_unpack_its_inverse(bits: int, count: int) -> None:
    codes = np.random.default_rng([bits, count]).integers(0, 1 << bits, (3, 2, count), np.uint8)
    packed = pack_codes(codes, bits)
    assert packed.dtype == np.uint8
    np.testing.assert_array_equal(packed, bit_stream(codes, bits))
    np.testing.assert_array_equal(unpack_codes(packed, bits, count), codes)


@given(st.integers(1, 8), st.integers(0, 40), st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_pack_round_trips_any_shape(bits: int, count: int, rows: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, count), np.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (rows, -(-count * bits // 8))
    np.testing.assert_array_equal(unpack_codes(packed, bits, count), codes)


def test_pack_reads_codes_that_are_not_contiguous() -> None:
    codes = np.random.default_rng(0).integers(0, 8, (10, 33), np.uint8)
    np.testing.assert_array_equal(pack_codes(codes[::2, ::-3], 3), bit_stream(codes[::2, ::-3], 3))
    packed = pack_codes(codes, 3)
    np.testing.assert_array_equal(unpack_codes(packed[::-2], 3, 33), codes[::-2])


def random_scales(generator: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    return generator.normal(size=shape).astype(dtype)


def random_super_scales(
    generator: np.random.Generator, rows: tuple[int, ...], count: int
) -> SuperScaled:
    group = 3
    return SuperScaled(
        codes=pack_codes(generator.integers(0, 64, (*rows, count), np.uint8), 6),
        bits=6,
        offset=32,
        count=count,
        scale=random_scales(generator, (*rows, -(-count // group)), "float16"),
        group=group,
    )


def affine(
    shape: tuple[int, ...], bits: int, group: int, *, super_scaled: bool, bias: bool, ordered: bool
) -> GroupAffine:
    generator = np.random.default_rng([*shape, bits, group, super_scaled, bias, ordered])
    *rows, columns = shape
    groups = columns // group

    def scales() -> Array | SuperScaled:
        if super_scaled:
            return random_super_scales(generator, tuple(rows), groups)
        return random_scales(generator, (*rows, groups), "float16")

    return GroupAffine(
        shape=shape,
        bits=bits,
        group=group,
        offset=0 if bias else 1 << (bits - 1),
        codes=pack_codes(generator.integers(0, 1 << bits, shape, np.uint8), bits),
        scale=scales(),
        bias=scales() if bias else None,
        input_order=generator.permutation(columns).astype(np.int32) if ordered else None,
    )


def affine_by_elements(weight: GroupAffine) -> Float32:
    columns = weight.shape[-1]
    result = np.zeros(weight.shape, np.float32)
    scale = scale_values(weight.scale)
    bias = None if weight.bias is None else scale_values(weight.bias)
    codes = unpack_codes(weight.codes, weight.bits, columns)
    for position in np.ndindex(weight.shape):
        *row, column = position
        group = (*row, column // weight.group)
        value = scale[group] * np.float32(int(codes[position]) - weight.offset)
        if bias is not None:
            value = value + bias[group]
        to = column if weight.input_order is None else weight.input_order[column]
        result[(*row, to)] = value
    return result


AFFINE_CASES = [
    affine((5, 64), 4, 32, super_scaled=False, bias=False, ordered=False),
    affine((5, 64), 4, 32, super_scaled=False, bias=True, ordered=True),
    affine((2, 3, 96), 3, 16, super_scaled=True, bias=False, ordered=False),
    affine((7, 48), 5, 16, super_scaled=True, bias=True, ordered=False),
    affine((1, 17), 7, 17, super_scaled=False, bias=True, ordered=True),
    affine((3, 51), 3, 17, super_scaled=False, bias=False, ordered=True),
    affine((4, 256), 8, 128, super_scaled=False, bias=False, ordered=False),
    affine((4, 32), 2, 16, super_scaled=True, bias=True, ordered=True),
    affine((64,), 6, 16, super_scaled=False, bias=False, ordered=False),
]


@pytest.mark.parametrize("weight", AFFINE_CASES)
def test_affine_dequantizes_as_element_by_element(weight: GroupAffine) -> None:
    values = weight.dequantize()
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, affine_by_elements(weight))


def float_weight(
    shape: tuple[int, ...],
    name: str,
    *,
    block: tuple[int, int] | None = None,
    ordered: bool = False,
) -> GroupFloat:
    generator = np.random.default_rng([*shape, len(name)])
    *rows, columns = shape
    table = generator.normal(size=16).astype(np.float32) if name == "codebook" else None
    bits = 4 if name in ("codebook", "f4_e2m1") else 8
    scale_shape = (*rows, columns // 16)
    if block is not None:
        scale_shape = (*rows[:-1], -(-rows[-1] // block[0]), -(-columns // block[1]))
    codes = generator.integers(0, 1 << bits, shape, np.uint8)
    if bits == 8:
        # Leave out NaN and the infinities, which equal nothing or multiply to NaN.
        codes[(codes & 127) > 122] = 1
    return GroupFloat(
        shape=shape,
        format=name,
        group=16,
        codes=pack_codes(codes, bits),
        scale=random_scales(generator, scale_shape, "float32"),
        table=table,
        block=block,
        input_order=generator.permutation(columns).astype(np.int32) if ordered else None,
    )


def float_by_elements(weight: GroupFloat) -> Float32:
    columns = weight.shape[-1]
    result = np.zeros(weight.shape, np.float32)
    scale = scale_values(weight.scale)
    codes = unpack_codes(weight.codes, weight.bits, columns)
    for position in np.ndindex(weight.shape):
        *row, column = position
        if weight.block is None:
            place = (*row, column // weight.group)
        else:
            place = (*row[:-1], row[-1] // weight.block[0], column // weight.block[1])
        to = column if weight.input_order is None else weight.input_order[column]
        result[(*row, to)] = weight.values_table[codes[position]] * scale[place]
    return result


FLOAT_CASES = [
    float_weight((5, 32), "f8_e4m3"),
    float_weight((5, 32), "f8_e5m2"),
    float_weight((3, 48), "f4_e2m1", ordered=True),
    float_weight((2, 3, 32), "codebook"),
    float_weight((7, 19), "f8_e4m3", block=(3, 8)),
    float_weight((2, 5, 16), "f8_e4m3", block=(128, 128)),
    float_weight((32,), "f8_e4m3"),
]


@pytest.mark.parametrize("weight", FLOAT_CASES)
def test_float_dequantizes_as_element_by_element(weight: GroupFloat) -> None:
    values = weight.dequantize()
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, float_by_elements(weight))


def test_fp4_table_is_that_of_ml_dtypes() -> None:
    codes = np.arange(16, dtype=np.uint8)
    weight = GroupFloat(
        shape=(1, 16),
        format="f4_e2m1",
        group=16,
        codes=pack_codes(codes[None], 4),
        scale=np.ones((1, 1), np.float32),
    )
    expected = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(weight.dequantize()[0], expected)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("block", [None, (1, 2)])
def test_scales_that_are_too_large_give_infinities_without_a_warning(
    block: tuple[int, int] | None,
) -> None:
    scale, codes = np.full((1, 2), 3e38, np.float32), np.full((1, 4), 0x7E, np.uint8)
    floats = GroupFloat(
        shape=(1, 4), format="f8_e4m3", group=2, block=block, codes=codes, scale=scale
    )
    assert np.isposinf(floats.dequantize()).all()
    affine = GroupAffine(shape=(1, 4), bits=8, group=2, codes=codes, scale=scale)
    assert np.isposinf(affine.dequantize()).all()


def test_super_scales_are_scale_times_code_less_offset() -> None:
    weight = random_super_scales(np.random.default_rng(5), (2, 4), 8)
    codes = unpack_codes(weight.codes, 6, 8)
    for a, b, group in np.ndindex(2, 4, 8):
        expected = np.float32(weight.scale[a, b, group // 3]) * (int(codes[a, b, group]) - 32)
        assert weight.values()[a, b, group] == expected


DENSE_CASES = [
    Dense(array=np.random.default_rng(0).normal(size=shape).astype(dtype))
    for shape in [(9,), (9, 4), (2, 9, 4), (0,)]
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16)
]


@pytest.mark.parametrize("weight", [*AFFINE_CASES, *FLOAT_CASES, *DENSE_CASES])
def test_take_rows_gives_exactly_those_rows(weight: Weight) -> None:
    axis = -2 if len(weight.shape) > 1 else 0
    count = weight.shape[axis]
    generator = np.random.default_rng(count)
    choices = [np.array([], np.int64), np.arange(count)[::-1], generator.permutation(count)]
    if count:
        choices += [
            generator.integers(0, count, 2 * count + 1),
            np.arange(-count, 0, dtype=np.int32),
        ]
    for index in choices:
        taken = weight.take_rows(index)
        expected = weight.dequantize().take(index, axis=axis)
        assert taken.shape == expected.shape
        np.testing.assert_array_equal(taken.dequantize(), expected)


@pytest.mark.parametrize("weight", [*AFFINE_CASES[:-1], *FLOAT_CASES[:-1]])
def test_take_rows_keeps_the_encoding_and_refuses_rows_that_are_not_there(weight: Weight) -> None:
    rows = weight.shape[-2]
    taken = weight.take_rows(np.arange(rows)[::-1])
    assert type(taken) is type(weight)
    if getattr(weight, "block", None) is None:
        assert (taken.encoding, taken.nbytes) == (weight.encoding, weight.nbytes)
    for index in (rows, -rows - 1):
        with pytest.raises(IndexError):
            weight.take_rows(np.array([index]))


def test_nbytes_counts_codes_scales_and_bias() -> None:
    weight = AFFINE_CASES[1]
    assert weight.nbytes == 5 * 32 + 5 * 2 * 2 + 5 * 2 * 2
    assert dataclasses.replace(weight, bias=None).nbytes == 5 * 32 + 5 * 2 * 2
    assert AFFINE_CASES[7].nbytes == 4 * 8 + 2 * (4 * 2 + 4 * 1 * 2)


def test_names_of_encodings() -> None:
    assert AFFINE_CASES[0].encoding == "affine:4/32"
    assert FLOAT_CASES[0].encoding == "float:f8_e4m3/16"
    assert FLOAT_CASES[4].encoding == "float:f8_e4m3/3x8"
    assert [weight.encoding for weight in DENSE_CASES[:3]] == [
        "dense:f32",
        "dense:f16",
        "dense:bf16",
    ]
