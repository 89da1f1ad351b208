"""What the reference device refuses, and how it accounts for memory. Its arithmetic is held to
float64 by the conformance kit."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator

import numpy as np
import pytest

from polysilicon import host_memory
from polysilicon.backend import (
    AdapterRef,
    AdapterSpec,
    AdapterTarget,
    Batch,
    Dense,
    Device,
    DeviceError,
    GroupAffine,
    KVSpec,
    ModelOutputs,
    Ops,
    OutOfMemory,
    Plane,
    Program,
    Shard,
    pack_codes,
)
from polysilicon.reference.plugin import ReferenceBackend, polysilicon_backends
from polysilicon.testing.batches import Chunk, make_batch

PAGE = 4


@pytest.fixture
def device() -> Iterator[Device]:
    device = ReferenceBackend().open(0, {})
    yield device
    device.close()


def dense(*shape: int) -> Dense:
    return Dense(array=np.random.default_rng().standard_normal(shape, np.float32))


def kv_spec(page_size: int = PAGE) -> KVSpec:
    planes = tuple(Plane(name=name, heads=1, dim=8, dtype="f32") for name in "kv")
    return KVSpec(
        group=0, name="full", layers=(0,), window=None, planes=planes, page_size=page_size
    )


def one_layer(device: Device, pages: int = 4) -> Program:
    """A program of one attention over a table of eight tokens."""
    table = device.put([dense(8, 8)])
    pool = device.kv_pool(kv_spec(), pages)

    def forward(ops: Ops, batch: Batch) -> ModelOutputs:
        x = ops.embed(table, batch.tokens)
        y = ops.attention(x, x, x, batch=batch, pool=pool, layer=0, heads=1, scale=1.0)
        return ModelOutputs(logits=ops.select(y, batch.logit_rows), hidden=())

    return device.compile(forward)


def two_tokens() -> Batch:
    return make_batch([Chunk(tokens=[1, 2], pages=([3],))], (PAGE,))


def test_backend() -> None:
    [backend] = polysilicon_backends()
    [info] = backend.probe()
    assert (backend.name, info.name) == ("reference", "numpy")
    assert info.memory > 1 << 20


@pytest.mark.parametrize(
    ("index", "options", "words"),
    [
        (1, {}, "device 0 only"),
        (-1, {}, "device 0 only"),
        (0, {"threads": "2"}, "unknown option 'threads'"),
        (0, {"deterministic": "1"}, "not deterministic"),
    ],
)
def test_open_refuses(index: int, options: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ReferenceBackend().open(index, options)


def test_open_takes_deterministic_off() -> None:
    ReferenceBackend().open(0, {"deterministic": "0"}).close()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("tokens", [1, 8], "tokens must lie in 0..7, got 1..8"),
        ("tokens", [-1, 2], "tokens must lie"),
        ("slots", ([12, 16],), "slots must lie in 0..15"),
        ("slots", ([-1, 12],), "slots must lie"),
        ("page_tables", ([[4]],), "pages of sequence 0 must lie in 0..3"),
        ("page_tables", ([[-1]],), "pages of sequence 0 must lie"),
        ("context_len", [5], "page table of sequence 0 ends"),
        ("context_len", [1], "2 tokens in a context of 1"),
        ("logit_rows", [2], "rows must lie in 0..1"),
    ],
)
def test_indexes_out_of_range(device: Device, field: str, value: object, words: str) -> None:
    program = one_layer(device)
    program(two_tokens(), None)
    arrays = (
        tuple(np.array(item, np.int32) for item in value)
        if isinstance(value, tuple)
        else np.array(value, np.int32)
    )
    with pytest.raises(DeviceError, match=words):
        program(dataclasses.replace(two_tokens(), **{field: arrays}), None)


def test_token_source_without_a_step_before(device: Device) -> None:
    batch = dataclasses.replace(two_tokens(), token_source=np.array([-1, 0], np.int32))
    with pytest.raises(ValueError, match="there is none"):
        one_layer(device)(batch, None)


def test_narrow_tree_mask(device: Device) -> None:
    batch = dataclasses.replace(two_tokens(), tree_mask=np.ones((2, 1), np.bool_))
    with pytest.raises(DeviceError, match="1 columns for 2 tokens"):
        one_layer(device)(batch, None)


def test_put_refuses(device: Device) -> None:
    for parts, words in [
        ([], "at least one part"),
        ([dense(4, 8), dense(4, 9)], "differ in their outputs only"),
        ([dense(4, 8), dense(4)], "differ in their outputs only"),
        ([dense(2, 4, 8), dense(3, 4, 8)], "differ in their outputs only"),
    ]:
        with pytest.raises(ValueError, match=words):
            device.put(parts)
    with pytest.raises(ValueError, match="do not divide"):
        device.put([dense(5, 8)], Shard(axis="rows", rank=0, ranks=2))
    with pytest.raises(ValueError, match="no columns"):
        device.put([dense(8)], Shard(axis="columns", rank=0, ranks=2))


def test_adapter_pool_refuses(device: Device) -> None:
    spec = AdapterSpec(max_rank=2, targets={"q": AdapterTarget(inputs=8, outputs=(4,))})
    pool = device.adapter_pool(spec, 3)
    a, b = np.zeros((2, 8), np.float32), np.zeros((4, 2), np.float32)
    for slot in (0, 3, -1):
        with pytest.raises(ValueError, match=r"slots are 1\.\.2"):
            pool.write(slot, {"q": [(a, b)]})
        with pytest.raises(ValueError, match=r"slots are 1\.\.2"):
            pool.clear(slot)
    for weights, words in [
        ({"k": [(a, b)]}, "'k' is not one"),
        ({"q": [(a, b), None]}, "'q' is not one"),
        ({"q": [(a.T, b)]}, "takes A"),
        ({"q": [(np.zeros((3, 8)), np.zeros((4, 3)))]}, "rank 3 is above"),
    ]:
        with pytest.raises(ValueError, match=words):
            pool.write(1, weights)
    with pytest.raises(ValueError, match="at most"):
        device.adapter_pool(spec, 10_000)


def test_unknown_adapter_slot_in_a_batch(device: Device) -> None:
    spec = AdapterSpec(max_rank=2, targets={"q": AdapterTarget(inputs=8, outputs=(4,))})
    pool, table, weight = device.adapter_pool(spec, 3), device.put([dense(8, 8)]), dense(4, 8)
    handle = device.put([weight])

    def forward(ops: Ops, batch: Batch) -> ModelOutputs:
        adapters = AdapterRef(pool=pool, target="q")
        x = ops.embed(table, batch.tokens)
        [y] = ops.linear(x, handle, adapters=adapters, batch=batch)
        return ModelOutputs(logits=y, hidden=())

    program = device.compile(forward)
    assert program(make_batch([Chunk(tokens=[1])]), None).result().logits.shape == (1, 4)
    with pytest.raises(DeviceError, match=r"adapter slots must lie in 0\.\.2"):
        program(make_batch([Chunk(tokens=[1], adapter=3)]), None)


def test_kv_bytes_of_a_wrong_shape(device: Device) -> None:
    pool = device.kv_pool(kv_spec(), 4)
    for shape in [(1, 1, 8), (2, 1, pool.spec.block_bytes), (1, 2, pool.spec.block_bytes)]:
        with pytest.raises(ValueError, match="canonical pages are"):
            pool.read([1], np.zeros(shape, np.uint8))
    with pytest.raises(DeviceError, match="pages must lie"):
        pool.read([4], np.zeros((1, 1, pool.spec.block_bytes), np.uint8))


def test_page_size_that_is_not_declared(device: Device) -> None:
    with pytest.raises(ValueError, match="page size 17"):
        device.kv_pool(kv_spec(17), 4)


def test_memory_is_itemised_and_given_back(device: Device) -> None:
    assert device.memory().used == {"weights": 0, "kv": 0, "adapters": 0}
    handle = device.put([dense(16, 8), dense(8, 8)])
    pool = device.kv_pool(kv_spec(), 5)
    assert handle.nbytes == 24 * 8 * 4
    expected = {"weights": handle.nbytes, "kv": 5 * pool.spec.page_bytes, "adapters": 0}
    assert device.memory().used == expected
    pool.close()
    del handle
    gc.collect()
    assert device.memory().used == {"weights": 0, "kv": 0, "adapters": 0}


def test_weights_that_do_not_fit(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted as float32, whatever they take in the file, and before anything is allocated."""
    codes = np.zeros((64, 64), np.uint8)
    weight = GroupAffine(
        shape=(64, 64), bits=2, group=64, codes=pack_codes(codes, 2), scale=np.ones((64, 1), "f4")
    )
    monkeypatch.setattr(host_memory, "SMALL", 0)
    monkeypatch.setattr(host_memory, "free_memory", lambda: 4 * 64 * 64 - 1)
    with pytest.raises(OutOfMemory, match="16,384 bytes of weights"):
        device.put([weight])
    device.put([weight], Shard(axis="rows", rank=1, ranks=2))


def test_closed_device_frees_its_weights() -> None:
    device = ReferenceBackend().open(0, {})
    handle = device.put([dense(16, 8)])
    device.close()
    assert handle.nbytes == 0
    with pytest.raises(DeviceError, match="closed"):
        device.put([dense(2, 2)])
