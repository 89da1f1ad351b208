"""Copies between slots, and pages as canonical bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from polysilicon.backend import (
    KV_DTYPES,
    KV_LARGEST_CODE,
    Batch,
    KVPool,
    KVScales,
    KVSpec,
    Ops,
    kv_planes,
)
from polysilicon.testing import oracles
from polysilicon.testing.attention import (
    AttentionBench,
    AttentionCase,
    Context,
    Extension,
    skip_without_kv_scales,
)
from polysilicon.testing.batches import Chunk, make_batch
from polysilicon.testing.kit import Kit, assert_close

HEADER_BYTES = 20
Bytes = npt.NDArray[np.uint8]


def spec_of(kit: Kit, *, page_size: int, kv_dtype: str) -> KVSpec:
    """Planes of different shapes, so that no two of their orders give the same bytes."""
    return KVSpec(
        group=0,
        name="pool",
        layers=(0, 2, 3),
        window=None,
        planes=kv_planes(heads=2, key_dim=32, value_dim=16, dtype=kv_dtype),
        page_size=page_size,
    )


def random_pages(kit: Kit, spec: KVSpec, count: int) -> Bytes:
    """Canonical bytes of finite numbers, built from the text of `KVPool.read`."""
    block = min(16, spec.page_size)
    blocks = []
    for _ in range(count * spec.page_size // block):
        data = spec.block_header()
        for _ in spec.layers:
            for plane in spec.planes:
                values = kit.normal(plane.heads, block, plane.dim, scale=20)
                data += values.astype(KV_DTYPES[plane.dtype]).tobytes()
        blocks.append(np.frombuffer(data, np.uint8))
    return np.stack(blocks).reshape(count, -1, len(blocks[0]))


def read(pool: KVPool, pages: list[int]) -> Bytes:
    spec = pool.spec
    into = np.zeros((len(pages), spec.page_size // spec.block, spec.block_bytes), np.uint8)
    pool.read(pages, into).result()
    return into


def block_values(spec: KVSpec, block: Bytes) -> dict[tuple[int, str], npt.NDArray[Any]]:
    """Arrays `[head, slot, dim]` of one canonical block by (layer's place, plane)."""
    result, position = {}, HEADER_BYTES
    for layer in range(len(spec.layers)):
        for plane in spec.planes:
            dtype = KV_DTYPES[plane.dtype]
            size = plane.heads * spec.block * plane.dim * dtype.itemsize
            values = np.frombuffer(block[position : position + size].tobytes(), dtype)
            result[layer, plane.name] = values.reshape(plane.heads, spec.block, plane.dim)
            position += size
    assert position == len(block)
    return result


def test_header(kit: Kit) -> None:
    """The header's layout as it stands in the contract."""
    spec = spec_of(kit, page_size=16, kv_dtype="f16")
    header = spec.block_header()
    assert len(header) == HEADER_BYTES
    assert header[:4] == b"PSKV"
    assert int.from_bytes(header[4:6], "little") == 1
    assert int.from_bytes(header[6:8], "little") == 16
    assert int.from_bytes(header[8:12], "little") == 3
    assert int.from_bytes(header[12:16], "little") == 2


def test_write_then_read(kit: Kit) -> None:
    """Any pages in any order come back byte for byte, for every page size and KV dtype."""
    for page_size in kit.capabilities.page_sizes:
        for kv_dtype in kit.capabilities.kv_dtypes:
            spec = spec_of(kit, page_size=page_size, kv_dtype=kv_dtype)
            pool = kit.device.kv_pool(spec, 7)
            data = random_pages(kit, spec, 6)
            pages = [int(page) for page in 1 + kit.rng.permutation(6)]
            given = data.copy()
            pool.write(pages, data).result()
            assert np.array_equal(data, given), "write changed the bytes it was given"
            assert np.array_equal(read(pool, pages), given)
            some = [2, 0, 5]
            assert np.array_equal(read(pool, [pages[i] for i in some]), given[some])
            pool.write([pages[3]], given[:1]).result()
            assert np.array_equal(read(pool, pages[:3] + pages[4:]), given[[0, 1, 2, 4, 5]])
            assert np.array_equal(read(pool, [pages[3]]), given[:1])
            assert read(pool, []).shape[0] == 0
            pool.close()


def test_blocks_fit_any_page_size(kit: Kit) -> None:
    """Blocks of 16 tokens read with one page size are written with every other."""
    sizes = [size for size in kit.capabilities.page_sizes if size % 16 == 0]
    if len(sizes) < 2:
        pytest.skip("declares no two page sizes of whole blocks")
    largest = max(sizes)
    source_spec = spec_of(kit, page_size=sizes[0], kv_dtype="f16")
    count = largest // sizes[0]
    source = kit.device.kv_pool(source_spec, count + 1)
    data = random_pages(kit, source_spec, count)
    source.write(list(range(1, count + 1)), data).result()
    blocks = read(source, list(range(1, count + 1))).reshape(-1, source_spec.block_bytes)
    for size in sizes:
        pool = kit.device.kv_pool(spec_of(kit, page_size=size, kv_dtype="f16"), largest // size + 1)
        pages = list(range(1, largest // size + 1))
        shaped = blocks.reshape(len(pages), size // 16, -1)
        pool.write(pages, shaped).result()
        assert np.array_equal(read(pool, pages), shaped)
        pool.close()


def test_other_headers_are_refused(kit: Kit) -> None:
    spec = spec_of(kit, page_size=kit.capabilities.page_sizes[0], kv_dtype="f16")
    pool = kit.device.kv_pool(spec, 4)
    data = random_pages(kit, spec, 2)
    pool.write([1, 2], data).result()
    for position in range(HEADER_BYTES):
        wrong = data[::-1].copy()
        wrong[1, -1, position] ^= 1
        with pytest.raises(ValueError, match=r"\w"):
            pool.write([1, 2], wrong)
    assert np.array_equal(read(pool, [1, 2]), data), "a refused write changed a page"


def test_copy_slots(kit: Kit) -> None:
    """Slots of all layers and planes, across pages; the index arrays may be reused at once."""
    page_size = kit.capabilities.page_sizes[0]
    spec = spec_of(kit, page_size=page_size, kv_dtype="f16")
    pool = kit.device.kv_pool(spec, 5)
    data = random_pages(kit, spec, 4)
    pool.write([1, 2, 3, 4], data).result()
    slots = page_size + kit.rng.permutation(4 * page_size)
    count = min(11, len(slots) // 2)
    source, target = (part.astype(np.int32) for part in (slots[:count], slots[count : 2 * count]))
    moves = dict(zip(target.tolist(), source.tolist(), strict=True))
    pool.copy(source, target)
    source[:], target[:] = 0, 0
    actual = read(pool, [1, 2, 3, 4])
    for slot in range(page_size, 5 * page_size):
        origin = moves.get(slot, slot)
        for key in [(layer, plane) for layer in range(3) for plane in ("k", "v")]:
            expected = slot_values(spec, data, origin)[key]
            assert np.array_equal(slot_values(spec, actual, slot)[key], expected), (slot, key)


def slot_values(spec: KVSpec, data: Bytes, slot: int) -> dict[tuple[int, str], npt.NDArray[Any]]:
    """`[head, dim]` of a slot by (layer's place, plane), in pages 1, 2, ... of canonical bytes."""
    page, offset = divmod(slot, spec.page_size)
    block, row = divmod(offset, spec.block)
    values = block_values(spec, data[page - 1, block])
    return {key: array[:, row] for key, array in values.items()}


def test_copy_of_nothing(kit: Kit) -> None:
    spec = spec_of(kit, page_size=kit.capabilities.page_sizes[0], kv_dtype="f16")
    pool = kit.device.kv_pool(spec, 2)
    data = random_pages(kit, spec, 1)
    pool.write([1], data).result()
    pool.copy(np.empty(0, np.int32), np.empty(0, np.int32))
    assert np.array_equal(read(pool, [1]), data)


@pytest.mark.parametrize("kv_dtype", KV_LARGEST_CODE)
def test_quantised_blocks_carry_their_scales(kit: Kit, kv_dtype: str) -> None:
    """Behind the values of each layer: in what a token takes, in a block, and in the header."""
    plain, quantised = (spec_of(kit, page_size=16, kv_dtype=name) for name in ("f16", kv_dtype))
    assert plain.token_bytes == 3 * 2 * (32 + 16) * 2
    assert quantised.token_bytes == 3 * 2 * (32 + 16 + 4 + 4)
    assert quantised.block_bytes == HEADER_BYTES + 16 * quantised.token_bytes
    assert int.from_bytes(quantised.block_header()[12:16], "little") == 4
    names = list(block_values(quantised, np.zeros(quantised.block_bytes, np.uint8)))[:4]
    assert names == [(0, "k"), (0, "v"), (0, "k_scale"), (0, "v_scale")]


@pytest.mark.parametrize("kv_dtype", KV_LARGEST_CODE)
def test_quantised_extreme_vectors(kit: Kit, kv_dtype: str) -> None:
    """Zeros, values too small for a scale, and very large ones are stored as the contract says."""
    if kv_dtype not in kit.capabilities.kv_dtypes:
        pytest.skip(f"declares no {kv_dtype} KV")
    # Numbers that every dtype holds, times what the narrowest exponent allows.
    power = 12 if kit.capabilities.compute == "f16" else 100
    rows = np.concatenate([np.zeros((1, 32)), np.full((1, 32), 1e-37), kit.exact(6, 32)])
    rows[2:4] *= [[2.0**-power], [2.0**power]]
    rows[4] = [1.5, *[0] * 31]
    rows[6, 3], rows[7, 0] = np.inf, np.nan
    table, values = kit.dense(rows)
    spec = dataclasses.replace(
        spec_of(kit, page_size=kit.capabilities.page_sizes[0], kv_dtype=kv_dtype),
        planes=kv_planes(heads=1, key_dim=32, value_dim=32, dtype=kv_dtype),
    )
    pool = kit.device.kv_pool(spec, 1 + -(-len(rows) // spec.page_size))

    def computation(ops: Ops, batch: Batch) -> Any:
        x = ops.embed(table, batch.tokens)
        return ops.attention(x, x, x, batch=batch, pool=pool, layer=2, heads=1, scale=1.0)

    pages = list(range(1, pool.pages))
    chunk = Chunk(tokens=list(range(len(rows))), pages=(pages,))
    kit.evaluate(computation, make_batch([chunk], (spec.page_size,)))
    found: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in ("k", "v", "k_scale")}
    for block in read(pool, pages).reshape(-1, spec.block_bytes):
        for name, parts in found.items():
            parts.append(block_values(spec, block)[1, name][0])
    keys, others, scales = (
        np.concatenate(parts)[: len(rows)].astype(np.float64) for parts in found.values()
    )
    assert np.array_equal(keys, others)
    assert not scales[:2].any()
    assert np.isnan(scales[6:]).all()
    assert not keys[[0, 1, 6, 7]].any()
    largest = KV_LARGEST_CODE[kv_dtype]
    turned = values[2:6] @ oracles.hadamard(32) if kv_dtype == "int8" else values[2:6]
    np.testing.assert_allclose(
        scales[2:6], np.abs(turned).max(axis=1, keepdims=True) / largest, 1e-5
    )
    quotients = turned / scales[2:6]
    # Half the distance of codes: 1; or an eighth of the power of two below, 2^-9 at the least.
    step = np.ones_like(quotients)
    if kv_dtype == "fp8_e4m3":
        step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(quotients), 2.0**-6))) - 3)
    assert (np.abs(keys[2:6] - quotients) <= 0.501 * step).all()
    assert (np.abs(keys[2:6]).max(axis=1) == largest).all()


def test_calibrated_scales_are_stored(kit: Kit) -> None:
    """Each head's own for every token, codes beyond the largest at the largest; a vector that is
    not finite is stored as without them, and its neighbours are not."""
    skip_without_kv_scales(kit)
    if "fp8_e4m3" not in kit.capabilities.kv_dtypes:
        pytest.skip("declares no fp8_e4m3 KV")
    # Numbers that every dtype holds, times what the narrowest exponent allows.
    power = 12 if kit.capabilities.compute == "f16" else 100
    rows = np.concatenate([np.zeros((1, 64)), np.full((1, 64), 1e-37), kit.exact(30, 64)])
    rows[2:4] *= [[2.0**-power], [2.0**power]]
    rows[4, [3, 40]] = [np.inf, -np.inf]
    rows[5, 7], rows[6, 63] = np.nan, -np.inf
    table, values = kit.dense(rows)
    spec = dataclasses.replace(
        spec_of(kit, page_size=kit.capabilities.page_sizes[0], kv_dtype="fp8_e4m3"),
        planes=kv_planes(heads=2, key_dim=32, value_dim=32, dtype="fp8_e4m3"),
    )
    pool = kit.device.kv_pool(spec, 1 + -(-len(rows) // spec.page_size))
    scales = KVScales(k=(2.0**-9, 0.0017), v=(2.0**-126, 0.3))

    def computation(ops: Ops, batch: Batch) -> Any:
        x = ops.embed(table, batch.tokens)
        return ops.attention(
            x, x, x, batch=batch, pool=pool, layer=2, heads=2, scale=1.0, kv_scales=scales
        )

    pages = list(range(1, pool.pages))
    chunk = Chunk(tokens=list(range(len(rows))), pages=(pages,))
    kit.evaluate(computation, make_batch([chunk], (spec.page_size,)))
    blocks = [block_values(spec, b) for b in read(pool, pages).reshape(-1, spec.block_bytes)]
    for name, constants in (("k", scales.k), ("v", scales.v)):
        for head, constant in enumerate(constants):
            codes, stored = (
                np.concatenate([block[1, plane][head] for block in blocks])[: len(rows)]
                for plane in (name, f"{name}_scale")
            )
            given = values[:, 32 * head : 32 * (head + 1)]
            finite = np.isfinite(given).all(axis=1)
            assert np.array_equal(stored[finite, 0], np.full(finite.sum(), constant, np.float32))
            assert np.isnan(stored[~finite]).all()
            assert not codes[~finite].astype(np.float64).any()
            quotients = np.clip(given[finite] / np.float64(np.float32(constant)), -448, 448)
            step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(quotients), 2.0**-6))) - 3)
            assert (np.abs(codes[finite] - quotients) <= 0.501 * step).all()


def test_attention_writes_the_canonical_layout(kit: Kit) -> None:
    """What attention stored, read as bytes, is each token's key and value in its place."""
    for kv_dtype in kit.capabilities.kv_dtypes:
        bench = AttentionBench(kit, AttentionCase(kv_dtype=kv_dtype))
        length = 2 * bench.page_size + 3
        context = bench.context(length)
        bench.step([Extension(context=context, tokens=bench.random_tokens(length))])
        data = read(bench.pool, context.pages)
        keys, values = bench.stored_keys(context), bench.stored_values(context)
        place = bench.spec.layers.index(3)
        stored: dict[str, list[npt.NDArray[Any]]] = {"k": [], "v": []}
        for block in data.reshape(-1, bench.spec.block_bytes):
            for name, rows in stored.items():
                arrays = block_values(bench.spec, block)
                found = arrays[place, name].astype(np.float64)
                if kv_dtype in KV_LARGEST_CODE:
                    found = found * arrays[place, f"{name}_scale"]
                if kv_dtype == "int8":
                    found = found @ oracles.hadamard(64)
                rows.append(found.swapaxes(0, 1))
        for expected, name in ((keys, "k"), (values, "v")):
            actual = np.concatenate(stored[name])[:length]
            assert_close(actual, expected, bench.bound)
        bench.pool.close()


def test_pages_move_to_another_pool(kit: Kit) -> None:
    """Prefill here, decode there: pages written under other ids into a second pool."""
    bench = AttentionBench(kit, AttentionCase())
    length = 2 * bench.page_size + 3
    context = bench.context(length + 2)
    bench.step([Extension(context=context, tokens=bench.random_tokens(length))])
    data = read(bench.pool, context.pages)
    other = bench.another_pool()
    moved = Context(
        pages=other.context(length + 2).pages,
        tokens=list(context.tokens),
        positions=list(context.positions),
    )
    other.pool.write(moved.pages, data)
    for _ in range(2):
        other.step([Extension(context=moved, tokens=bench.random_tokens(1))])


def test_copied_prefix(kit: Kit) -> None:
    """A partly filled page is reused by copying its slots to a new page."""
    bench = AttentionBench(kit, AttentionCase())
    length = bench.page_size + bench.page_size // 2
    original = bench.context(length)
    bench.step([Extension(context=original, tokens=bench.random_tokens(length))])
    partial = bench.page_size // 2
    branch = Context(
        pages=[original.pages[0], *bench.context(bench.page_size).pages],
        tokens=list(original.tokens),
        positions=list(original.positions),
    )
    offsets = np.arange(partial, dtype=np.int32)
    bench.pool.copy(
        original.pages[1] * bench.page_size + offsets, branch.pages[1] * bench.page_size + offsets
    )
    bench.step([Extension(context=branch, tokens=bench.random_tokens(2)),
                Extension(context=original, tokens=bench.random_tokens(1))])  # fmt: skip


def test_reads_and_copies_keep_their_place(kit: Kit) -> None:
    """A read sees what earlier calls wrote and nothing of later ones, though it is awaited last."""
    bench = AttentionBench(kit, AttentionCase(kv_dtype="f16"))
    spec, pool = bench.spec, bench.pool
    first, second = random_pages(kit, spec, 1), random_pages(kit, spec, 1)
    intos = [np.zeros_like(first) for _ in range(3)]
    slots = np.arange(spec.page_size, dtype=np.int32)
    pool.write([1], first)
    before = pool.read([1], intos[0])
    pool.copy(spec.page_size + slots, 2 * spec.page_size + slots)
    pool.write([1], second)
    copied = pool.read([2], intos[1])
    after = pool.read([1], intos[2])
    for pending in (after, copied, before):
        pending.result()
    for into, expected in zip(intos, (first, first, second), strict=True):
        assert np.array_equal(into, expected)
