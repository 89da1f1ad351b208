"""Our own Metal kernels, and their launches.

A kernel is the body of a function in `NAME.metal`; MLX writes the signature from the arrays and
compiles it when it is first launched. `tests/backends/metal` compiles the same bodies with a C++
compiler, for machines without Metal.
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from polysilicon.backend import Batch, KVSpec
from polysilicon_metal.attention import Keys, QueryBlocks, Scoring

_SIMD_GROUPS = 4
_PART = 256
"""Keys of a part, where queries are so few that a GPU is not filled without parts."""

_LARGEST_ROWS = 8
_REGISTERS = 64
"""Floats of queries and of sums that a lane holds of each."""

_ATTENTION_INPUTS = (
    "q", "k", "v", "k_scale", "v_scale", "table", "rows", "sequences", "query_start",
    "context_len", "positions", "tree", "sizes", "numbers",
)  # fmt: skip
_PRODUCT_INPUTS = ("x", "codes", "scale_even", "scale_odd", "bias_even", "bias_odd", "sizes")


def source(name: str) -> str:
    """The body of a kernel, or functions that stand before one."""
    return importlib.resources.files(__name__).joinpath(f"{name}.metal").read_text()


@functools.cache
def _kernel(
    name: str, inputs: Sequence[str], outputs: Sequence[str], header: str = ""
) -> Callable[..., Any]:
    """header: a file of functions that the kernel calls."""
    kernel: Any = mx.fast.metal_kernel(
        name=f"polysilicon_{name}",
        input_names=inputs,
        output_names=outputs,
        source=source(name),
        header=source(header) if header else "",
    )
    launch: Callable[..., Any] = kernel
    return launch


def attend(
    q: mx.array,
    keys: Keys,
    spec: KVSpec,
    batch: Batch,
    blocks: QueryBlocks,
    scoring: Scoring,
    sinks: mx.array | None,
) -> mx.array:
    """As `attention.attend`, `[B, Q, H, Dh]` to `[B, Q, H, Dv]`."""
    count, queries, heads, key_width = q.shape
    key_heads, value_width = keys.v.shape[1:]
    elements = (max(key_width, value_width) + 31) // 32
    group = heads // key_heads
    rows = max(1, min(_LARGEST_ROWS, queries * group, _REGISTERS // elements))
    chunks = -(-queries * group // rows)
    context = max(blocks.context, 1)
    parts = -(-context // _PART) if queries == 1 else 1
    table = batch.page_tables[spec.group]
    nothing = mx.zeros(1)
    mask = batch.tree_mask
    numbers = mx.array([scoring.scale, scoring.softcap or 0.0])
    tree_width = 0 if mask is None else mask.shape[1]
    part = _PART if parts > 1 else context
    sizes = mx.array([batch.positions.shape[0], table.shape[1], tree_width, part])
    shape = (parts, count, queries, heads)
    kernel = _kernel("attention", _ATTENTION_INPUTS, ("sums", "totals", "tops"), "stored")
    sums, totals, tops = kernel(
        inputs=[
            q,
            keys.k,
            keys.v,
            nothing if keys.k_scale is None else keys.k_scale,
            nothing if keys.v_scale is None else keys.v_scale,
            table,
            blocks.rows,
            blocks.sequences,
            batch.query_start,
            batch.context_len,
            batch.positions,
            nothing if mask is None else mask,
            sizes,
            numbers,
        ],
        template=[
            ("H", heads),
            ("HK", key_heads),
            ("DK", key_width),
            ("DV", value_width),
            ("Q", queries),
            ("ROWS", rows),
            ("PAGE", spec.page_size),
            ("WINDOW", spec.window or 0),
            ("SIMD_GROUPS", _SIMD_GROUPS),
            ("QUANTISED", keys.k_scale is not None),
            ("CAUSAL", scoring.causal),
            ("TREE", mask is not None),
            ("SOFTCAP", scoring.softcap is not None),
        ],
        grid=(count * chunks * 32 * _SIMD_GROUPS, key_heads, parts),
        threadgroup=(32 * _SIMD_GROUPS, 1, 1),
        output_shapes=[(*shape, value_width), shape, shape],
        output_dtypes=[mx.float32] * 3,
    )
    return _merged(sums, totals, tops, sinks)


def _merged(sums: mx.array, totals: mx.array, tops: mx.array, sinks: mx.array | None) -> mx.array:
    """The parts' weighted values `[parts, B, Q, H, Dv]` as one softmax's, zeros where none is."""
    top = tops.max(axis=0)
    if sinks is not None:
        top = mx.maximum(top, sinks)
    top = mx.where(top == -mx.inf, 0.0, top)
    factors = mx.exp(tops - top)
    total = (totals * factors).sum(axis=0)
    if sinks is not None:
        total = total + mx.exp(sinks - top)
    mixed = (sums * factors[..., None]).sum(axis=0)
    return mixed / mx.where(total == 0, 1.0, total)[..., None]


def product_of_16(
    x: mx.array,
    codes: mx.array,
    scales: Sequence[mx.array],
    biases: Sequence[mx.array],
    *,
    bits: int,
) -> mx.array:
    """`x W^T` float32 `[T, N]` of few rows `[T, width]`, for codes in groups of 16. scales, biases:
    `[N, width / 32]` of the even and of the odd groups."""
    tokens, width = x.shape
    outputs = codes.shape[0]
    kernel = _kernel("product_of_16", _PRODUCT_INPUTS, ("y",))
    products: list[mx.array] = kernel(
        inputs=[x, codes, *scales, *biases, mx.array([outputs, width // 32])],
        template=[("TOKENS", tokens), ("BITS", bits)],
        grid=(32, outputs, 1),
        threadgroup=(32, min(_SIMD_GROUPS, outputs), 1),
        output_shapes=[(tokens, outputs)],
        output_dtypes=[mx.float32],
    )
    return products[0]
