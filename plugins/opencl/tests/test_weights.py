"""Placed weights that the conformance kit does not have: groups and scales of odd sizes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from polysilicon.backend import GroupAffine, GroupFloat, SuperScaled, pack_codes
from polysilicon.testing.kit import Kit, assert_close

from polysilicon_opencl.packing import pack_blocks


@pytest.fixture
def kit(device):
    return Kit(device, np.random.default_rng(np.random.SeedSequence()))


def affine(rng, shape, bits, group, **fields):
    groups = (*shape[:-1], shape[-1] // group)
    codes = rng.integers(0, 1 << bits, shape, np.uint8)
    defaults = {"scale": rng.uniform(0.01, 0.02, groups).astype(np.float16)}
    return GroupAffine(
        shape=shape, bits=bits, group=group, codes=pack_codes(codes, bits), **defaults | fields
    )


def super_scaled(rng, shape, span):
    codes = rng.integers(0, 64, shape, np.uint8)
    supers = rng.uniform(0.0005, 0.001, (shape[0], -(-shape[1] // span))).astype(np.float16)
    return SuperScaled(
        codes=pack_codes(codes, 6), bits=6, offset=0, count=shape[1], scale=supers, group=span
    )


def check(kit, weight):
    """Rows and products, for few and many inputs, against the values of the encoding."""
    values = weight.dequantize().astype(np.float64)
    handle = kit.device.put([weight])
    rows = [0, values.shape[0] - 1, 1]
    [taken] = kit.evaluate(lambda ops, batch: ops.embed(handle, batch.tokens), kit.rows(rows))
    np.testing.assert_allclose(taken, values[rows], rtol=1e-6, atol=1e-7)
    x, x_values = kit.dense(kit.normal(40, values.shape[1]))

    def product(ops, batch):
        return ops.linear(ops.embed(x, batch.tokens), handle)[0]

    for count in (1, 3, 40):
        [actual] = kit.evaluate(product, kit.rows(range(count)))
        assert_close(actual, x_values[:count] @ values.T, 2e-5)


@pytest.mark.parametrize("group", [16, 24, 48, 80, 96, 160, 224])
def test_groups_that_are_no_power_of_two(kit, group):
    rng = kit.rng
    bias = rng.uniform(-0.1, 0, (21, 3)).astype(np.float32)
    check(kit, affine(rng, (21, 3 * group), 4, group, bias=bias, offset=3))


@pytest.mark.parametrize("span", [1, 2, 3, 4, 8, 16, 64])
@pytest.mark.parametrize("group", [16, 32])
def test_spans_of_super_scales(kit, group, span):
    rng, columns = kit.rng, 40 * group
    scale, bias = (super_scaled(rng, (9, 40), span) for _ in range(2))
    check(kit, affine(rng, (9, columns), 5, group, scale=scale, bias=bias))


@pytest.mark.parametrize("block", [(1, 16), (7, 48), (32, 33), (64, 128)])
def test_scale_blocks(kit, block):
    rng, shape = kit.rng, (37, 101)
    groups = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    weight = GroupFloat(
        shape=shape,
        format="f8_e4m3",
        group=shape[1],
        codes=rng.integers(0, 120, shape, np.uint8),
        scale=rng.uniform(0.01, 0.02, groups).astype(np.float32),
        block=block,
    )
    check(kit, weight)


@pytest.mark.parametrize("bits", range(2, 9))
def test_packed_blocks_keep_their_size_and_their_codes(bits):
    """Byte j of a plane of p bits holds the codes j, j + 4 * p, ..., the highest bits first."""
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (3, 64), np.uint8)
    packed = pack_blocks(codes, bits)
    assert packed.size * 8 == codes.size * bits
    if bits == 8:
        assert np.array_equal(packed, codes)
        return
    block = packed[1].reshape(2, 4 * bits)[1].astype(int)
    found, position = np.zeros(32, int), 0
    for plane in (4, 2, 1):
        if bits & plane:
            for code in range(32):
                byte = block[position + code % (4 * plane)]
                part = byte >> plane * (code // (4 * plane)) & (1 << plane) - 1
                found[code] = found[code] << plane | part
            position += 4 * plane
    assert np.array_equal(found, codes[1, 32:])


def test_parts_of_one_encoding_are_one_matrix(kit):
    parts = [affine(kit.rng, (rows, 64), 4, 32) for rows in (5, 8, 3)]
    assert len(kit.device.put(parts).matrices) == 1
    other = dataclasses.replace(parts[1], offset=1)
    assert len(kit.device.put([parts[0], other, parts[2]]).matrices) == 3


def test_codes_take_no_more_room_than_they_did(kit):
    weight = affine(kit.rng, (512, 1024), 4, 32)
    handle = kit.device.put([weight])
    assert weight.nbytes <= handle.nbytes <= weight.nbytes + 1024
