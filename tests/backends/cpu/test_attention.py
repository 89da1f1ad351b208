"""Native attention against float64, and against itself under other divisions of the work."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from polysilicon.backend import Batch, DeviceError, KVSpec, Rope, kv_planes
from polysilicon.testing import oracles
from polysilicon_cpu import library

try:
    library.load()
except library.LibraryError as failure:
    pytest.skip(str(failure), allow_module_level=True)

from polysilicon_cpu import levels
from polysilicon_cpu.device import CPUDevice
from polysilicon_cpu.native.attention import Attention
from polysilicon_cpu.options import Options
from polysilicon_cpu.pools import CPUKVPool

LEVELS = [level for level in levels.built() if levels.failure(level) is None]
LENGTH = 700


def _load_random() -> ModuleType:
    path = Path(__file__).parents[3] / "ci" / "cpu_random_attention.py"
    spec = importlib.util.spec_from_file_location("cpu_random_attention", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cpu_random_attention"] = module
    spec.loader.exec_module(module)
    return module


def test_random_attentions() -> None:
    """Some of what ci/cpu_random_attention.py checks by the million."""
    seed = int(np.random.default_rng().integers(1 << 32))
    assert _load_random().run(150, seed, seconds=60) >= 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    dtype: str = "bf16"
    key_heads: int = 2
    group: int = 3
    dim: int = 64
    window: int | None = None
    softcap: float | None = None
    page_size: int = 16


SHAPES = [
    Shape(),
    Shape(dtype="f16", group=1, dim=80, softcap=30.0, page_size=32),
    Shape(dtype="f32", key_heads=1, group=8, dim=96, window=100),
    Shape(group=5, dim=256, window=33, page_size=4),
    Shape(dtype="f16", key_heads=1, group=16, dim=32, window=300, softcap=2.0, page_size=64),
    Shape(dtype="int8"),
    Shape(dtype="fp8_e4m3", dim=80, page_size=8),
    Shape(dtype="fp8_e4m3", key_heads=1, group=8, dim=64, window=90),
    Shape(dtype="int8", key_heads=1, group=9, dim=96, window=70, softcap=30.0, page_size=4),
]


class Bench:
    """A prompt of LENGTH tokens, and others of the same length, in one pool."""

    def __init__(self, device: CPUDevice, shape: Shape, others: int = 0) -> None:
        self.shape = shape
        rng = np.random.default_rng(7)
        self.widths = [
            shape.key_heads * shape.group * shape.dim,
            shape.key_heads * shape.dim,
            shape.key_heads * shape.dim,
        ]
        # Everyone's queries, keys and values; the first sequence's do not depend on the others.
        self.inputs = [
            [rng.normal(0, 1.2, (LENGTH, width)).astype(np.float32) for width in self.widths]
            for _ in range(1 + others)
        ]
        per_sequence = -(-LENGTH // shape.page_size)
        count = (1 + others) * per_sequence + 1
        order = np.random.default_rng(others).permutation(np.arange(1, count)).astype(np.int32)
        self.tables = order.reshape(1 + others, per_sequence)
        planes = kv_planes(
            heads=shape.key_heads, key_dim=shape.dim, value_dim=shape.dim, dtype=shape.dtype
        )
        spec = KVSpec(
            group=0, name="bench", layers=(0,), window=shape.window, planes=planes,
            page_size=shape.page_size,
        )  # fmt: skip
        self.pool = CPUKVPool(device, spec, count)
        self.attention = Attention(
            device, self.pool, heads=shape.key_heads * shape.group, scale=shape.dim**-0.5,
            softcap=shape.softcap, exact=True,
            rope=Rope(dim=32, frequencies=tuple(1000.0 ** (-np.arange(16) / 16))),
        )  # fmt: skip

    def step(self, chunks: Sequence[tuple[int, int, int]]) -> list[Any]:
        """(sequence, begin, end) of each chunk to their outputs."""
        inputs = [
            np.concatenate([self.inputs[s][part][begin:end] for s, begin, end in chunks])
            for part in range(3)
        ]
        batch = batch_of(chunks, self.tables, self.shape.page_size)
        output = self.attention(inputs[0], inputs[1], inputs[2], batch, 0)
        return np.split(output, batch.query_start[1:-1])


def batch_of(chunks: Sequence[tuple[int, int, int]], tables: Any, size: int) -> Batch:
    counts = [end - begin for _, begin, end in chunks]
    positions = np.concatenate([np.arange(begin, end) for _, begin, end in chunks])
    slots = np.concatenate([tables[s][np.arange(begin, end) // size] * size
                            for s, begin, end in chunks]) + positions % size  # fmt: skip
    total = sum(counts)
    return Batch(
        tokens=np.zeros(total, np.int32),
        token_source=np.full(total, -1, np.int32),
        positions=positions.astype(np.int32),
        query_start=np.cumsum([0, *counts]).astype(np.int32),
        context_len=np.array([end for _, _, end in chunks], np.int32),
        page_tables=(np.ascontiguousarray(tables[[s for s, _, _ in chunks]]),),
        slots=(slots.astype(np.int32),),
        logit_rows=np.zeros(0, np.int32),
        sequence_slot=np.arange(len(chunks), dtype=np.int32),
        adapter_slot=np.zeros(len(chunks), np.int32),
    )


def borders(sizes: Sequence[int]) -> list[tuple[int, int]]:
    ends = np.cumsum(sizes)
    assert ends[-1] == LENGTH
    return list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_are_bitwise_independent(level: str, shape: Shape) -> None:
    """Of chunks, neighbours and the number of threads."""
    results = []
    for threads, sizes, others in (
        (1, [LENGTH], 0),
        (2, [7] * 100, 0),
        (3, [1] * 30 + [270, 1, 1, 398], 4),
        (7, [699, 1], 32),
    ):
        device = CPUDevice(Options(level=level, threads=threads, deterministic=True))
        try:
            bench = Bench(device, shape, others)
            outputs = []
            for number, (begin, end) in enumerate(borders(sizes)):
                neighbours = [(1 + s, number * 5, number * 5 + 5) for s in range(others)]
                step = bench.step([*neighbours, (0, begin, end)])
                outputs.append(step[-1])
            results.append(np.concatenate(outputs))
        finally:
            device.close()
    for other in results[1:]:
        assert np.array_equal(results[0], other)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["bf16", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("prefix", [255, 256, 600])
def test_sharing_pages_changes_no_bit(level: str, prefix: int, dtype: str) -> None:
    """Sequences whose tables begin alike, some with more in common than others."""
    device = CPUDevice(Options(level=level, threads=2))
    bench = Bench(device, Shape(dtype=dtype), others=5)
    size = bench.shape.page_size
    shared = prefix // size
    for sequence in range(1, 4):
        bench.tables[sequence, :shared] = bench.tables[0, :shared]
    bench.tables[4, : 256 // size] = bench.tables[0, : 256 // size]
    start = {0: 0, 1: shared * size, 2: shared * size, 3: shared * size, 4: 256, 5: 0}
    for sequence, begin in start.items():  # whoever owns a page fills it
        bench.step([(sequence, begin, LENGTH - 3 - sequence)])
    chunks = [(s, LENGTH - 3 - s, LENGTH - 2 - s + (s == 2)) for s in (4, 1, 0, 5, 3, 2)]
    together = bench.step(chunks)
    for chunk, output in zip(chunks, together, strict=True):
        [alone] = bench.step([chunk])
        assert np.array_equal(alone, output), chunk
    device.close()


@pytest.mark.parametrize("level", LEVELS)
def test_rotation_far_out(level: str) -> None:
    """One token, which sees only itself, and so does not tell; two, whose scores turn with the
    distance alone: angles are right up to a million tokens."""
    device = CPUDevice(Options(level=level, threads=1))
    rng = np.random.default_rng()
    rope = Rope(dim=64, frequencies=tuple(rng.uniform(0, 1, 32)))
    planes = kv_planes(heads=1, key_dim=64, value_dim=64, dtype="f32")
    spec = KVSpec(group=0, name="far", layers=(0,), window=None, planes=planes, page_size=16)
    pool = CPUKVPool(device, spec, 2)
    attention = Attention(device, pool, heads=1, scale=0.3, rope=rope)
    for _ in range(20):
        positions = rng.integers(0, 1 << 20, 8).astype(np.int32)
        q, k, v = rng.normal(0, 1, (3, 8, 64)).astype(np.float32)
        batch = dataclasses.replace(batch_of([(0, 0, 8)], np.array([[1]]), 16), positions=positions)
        turned = [oracles.rotate(x[:, None].astype(np.float64), positions, rope) for x in (q, k)]
        expected = oracles.attend(
            turned[0],
            turned[1],
            v[:, None].astype(np.float64),
            np.tri(8, dtype=np.bool_),
            scale=0.3,
        )
        np.testing.assert_allclose(attention(q, k, v, batch, 0), expected, atol=2e-5)
    device.close()


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("page_tables", lambda b: (b.page_tables[0][:, :2],), "ends before its context"),
        ("page_tables", lambda b: (b.page_tables[0] + 1000,), "pages of sequence 0"),
        ("page_tables", lambda b: (b.page_tables[0] - 1000,), "pages of sequence 0"),
        ("slots", lambda b: (b.slots[0] + 100_000,), "slots must lie in"),
        ("slots", lambda b: (b.slots[0] - 100_000,), "slots must lie in"),
        ("context_len", lambda b: b.context_len - 700, "tokens in a context of"),
        ("query_start", lambda b: b.query_start + 1, "query_start must rise"),
        ("tree_mask", lambda _: np.ones((LENGTH, 3), np.bool_), "the tree mask has 3 columns"),
    ],
)
def test_batches_that_do_not_fit_the_pool(
    device: CPUDevice, field: str, change: Any, message: str
) -> None:
    bench = Bench(device, Shape())
    batch = batch_of([(0, 0, LENGTH)], bench.tables, 16)
    changed = {field: change(batch)}
    if field == "page_tables":
        changed[field] = tuple(np.ascontiguousarray(table) for table in changed[field])
    bad = dataclasses.replace(batch, **changed)
    with pytest.raises(DeviceError, match=message):
        bench.attention(*bench.inputs[0], bad, 0)
