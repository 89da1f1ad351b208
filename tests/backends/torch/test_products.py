"""Packed matrices: their layout, values and products, against float64."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from polysilicon.backend import GroupAffine, Shard
from polysilicon.testing import encoded
from polysilicon_torch.packing import place_matrices, placed_bytes
from polysilicon_torch.placed import PLANES, WHOLE_ROW, DenseMatrix, PackedMatrix
from polysilicon_torch.target import INTERPRETER
from polysilicon_torch.triton import dequantize as dequantize_module
from polysilicon_torch.triton.dequantize import dequantize
from polysilicon_torch.triton.packed_products import packed_product
from polysilicon_torch.triton_kernels import TritonKernels
from polysilicon_torch.tuning import Tuning

BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
CPU = torch.device("cpu")

SMALL = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 128}
TUNING = (
    Tuning.of(INTERPRETER)
    .over("packed_product", SMALL)
    .over("dequantize", {"BLOCK_M": 4, "BLOCK_K": 128})
)
"""Tiles so small that tiny matrices have several of them."""


def placed(*parts, shard=None, dtype=torch.float32):
    weights = [part.weight for part in parts]
    return [
        matrix
        for matrix, _ in place_matrices(weights, shard, dtype=dtype, device=CPU, keep_codes=True)
    ]


def packed(*parts, shard=None):
    """Parts that become one packed matrix."""
    [matrix] = placed(*parts, shard=shard)
    assert isinstance(matrix, PackedMatrix)
    return matrix


def inputs(rng, shape, dtype):
    """Standard normal numbers as they are after rounding to a dtype."""
    return torch.from_numpy(rng.standard_normal(shape, np.float32)).to(dtype)


def assert_near(actual, expected, bound):
    """Within a bound relative to the largest magnitude expected."""
    assert tuple(actual.shape) == expected.shape
    error = np.abs(actual.double().numpy() - expected).max(initial=0)
    assert error <= bound * max(np.abs(expected).max(initial=0), 1e-9), error


GROUPS = {16: 160, 32: 320, 48: 144, 64: 192, 128: 384, 256: 512, "row": 101}


@pytest.fixture
def rng():
    return np.random.default_rng()


def check(rng, weight, rows, dtype, *, bias=False, out_dtype=torch.float32):
    matrix = packed(weight)
    outputs, columns = weight.values.shape
    x = inputs(rng, (rows, columns), dtype)
    own_bias = inputs(rng, (outputs,), torch.float32) if bias else None
    actual = packed_product(x, matrix, bias=own_bias, out_dtype=out_dtype, tuning=TUNING)
    expected = x.double().numpy() @ weight.values.T
    if bias:
        expected = expected + own_bias.double().numpy()
    assert actual.dtype == out_dtype
    assert_near(actual, expected, max(BOUNDS[dtype], BOUNDS[out_dtype]))


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("group", GROUPS)
def test_bits_and_groups(rng, bits, group):
    """Every width and group in the three dtypes, with tails of outputs and inputs."""
    columns = GROUPS[group]
    span = columns if group == "row" else group
    for dtype, variant in (
        (torch.float32, "offset_and_bias"),
        (torch.float16, "offset"),
        (torch.bfloat16, "bias"),
    ):
        check(rng, encoded.affine(rng, (19, columns), bits, span, variant), 2, dtype)


@pytest.mark.parametrize("variant", encoded.AFFINE_VARIANTS)
@pytest.mark.parametrize("bits", [3, 4, 6])
def test_variants(rng, bits, variant):
    check(rng, encoded.affine(rng, (37, 192), bits, 16, variant), 3, torch.float32)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 16, 17, 40])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_rows(rng, rows, dtype):
    weight = encoded.affine(rng, (33, 192), 4, 32)
    check(rng, weight, rows, dtype, bias=True, out_dtype=dtype)


def test_very_many_rows_are_left_to_the_library(rng, monkeypatch):
    """Dequantised once and then multiplied, from a number of rows on; below it, not at all."""
    monkeypatch.setattr(dequantize_module, "MANY_ROWS", 5)
    calls = []
    monkeypatch.setattr(
        dequantize_module, "dequantize", lambda *a, **k: calls.append(1) or dequantize(*a, **k)
    )
    kernels = TritonKernels(torch.float16, CPU, TUNING)
    for kind in ("bias", "input_order"):
        weight = encoded.affine(rng, (33, 192), 5, 32, kind)
        for rows in (4, 5, 7):
            x = inputs(rng, (rows, 192), torch.float16)
            actual = kernels.linear(x, packed(weight), inputs(rng, (33,), torch.float32) * 0)
            assert_near(actual, x.double().numpy() @ weight.values.T, 2e-3)
            assert len(calls) == (rows >= 5)
            calls.clear()


def test_rows_of_any_stride(rng):
    """Views of columns are what the parts of a fused product are."""
    weight = encoded.affine(rng, (8, 64), 4, 32)
    wide = inputs(rng, (5, 192), torch.float32)
    actual = packed_product(
        wide[:, 64:128], packed(weight), bias=None, out_dtype=torch.float32, tuning=TUNING
    )
    assert_near(actual, wide[:, 64:128].double().numpy() @ weight.values.T, 2e-5)


@pytest.mark.parametrize("bits", range(2, 9))
def test_values(rng, bits):
    """Dequantised values are the encoding's own, to the rounding of one fused operation."""
    for variant in ("super_bias", "super_scale", "offset_and_bias", "input_order"):
        weight = encoded.affine(rng, (21, 208), bits, 16, variant)
        matrix = packed(weight)
        whole = dequantize(matrix, dtype=torch.float32, tuning=TUNING)
        np.testing.assert_allclose(whole.numpy(), weight.weight.dequantize(), rtol=2e-6, atol=1e-7)
        rounded = dequantize(matrix, dtype=torch.bfloat16, tuning=TUNING)
        assert torch.equal(rounded, whole.to(torch.bfloat16))


