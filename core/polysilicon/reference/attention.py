"""Attention over pages, one sequence and a bounded number of queries at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from polysilicon.backend import Batch, DeviceError
from polysilicon.device_checks import check_indexes
from polysilicon.reference.pools import ReferenceKVPool

Float32 = npt.NDArray[np.float32]

_QUERY_BLOCK = 256
"""Queries scored at once: bounds the score matrix of a long prefill."""


def paged_attention(
    q: Float32,
    *,
    batch: Batch,
    pool: ReferenceKVPool,
    layer: int,
    scale: float,
    softcap: float | None,
    sinks: Float32 | None,
    causal: bool,
) -> Float32:
    """Queries `[T, H, Dh]` against what the pool holds of each token's sequence: `[T, H, Dv]`.

    Tokens past `query_start[-1]` belong to no sequence and get zeros.
    """
    heads = q.shape[1]
    (_, key_heads, key_dim), (_, _, value_dim) = (pool.plane(p, layer).shape for p in ("k", "v"))
    if heads % key_heads or q.shape[2] != key_dim:
        raise ValueError(
            f"queries of {heads} heads of {q.shape[2]} do not fit the pool's {key_heads} of "
            f"{key_dim}"
        )
    output = np.zeros((len(q), heads, value_dim), np.float32)
    for sequence in range(len(batch.context_len)):
        begin, end = (int(row) for row in batch.query_start[sequence : sequence + 2])
        for first in range(begin, end, _QUERY_BLOCK):
            rows = range(first, min(first + _QUERY_BLOCK, end))
            low, visible = _visibility(batch, pool.spec.window, sequence, rows, causal)
            slots = _context_slots(batch, pool, sequence, low, low + visible.shape[1])
            output[rows.start : rows.stop] = _attend(
                q[rows.start : rows.stop],
                pool.load("k", layer, slots),
                pool.load("v", layer, slots),
                visible,
                scale=scale,
                softcap=softcap,
                sinks=sinks,
            )
    return output


def _visibility(
    batch: Batch, window: int | None, sequence: int, rows: range, causal: bool
) -> tuple[int, npt.NDArray[np.bool_]]:
    """The first context index that any of the rows may see, and from there on what each row sees:
    bool `[rows, context]`."""
    begin, end = (int(row) for row in batch.query_start[sequence : sequence + 2])
    context = int(batch.context_len[sequence])
    before = context - (end - begin)
    if before < 0:
        raise DeviceError(f"sequence {sequence} has {end - begin} tokens in a context of {context}")
    positions = batch.positions[rows.start : rows.stop, None].astype(np.int64)
    low = 0
    if window is not None:
        low = min(before, max(0, int(positions.min()) - window + 1))
    index = np.arange(low, context)
    own = index[index >= before] - before
    visible = np.ones((len(rows), len(index)), np.bool_)
    among_own = visible[:, len(index) - len(own) :]
    if batch.tree_mask is not None:
        if batch.tree_mask.shape[1] < len(own):
            raise DeviceError(
                f"the tree mask has {batch.tree_mask.shape[1]} columns for {len(own)} tokens"
            )
        among_own[:] = batch.tree_mask[rows.start : rows.stop, : len(own)]
    elif causal:
        among_own[:] = own <= np.arange(rows.start - begin, rows.stop - begin)[:, None]
    if window is not None:
        key_positions = np.concatenate([index[: len(index) - len(own)], batch.positions[begin:end]])
        visible &= key_positions > positions - window
    return low, visible


def _context_slots(
    batch: Batch, pool: ReferenceKVPool, sequence: int, low: int, high: int
) -> npt.NDArray[np.int64]:
    """Slots of the context indices `low` to `high` of a sequence."""
    size = pool.spec.page_size
    first = low // size
    table: npt.NDArray[Any] = batch.page_tables[pool.spec.group][sequence, first : -(-high // size)]
    if len(table) * size < high - first * size:
        raise DeviceError(f"the page table of sequence {sequence} ends before its context does")
    check_indexes(f"pages of sequence {sequence}", table, pool.pages)
    slots = (table.astype(np.int64)[:, None] * size + np.arange(size)).ravel()
    return slots[low - first * size : high - first * size]


def _attend(
    q: Float32,
    keys: Float32,
    values: Float32,
    visible: npt.NDArray[np.bool_],
    *,
    scale: float,
    softcap: float | None,
    sinks: Float32 | None,
) -> Float32:
    """Queries `[n, H, Dh]`, keys `[C, Hk, Dh]`, values `[C, Hk, Dv]`, visible `[n, C]`."""
    count, heads, width = q.shape
    context, key_heads, _ = keys.shape
    group = heads // key_heads
    grouped = q.reshape(count, key_heads, group, width).transpose(1, 2, 0, 3)
    # [Hk, group * n, Dh] x [Hk, Dh, C]
    scores = grouped.reshape(key_heads, group * count, width) @ keys.transpose(1, 2, 0)
    scores = scores.reshape(heads, count, context) * np.float32(scale)
    if softcap is not None:
        scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
    scores[:, ~visible] = -np.inf
    largest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        largest = np.maximum(largest, sinks[:, None, None])
    largest[np.isneginf(largest)] = 0
    weights = np.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks[:, None, None] - largest)
    total[total == 0] = 1
    mixed = weights.reshape(key_heads, group * count, context) @ values.transpose(1, 0, 2)
    mixed = mixed.reshape(heads, count, values.shape[2]) / total
    output: Float32 = mixed.transpose(1, 0, 2)
    return output
