"""What is allocated, what is used again, and what does not fit."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from polysilicon.backend import Dense, KVSpec, OutOfMemory, kv_planes
from polysilicon.testing.kit import Kit, as_forward

from polysilicon_opencl.values import rounded_size


@pytest.fixture
def kit(device):
    return Kit(device, np.random.default_rng(np.random.SeedSequence()))


def test_sizes_of_blocks():
    for size in [1, 256, 257, 511, 512, 1000, 4097, 10**6, 2**31 + 1]:
        rounded = rounded_size(size)
        assert size <= rounded <= max(256, size * 1.25 + 1)
        assert rounded_size(rounded) == rounded


def test_steps_of_one_shape_take_no_more_workspace(kit):
    table, _ = kit.dense(kit.normal(50, 64))
    weight, _ = kit.dense(kit.normal(64, 64))

    def computation(ops, batch):
        x = ops.embed(table, batch.tokens)
        for _ in range(5):
            (y,) = ops.linear(x, weight)
            x = ops.add(x, y)
        return x

    program = kit.device.compile(as_forward(computation))
    used = []
    for _ in range(6):
        program(kit.rows(range(20)), None).result()
        gc.collect()
        used.append(kit.device.memory().used["workspace"])
    assert used[2:] == used[1:2] * 4


def test_a_handle_s_memory_is_free_once_it_is_dropped(kit):
    gc.collect()
    before = kit.device.memory().used["weights"], kit.device.runtime.allocated
    handle = kit.device.put([Dense(array=np.ones((256, 256), np.float32))])
    assert kit.device.memory().used["weights"] == before[0] + handle.nbytes
    del handle
    gc.collect()
    assert (kit.device.memory().used["weights"], kit.device.runtime.allocated) == before


def test_a_plane_that_no_buffer_holds_is_refused(kit):
    limit = kit.device.runtime.device.max_mem_alloc_size
    spec = KVSpec(
        group=0,
        name="large",
        layers=(0,),
        window=None,
        planes=kv_planes(heads=1, key_dim=64, value_dim=64, dtype="f16"),
        page_size=16,
    )
    pages = limit // (16 * 64 * 2) + 1
    with pytest.raises(OutOfMemory, match="do not fit"):
        kit.device.kv_pool(spec, pages)


def test_errors_of_opencl_are_named_as_the_contract_does(kit):
    runtime = kit.device.runtime
    with pytest.raises(OutOfMemory):
        runtime.allocate("test", runtime.total)


def test_what_the_device_does_at_most(device):
    allocated = device.runtime.allocated
    for nbytes in (1, (1 << 20) + 3):
        found = device.ceilings(nbytes)
        assert set(found) == {"bandwidth", "f32"}
        assert all(np.isfinite(rate) and rate > 1e5 for rate in found.values())
    with pytest.raises(OutOfMemory):
        device.ceilings(1 << 50)
    assert device.runtime.allocated == allocated
