"""The codes of fp8 KV, to the bit: what each is read as, and which one a value is stored as."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from polysilicon.backend import KV_DTYPES, Batch, KVPool, KVSpec, Ops, kv_planes
from polysilicon.testing.batches import Chunk, make_batch
from polysilicon.testing.kit import Kit, assert_close

DIM = 32
LARGEST = 448.0
"""With it in a vector the scale is 1, and a code's value is the stored one's."""

Bytes = npt.NDArray[np.uint8]


def spec_of(kit: Kit) -> KVSpec:
    """One layer of one head, in pages whose tokens see themselves alone."""
    if "fp8_e4m3" not in kit.capabilities.kv_dtypes:
        pytest.skip("declares no fp8_e4m3 KV")
    return KVSpec(
        group=0,
        name="codes",
        layers=(0,),
        window=1,
        planes=kv_planes(heads=1, key_dim=DIM, value_dim=DIM, dtype="fp8_e4m3"),
        page_size=kit.capabilities.page_sizes[0],
    )


def positive_values() -> npt.NDArray[np.float32]:
    """The values of e4m3fn from 0 to 448, in order, from their definition: 3 bits of mantissa, an
    exponent with a bias of 7, subnormals where that is 0."""
    subnormal = [mantissa / 8 * 2.0**-6 for mantissa in range(8)]
    normal = [(1 + mantissa / 8) * 2.0 ** (e - 7) for e in range(1, 16) for mantissa in range(8)]
    return np.array(subnormal + normal[:-1], np.float32)


def test_every_code_is_read_as_its_value(kit: Kit) -> None:
    spec = spec_of(kit)
    values = np.concatenate([positive_values(), -positive_values()])
    codes = np.concatenate([np.arange(127), 128 + np.arange(127)]).astype(np.uint8)
    count = -(-len(codes) // DIM)
    order = kit.rng.permutation(count * DIM) % len(codes)
    data = pages_of(spec, codes[order].reshape(count, DIM))
    pages = list(range(1, 1 + len(data)))
    pool = kit.device.kv_pool(spec, 1 + len(pages))
    pool.write(pages, data).result()
    queries, _ = kit.dense(kit.normal(count, DIM))

    def computation(ops: Ops, batch: Batch) -> Any:
        q = ops.embed(queries, batch.tokens)
        return ops.attention(q, None, None, batch=batch, pool=pool, layer=0, heads=1, scale=1.0)

    chunk = Chunk(tokens=list(range(count)), pages=(pages,))
    (actual,) = kit.evaluate(computation, make_batch([chunk], (spec.page_size,)))
    expected = values[order].reshape(count, DIM).astype(np.float64)
    assert_close(actual, expected, 0)


def pages_of(spec: KVSpec, codes: Bytes) -> Bytes:
    """Canonical pages with these codes `[tokens, DIM]` as keys and as values, and scales of 1."""
    slots = -(-len(codes) // spec.page_size) * spec.page_size
    rows = np.zeros((slots, DIM), np.uint8)
    rows[: len(codes)] = codes
    blocks = rows.reshape(slots // spec.block, -1)
    header = np.frombuffer(spec.block_header(), np.uint8)
    scales = np.ones(2 * spec.block, "<f4").view(np.uint8)
    head, tail = (np.tile(part, (len(blocks), 1)) for part in (header, scales))
    return np.hstack([head, blocks, blocks, tail]).reshape(-1, *block_shape(spec))


def block_shape(spec: KVSpec) -> tuple[int, int]:
    """Of one page: blocks, and their bytes."""
    return spec.page_size // spec.block, spec.block_bytes


def test_values_are_stored_as_the_nearest_code(kit: Kit) -> None:
    """The values of codes, those in the middle of two, whose code is the even one, and those next
    to the middle; of either sign."""
    spec = spec_of(kit)
    exact = positive_values()
    middle = (exact[1:] + exact[:-1]) / 2
    # One off in the last of bfloat16's bits, so that every compute dtype holds them.
    bits = middle.astype(ml_dtypes.bfloat16).view(np.uint16)
    near = np.concatenate([bits - 1, bits + 1]).astype(np.uint16).view(ml_dtypes.bfloat16)
    sizes = np.concatenate([exact, middle, near.astype(np.float32)])
    inputs = kit.rng.permutation(np.concatenate([sizes, -sizes]))
    count = -(-len(inputs) // (DIM - 1))
    rows = np.full((count, DIM), LARGEST, np.float32)
    rows[:, 1:] = np.resize(inputs, (count, DIM - 1))
    table, placed = kit.dense(rows)
    assert np.array_equal(placed, rows)
    pages = list(range(1, 1 + -(-count // spec.page_size)))
    pool = kit.device.kv_pool(spec, 1 + len(pages))

    def computation(ops: Ops, batch: Batch) -> Any:
        x = ops.embed(table, batch.tokens)
        return ops.attention(x, x, x, batch=batch, pool=pool, layer=0, heads=1, scale=1.0)

    chunk = Chunk(tokens=list(range(count)), pages=(pages,))
    kit.evaluate(computation, make_batch([chunk], (spec.page_size,)))
    expected = rows.astype(KV_DTYPES["fp8_e4m3"]).view(np.uint8)
    for codes, scales in (stored(pool, pages, plane) for plane in range(2)):
        assert (scales[:count] == 1).all()
        wrong = codes[:count] != expected
        assert not wrong.any(), (
            f"{rows[wrong][:5]} stored as {codes[:count][wrong][:5]}, not {expected[wrong][:5]}"
        )


def stored(pool: KVPool, pages: list[int], plane: int) -> tuple[Bytes, npt.NDArray[np.float32]]:
    """Codes `[slots, DIM]` and scales `[slots]` of the keys (plane 0) or the values (1)."""
    spec = pool.spec
    into = np.zeros((len(pages), *block_shape(spec)), np.uint8)
    pool.read(pages, into).result()
    blocks = into.reshape(-1, spec.block_bytes)[:, len(spec.block_header()) :]
    size = spec.block * DIM
    scales = blocks[:, 2 * size :].copy().view("<f4").reshape(-1, 2, spec.block)
    codes = blocks[:, plane * size : (plane + 1) * size]
    return codes.reshape(-1, DIM), scales[:, plane].reshape(-1)
