"""What a backend declares, and how a device answers for memory and after its end."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polysilicon.backend import (
    CONTRACT_VERSION,
    KV_DTYPES,
    AdapterSpec,
    AdapterTarget,
    Backend,
    Batch,
    Device,
    DeviceError,
    KVSpec,
    Ops,
    OutOfMemory,
    Plane,
    Unavailable,
)
from polysilicon.testing import encoded
from polysilicon.testing.attention import AttentionBench, AttentionCase, Extension
from polysilicon.testing.kit import COMPUTE_BOUNDS, Kit, as_forward, assert_close


def spec_of(device: Device, heads: int = 8) -> KVSpec:
    return KVSpec(
        group=0,
        name="memory",
        layers=(0, 1),
        window=None,
        planes=tuple(Plane(name=name, heads=heads, dim=64, dtype="f16") for name in "kv"),
        page_size=device.capabilities.page_sizes[0],
    )


@pytest.fixture(autouse=True)
def collected() -> None:
    """What earlier tests left to the collector must not go while memory is compared."""
    gc.collect()


def test_backend(backend: Backend) -> None:
    assert isinstance(backend, Backend)
    assert backend.contract[0] == CONTRACT_VERSION[0]
    assert backend.contract <= CONTRACT_VERSION
    found = backend.probe()
    assert not isinstance(found, Unavailable)
    for info in found:
        assert info.name
        assert info.memory > 0


def test_unknown_options_are_refused(backend: Backend) -> None:
    with pytest.raises(ValueError, match="no_such_option"):
        backend.open(0, {"no_such_option": "1"})


def test_capabilities(kit: Kit) -> None:
    capabilities = kit.capabilities
    assert capabilities.compute in COMPUTE_BOUNDS
    assert "f16" in capabilities.kv_dtypes, "every device stores f16"
    assert set(capabilities.kv_dtypes) <= set(KV_DTYPES)
    assert len(set(capabilities.kv_dtypes)) == len(capabilities.kv_dtypes)
    assert capabilities.page_sizes
    assert len(set(capabilities.page_sizes)) == len(capabilities.page_sizes)
    for size in capabilities.page_sizes:
        assert size > 0
        assert size < 16 or size % 16 == 0
    assert any(capabilities.takes(f"dense:{name}") for name in KV_DTYPES)
    assert capabilities.adapters >= 0


def test_ceilings(kit: Kit) -> None:
    """Of a device that measures its hardware: positive numbers, by names that the planner knows."""
    for nbytes in (1 << 20, (1 << 20) + 12345):
        found = kit.device.ceilings(nbytes)
        assert set(found) <= {"bandwidth", *COMPUTE_BOUNDS, "fp8", "fp4"}
        assert all(math.isfinite(rate) and rate > 0 for rate in found.values())
        assert not found or "bandwidth" in found


def test_memory_follows_pools(kit: Kit) -> None:
    """What a pool takes is there while it is open and gone when it is closed."""
    spec = spec_of(kit.device)
    before = kit.device.memory()
    assert 0 <= before.free <= before.total
    assert set(before.used) <= {"weights", "kv", "adapters", "workspace", "graphs"}
    pool = kit.device.kv_pool(spec, 65)
    during = kit.device.memory()
    assert during.used["kv"] - before.used.get("kv", 0) >= 65 * spec.page_bytes
    pool.close()
    assert kit.device.memory().used.get("kv", 0) == before.used.get("kv", 0)


def test_memory_follows_weights(kit: Kit) -> None:
    before = kit.device.memory().used.get("weights", 0)
    handle, _ = kit.dense(kit.normal(512, 512))
    assert handle.nbytes > 0
    assert kit.device.memory().used["weights"] - before >= handle.nbytes


def test_memory_follows_adapters(kit: Kit) -> None:
    if not kit.capabilities.adapters:
        pytest.skip("declares no adapters")
    before = kit.device.memory().used.get("adapters", 0)
    rank = min(8, kit.capabilities.max_adapter_rank)
    target = AdapterTarget(inputs=256, outputs=(256,))
    pool = kit.device.adapter_pool(AdapterSpec(max_rank=rank, targets={"only": target}), 2)
    pool.write(1, {"only": [(kit.normal(rank, 256), kit.normal(256, rank))]})
    assert kit.device.memory().used["adapters"] > before
    pool.close()
    assert kit.device.memory().used.get("adapters", 0) == before


def test_out_of_memory_changes_nothing(kit: Kit) -> None:
    spec = spec_of(kit.device)
    used = kit.device.memory().used
    pages = 4 * kit.device.memory().total // spec.page_bytes
    with pytest.raises(OutOfMemory):
        kit.device.kv_pool(spec, pages)
    assert kit.device.memory().used == used
    bench = AttentionBench(kit, AttentionCase())
    bench.step([Extension(context=bench.context(5), tokens=bench.random_tokens(5))])


def test_closed_pool(kit: Kit) -> None:
    """Using it is an error, not garbage; closing it again is none."""
    pool = kit.device.kv_pool(spec_of(kit.device), 4)
    pool.close()
    pool.close()
    slots = np.array([1], np.int32)
    with pytest.raises(DeviceError, match="closed"):
        pool.copy(slots, slots + 1)


def test_closed_device(open_device: Callable[..., Device], rng: np.random.Generator) -> None:
    """Its pools and programs end with it."""
    device = open_device()
    kit = Kit(device, rng)
    table, _ = kit.dense(kit.normal(4, 8))
    program = device.compile(as_forward(lambda ops, batch: ops.embed(table, batch.tokens)))
    pool = device.kv_pool(spec_of(device), 4)
    device.close()
    device.close()
    slots = np.array([1], np.int32)
    with pytest.raises(DeviceError, match="closed"):
        pool.copy(slots, slots + 1)
    with pytest.raises(DeviceError, match="closed"):
        program(kit.rows([0]), None)
    with pytest.raises(DeviceError, match="closed"):
        device.kv_pool(spec_of(device), 4)


@pytest.fixture
def deterministic(kit: Kit, open_device: Callable[..., Device], rng: np.random.Generator) -> Kit:
    if not kit.capabilities.deterministic:
        pytest.skip("declares no determinism")
    return Kit(open_device({"deterministic": "1"}), rng)


@pytest.mark.parametrize("kind", ["dense:f32", "dense:bf16", "affine:4/32", "affine:6/16"])
def test_deterministic_products(deterministic: Kit, kind: str) -> None:
    """A row's product is the same to the bit, however many rows are computed with it."""
    kit = deterministic
    weight = kit.put(encoded.of_kind(kind)(kit.rng, (129, 256)).weight)
    x, _ = kit.dense(kit.normal(130, 256))

    def computation(ops: Ops, batch: Batch) -> Any:
        return ops.linear(ops.embed(x, batch.tokens), weight)[0]

    program = kit.device.compile(as_forward(computation))
    whole = program(kit.rows(range(130)), None).result().logits
    for start, stop in ((0, 1), (5, 7), (20, 27), (40, 73), (129, 130)):
        part = program(kit.rows(range(start, stop)), None).result().logits
        assert np.array_equal(part, whole[start:stop])


