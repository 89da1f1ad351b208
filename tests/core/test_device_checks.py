"""What devices check of what they are given."""

from __future__ import annotations

import numpy as np
import pytest

from polysilicon.backend import (
    AdapterSpec,
    AdapterTarget,
    Dense,
    DeviceError,
    KVSpec,
    Plane,
    Shard,
)
from polysilicon.device_checks import (
    adapter_factors,
    check_adapter_slot,
    check_block_headers,
    check_indexes,
    check_pages,
    check_parts,
    shard_window,
)

SPEC = KVSpec(
    group=0,
    name="full",
    layers=(0,),
    window=None,
    planes=tuple(Plane(name=name, heads=2, dim=8, dtype="f16") for name in "kv"),
    page_size=16,
)
ADAPTERS = AdapterSpec(max_rank=4, targets={"qkv": AdapterTarget(inputs=6, outputs=(5, 3))})


def dense(*shape: int) -> Dense:
    return Dense(array=np.zeros(shape, np.float32))


@pytest.mark.parametrize(
    ("shapes", "shard", "message"),
    [
        ([], None, "at least one part"),
        ([(4, 6), (4, 7)], None, r"\(4, 6\), \(4, 7\)"),
        ([(4, 6), (4,)], None, "differ in their outputs only"),
        ([(2, 4, 6), (3, 4, 6)], None, "differ in their outputs only"),
        ([(1, 2, 4, 6)], None, "differ in their outputs only"),
        ([(4,)], Shard(axis="columns", rank=0, ranks=2), "no columns"),
        ([(4, 6), (3, 6)], Shard(axis="rows", rank=0, ranks=2), "3 rows do not divide"),
        ([(4, 5)], Shard(axis="columns", rank=0, ranks=2), "5 columns do not divide"),
    ],
)
def test_parts_that_do_not_go_together(shapes, shard, message):
    with pytest.raises(ValueError, match=message):
        check_parts([dense(*shape) for shape in shapes], shard)


@pytest.mark.parametrize("shapes", [[(4,), (3,)], [(4, 6), (3, 6)], [(2, 4, 6), (2, 3, 6)]])
def test_parts_that_go_together(shapes):
    check_parts([dense(*shape) for shape in shapes], None)


def test_the_windows_of_all_ranks_are_the_whole():
    windows = [shard_window(12, "rows", Shard(axis="rows", rank=r, ranks=3)) for r in range(3)]
    assert windows == [(0, 4), (4, 8), (8, 12)]
    assert shard_window(12, "columns", Shard(axis="rows", rank=1, ranks=3)) == (0, 12)
    assert shard_window(12, "rows", None) == (0, 12)


def test_blocks_of_pages():
    blocks = np.zeros((2, 1, SPEC.block_bytes), np.uint8)
    assert check_pages(SPEC, [3, 1], 4, blocks).tolist() == [3, 1]
    with pytest.raises(ValueError, match="canonical pages are uint8"):
        check_pages(SPEC, [3, 1, 2], 4, blocks)
    with pytest.raises(ValueError, match="got int8"):
        check_pages(SPEC, [3, 1], 4, blocks.view(np.int8))
    with pytest.raises(DeviceError, match=r"pages must lie in 0..3, got 1..4"):
        check_pages(SPEC, [4, 1], 4, blocks)


def test_blocks_of_another_group():
    header = np.frombuffer(SPEC.block_header(), np.uint8)
    blocks = np.zeros((2, 1, SPEC.block_bytes), np.uint8)
    blocks[..., : header.size] = header
    check_block_headers(SPEC, blocks)
    blocks[1, 0, 0] ^= 1
    with pytest.raises(ValueError, match="not of group 'full'"):
        check_block_headers(SPEC, blocks)
    check_block_headers(SPEC, blocks[:0])


def test_factors_are_contiguous_copies_of_the_parts_there_are():
    down, up = np.ones((6, 2), np.float64).T, np.ones((3, 2), np.float32)
    ((name, part, a, b),) = adapter_factors(ADAPTERS, {"qkv": [None, (down, up)]})
    assert (name, part, a.shape, b.shape, a.dtype) == ("qkv", 1, (2, 6), (3, 2), np.float32)
    assert a.flags.c_contiguous
    assert not np.shares_memory(b, up)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"other": [None]}, "'other' is not one of the pool's"),
        ({"qkv": [None]}, "'qkv' is not one of the pool's"),
        ({"qkv": [(np.ones((2, 5)), np.ones((5, 2))), None]}, r"A \[r, 6\] and B \[5, r\]"),
        ({"qkv": [(np.ones((2, 6)), np.ones((5, 3))), None]}, r"got \(2, 6\) and \(5, 3\)"),
        ({"qkv": [(np.ones((5, 6)), np.ones((5, 5))), None]}, "rank 5 is above"),
    ],
)
def test_adapters_that_do_not_fit_the_pool(weights, message):
    with pytest.raises(ValueError, match=message):
        list(adapter_factors(ADAPTERS, weights))


@pytest.mark.parametrize("slot", [-1, 0, 4])
def test_slots_that_are_not_there(slot):
    with pytest.raises(ValueError, match=r"adapter slots are 1..3"):
        check_adapter_slot(slot, 4)
    check_adapter_slot(3, 4)


@pytest.mark.parametrize("wrong", [-1, 7])
def test_indexes_beyond_the_end(wrong):
    check_indexes("rows", np.array([], np.int32), 0)
    check_indexes("rows", np.array([0, 6], np.int32), 7)
    with pytest.raises(DeviceError, match="rows must lie in"):
        check_indexes("rows", np.array([3, wrong], np.int32), 7)
