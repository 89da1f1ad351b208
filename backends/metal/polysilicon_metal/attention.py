"""Attention through page tables: which keys a query sees, and the path of MLX's own operations."""

from __future__ import annotations

import dataclasses

import mlx.core as mx

from polysilicon.backend import KV_LARGEST_CODE, Batch, KVSpec


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class QueryBlocks:
    """`plan.Blocks` on the device."""

    rows: mx.array
    sequences: mx.array
    context: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Keys:
    """One layer's planes, `[slots, Hk, Dh]`, `[slots, Hk, Dv]` and, of quantised ones, scales
    `[slots, Hk, 1]`. What is uint8 are codes of fp8_e4m3."""

    k: mx.array
    v: mx.array
    k_scale: mx.array | None = None
    v_scale: mx.array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring:
    """What `Ops.attention` is asked for beside the arrays."""

    scale: float
    softcap: float | None
    causal: bool


def turn(x: mx.array) -> mx.array:
    """The Walsh-Hadamard transform of `KV_DTYPES` over the last axis; its own inverse."""
    dim = x.shape[-1]
    block = dim & -dim
    if block == 1:
        return x
    turned = mx.hadamard_transform(x.reshape(*x.shape[:-1], dim // block, block), block**-0.5)
    return turned.reshape(x.shape)


def quantize(
    x: mx.array, dtype: str, calibrated: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Codes `[T, heads, dim]` and scales float32 `[T, heads, 1]` by the rule of `KV_DTYPES`;
    calibrated: scales `[heads, 1]` that take their place."""
    if dtype == "int8":
        x = turn(x)
    largest = KV_LARGEST_CODE[dtype]
    if calibrated is None:
        scale = mx.abs(x).max(axis=-1, keepdims=True) / largest
        scale = mx.where(scale < 2.0**-126, 0.0, scale)
    else:
        scale = calibrated
    finite = mx.isfinite(x).all(axis=-1, keepdims=True)
    scale = mx.where(finite, scale, mx.nan)
    quotients = mx.where(scale > 0, mx.clip(x / scale, -largest, largest), 0.0)
    codes = mx.round(quotients).astype(mx.int8) if dtype == "int8" else mx.to_fp8(quotients)
    return codes, scale


def visible_keys(
    batch: Batch, blocks: QueryBlocks, context: int, *, window: int | None, causal: bool
) -> tuple[mx.array, mx.array]:
    """What each query sees of its sequence's first `context` keys, bool `[B, Q, C]`, and which of
    those keys are the sequence's and may be seen by any, bool `[B, C]`."""
    sequence = blocks.sequences
    tokens = batch.positions.shape[0]
    begin = batch.query_start[sequence][:, None]
    end = batch.query_start[sequence + 1][:, None]
    length = batch.context_len[sequence][:, None]
    before = length - (end - begin)
    index = mx.arange(context, dtype=mx.int32)[None]
    own = index - before
    rows = mx.minimum(blocks.rows, tokens - 1)
    among_own = own[:, None, :] <= (rows - begin)[:, :, None]
    if batch.tree_mask is not None:
        width = batch.tree_mask.shape[1]
        column = mx.broadcast_to(mx.clip(own, 0, width - 1)[:, None, :], (*rows.shape, context))
        among_own = mx.take_along_axis(batch.tree_mask[rows], column, axis=2)
    elif not causal:
        among_own = mx.ones_like(among_own)
    seen = (index < length)[:, None, :] & ((own < 0)[:, None, :] | among_own)
    if window is not None:
        token = mx.clip(begin + own, 0, tokens - 1)
        key_position = mx.where(own < 0, index, batch.positions[token])
        seen = seen & (key_position[:, None, :] > batch.positions[rows][:, :, None] - window)
    seen = seen & (blocks.rows < tokens)[:, :, None]
    return seen, seen.any(axis=1)


def attend(
    q: mx.array,
    keys: Keys,
    spec: KVSpec,
    batch: Batch,
    blocks: QueryBlocks,
    scoring: Scoring,
    sinks: mx.array | None,
    visible: tuple[mx.array, mx.array],
) -> mx.array:
    """Queries `[B, Q, H, Dh]` of blocks to `[B, Q, H, Dv]`, with MLX's operations.

    The pages of each block's sequence are gathered. visible: of `visible_keys`.
    """
    count, queries, heads, width = q.shape
    key_heads, value_width = keys.v.shape[1:]
    group = heads // key_heads
    seen, used = visible
    context = seen.shape[-1]
    table = batch.page_tables[spec.group][blocks.sequences, : context // spec.page_size]

    def gathered(plane: mx.array, scale: mx.array | None) -> mx.array:
        """`[B, Hk, C, dim]`, zeros where nobody looks: what stands there may be no number."""
        if scale is not None:
            return gathered(plane, None) * gathered(scale, None)
        pages = plane.reshape(-1, spec.page_size, *plane.shape[1:])[table]
        values = pages.reshape(count, context, *plane.shape[1:])
        if values.dtype == mx.uint8:
            values = mx.from_fp8(values, mx.float32)
        values = values.astype(mx.float32)
        return mx.where(used[:, :, None, None], values, 0.0).swapaxes(1, 2)

    k = gathered(keys.k, keys.k_scale)
    v = gathered(keys.v, keys.v_scale)
    grouped = q.reshape(count, queries, key_heads, group, width).transpose(0, 2, 3, 1, 4)
    rows = (grouped * scoring.scale).reshape(count, key_heads, group * queries, width)
    scores = (rows @ k.swapaxes(-1, -2)).reshape(count, key_heads, group, queries, context)
    if scoring.softcap is not None:
        scores = scoring.softcap * mx.tanh(scores / scoring.softcap)
    scores = mx.where(seen[:, None, None], scores, -mx.inf)
    largest = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        own = sinks.reshape(1, key_heads, group, 1, 1)
        largest = mx.maximum(largest, own)
    largest = mx.where(mx.isinf(largest) & (largest < 0), 0.0, largest)
    weights = mx.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + mx.exp(own - largest)
    mixed = weights.reshape(count, key_heads, group * queries, context) @ v
    mixed = mixed.reshape(count, key_heads, group, queries, value_width)
    mixed = mixed / mx.where(total == 0, 1.0, total)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(count, queries, heads, value_width)