@pytest.mark.parametrize("window", [None, 40])
def test_deterministic_attention(deterministic: Kit, window: int | None) -> None:
    """However a prompt is cut into chunks, and whatever else is in the batch."""
    kit = deterministic
    size = kit.capabilities.page_sizes[0]
    bench = AttentionBench(kit, AttentionCase(window=window), pages=8 * -(-150 // size) + 1)
    program = kit.device.compile(as_forward(bench.forward))
    tokens = bench.random_tokens(150)

    def outputs(chunk: int, beside: bool) -> Any:
        context, other = bench.context(150), bench.context(150)
        rows = []
        for start in range(0, 150, chunk):
            extension = Extension(context=context, tokens=tokens[start : start + chunk])
            neighbour = Extension(context=other, tokens=bench.random_tokens(1))
            extensions = [neighbour, extension] if beside else [extension]
            result = program(bench.batch(extensions), None).result().logits
            rows.append(result[1:] if beside else result)
            for extended in extensions:
                extended.context.tokens += extended.tokens
        return np.concatenate(rows)

    whole = outputs(150, False)
    for chunk, beside in ((1, True), (64, False), (37, True)):
        assert np.array_equal(outputs(chunk, beside), whole), (chunk, beside)


def test_the_kit_can_fail() -> None:
    """The comparison that everything rests on tells a difference from none."""
    expected = np.array([[1.0, -2.0]])
    assert_close(expected, expected, 0.0)
    with pytest.raises(AssertionError, match="exceeds the bound"):
        assert_close(expected + 1e-3, expected, 1e-4)
    with pytest.raises(AssertionError, match="not finite"):
        assert_close(np.array([[1.0, np.nan]]), expected, 1e-4)