def test_layout():
    """Slot `h * slots / 2 + m` of word j of a unit holds input `8 m + 2 j + h`."""
    for bits, widths in PLANES.items():
        slots = 32 // widths[0]
        rng = np.random.default_rng()
        codes = rng.integers(0, 1 << bits, (11, 4 * slots), np.uint8)
        weight = encoded.affine(rng, codes.shape, bits, 4 * slots)
        weight = dataclasses.replace(weight.weight, codes=encoded.pack_codes(codes, bits))
        [(matrix, _)] = place_matrices(
            [weight], None, dtype=torch.float32, device=CPU, keep_codes=True
        )
        assert [plane.dtype.itemsize * 8 for plane in matrix.planes] == [w * slots for w in widths]
        for row, m, j, h in ((0, 0, 0, 0), (10, slots // 2 - 1, 3, 1), (9, 1, 2, 0), (3, 0, 1, 1)):
            found, lowest = 0, 0
            for width, plane in zip(widths, matrix.planes, strict=True):
                word = int(plane[row // 8, 0, row % 8, j]) >> ((h * slots // 2 + m) * width)
                found |= (word & ((1 << width) - 1)) << lowest
                lowest += width
            assert found == codes[row, 8 * m + 2 * j + h]


def test_k_quants_hardly_grow(rng):
    """Codes of scales keep a byte each: an eighth of a bit a weight above Q4_K's own."""
    weight = encoded.affine(rng, (64, 2048), 4, 32, "super_bias").weight
    matrix = place_matrices([weight], None, dtype=torch.bfloat16, device=CPU, keep_codes=True)[0][0]
    growth = 8 * (matrix.nbytes - weight.nbytes) / math.prod(weight.shape)
    assert growth <= 0.126
    assert placed_bytes([weight], None, dtype=torch.bfloat16, keep_codes=True) <= matrix.nbytes


@pytest.mark.parametrize("axis", ["rows", "columns"])
@pytest.mark.parametrize("variant", ["bias", "super_bias"])
def test_shards(rng, axis, variant):
    """Rows cut inside blocks of eight; columns inside super-groups, and inside groups."""
    for group, columns in ((32, 192), (64, 192), (192, 192)):
        parts = [encoded.affine(rng, (count, columns), 5, group, variant) for count in (12, 20)]
        for rank in range(2):
            matrix = packed(*parts, shard=Shard(axis=axis, rank=rank, ranks=2))
            values = [
                np.split(part.values, 2, axis=0 if axis == "rows" else 1)[rank] for part in parts
            ]
            expected = np.concatenate(values)
            actual = dequantize(matrix, dtype=torch.float32, tuning=TUNING)
            assert_near(actual, expected, 1e-6)


def test_alike_neighbours_are_one_matrix(rng):
    kinds = [(5, 4), (7, 4), (9, 6), (3, 6)]
    parts = [encoded.affine(rng, (rows, 64), bits, 32) for rows, bits in kinds]
    dense = [encoded.dense(rng, (rows, 64)) for rows in (4, 2)]
    weights = [part.weight for part in (*parts, *dense)]
    matrices = place_matrices(weights, None, dtype=torch.float16, device=CPU, keep_codes=True)
    assert [(matrix.shape, count) for matrix, count in matrices] == [
        ((12, 64), 2), ((12, 64), 2), ((6, 64), 2)
    ]  # fmt: skip
    expected = np.concatenate([part.values for part in parts[:2]])
    actual = dequantize(matrices[0][0], dtype=torch.float32, tuning=TUNING)
    assert_near(actual, expected, 1e-6)
    assert isinstance(matrices[2][0], DenseMatrix)
    assert matrices[2][0].values.dtype == torch.float16


def test_what_the_kernels_cannot_take_is_dequantised(rng):
    """Groups that are no multiple of sixteen, and an input order cut into columns."""
    odd = encoded.affine(rng, (6, 60), 4, 20)
    [matrix] = placed(odd)
    assert isinstance(matrix, DenseMatrix)
    assert_near(matrix.values, odd.values, 1e-6)
    ordered = encoded.affine(rng, (6, 128), 4, 32, "input_order")
    [matrix] = placed(ordered, shard=Shard(axis="columns", rank=1, ranks=2))
    assert isinstance(matrix, DenseMatrix)
    assert_near(matrix.values, ordered.values[:, 64:], 1e-6)
    [(matrix, _)] = place_matrices(
        [encoded.affine(rng, (6, 64), 4, 32).weight], None,
        dtype=torch.bfloat16, device=CPU, keep_codes=False,
    )  # fmt: skip
    assert isinstance(matrix, DenseMatrix)


def test_one_group_is_a_whole_row(rng):
    assert packed(encoded.affine(rng, (6, 64), 4, 64)).group == WHOLE_ROW
    assert packed(encoded.affine(rng, (6, 64), 4, 32)).group == 32


def test_nothing_given_stays_in_use(rng):
    part = encoded.affine(rng, (9, 64), 8, 32)
    assert isinstance(part.weight, GroupAffine)
    matrix = packed(part)
    part.weight.codes[:] = 0
    part.weight.scale[:] = 0
    actual = dequantize(matrix, dtype=torch.float32, tuning=TUNING)
    assert_near(actual, part.values, 1e-6)


FLOAT_GROUPS = {16: 160, 32: 320, 128: 256, "row": 101}


@pytest.mark.parametrize("format", encoded.FLOAT_FORMATS)
@pytest.mark.parametrize("group", FLOAT_GROUPS)
def test_float_formats(rng, format, group):
    columns = FLOAT_GROUPS[group]
    span = columns if group == "row" else group
    for dtype, variant in zip(BOUNDS, encoded.FLOAT_VARIANTS, strict=True):
        check(rng, encoded.group_float(rng, (19, columns), format, span, variant), 2, dtype)


@pytest.mark.parametrize("format", encoded.FLOAT_FORMATS)
def test_every_code_of_a_float_format(rng, format):
    """Subnormals, zeros and the largest numbers, exactly."""
    weight = encoded.group_float(rng, (64, 64), format, 64)
    values = dequantize(packed(weight), dtype=torch.float32, tuning=TUNING)
    np.testing.assert_array_equal(values.numpy(), weight.weight.dequantize())
    table = weight.weight.values_table
    codes = np.flatnonzero(np.isfinite(table)).astype(np.uint8)
    row = np.resize(codes, (1, 256))
    one = dataclasses.replace(
        weight.weight,
        shape=row.shape,
        group=256,
        codes=encoded.pack_codes(row, weight.weight.bits),
        scale=np.ones((1, 1), np.float32),
    )
    [(matrix, _)] = place_matrices([one], None, dtype=torch.float32, device=CPU, keep_codes=True)
    values = dequantize(matrix, dtype=torch.float32, tuning=TUNING)
    np.testing.assert_array_equal(values.numpy()[0], table[row[0]])


@pytest.mark.parametrize("shape", [(64, 128), (37, 101), (33, 65), (24, 192)])
@pytest.mark.parametrize("block", [(32, 64), (8, 16), (5, 32)])
def test_scale_blocks(rng, shape, block):
    weight = encoded.group_float(rng, shape, "f8_e4m3", shape[1], block=block)
    check(rng, weight, 3, torch.float32)
    shared = packed(weight).scale.values.shape[-1]
    assert shared == (1 if block[0] % 8 == 0 else 8)


def test_scale_blocks_are_cut_and_fused(rng):
    """Where a part ends within a block, the next one begins with a block of its own."""
    parts = [
        encoded.group_float(rng, (rows, 128), "f8_e4m3", 128, block=(32, 64)) for rows in (40, 24)
    ]
    actual = dequantize(packed(*parts), dtype=torch.float32, tuning=TUNING)
    assert_near(actual, np.concatenate([part.values for part in parts]), 1e-6)
    for rank in range(2):
        matrix = packed(*parts, shard=Shard(axis="columns", rank=rank, ranks=2))
        actual = dequantize(matrix, dtype=torch.float32, tuning=TUNING)
        halves = [np.split(part.values, 2, axis=1)[rank] for part in parts]
        assert_near(actual, np.concatenate(halves), 1e-6)
