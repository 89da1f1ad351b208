"""Float64 oracles of the ops, written from the formulas and not from the reference device."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from polysilicon.backend import KV_DTYPES, KV_LARGEST_CODE, Rope

Float64 = npt.NDArray[np.float64]


def rms_norm(x: Float64, weight: Float64, eps: float) -> Float64:
    mean_square = (x**2).sum(axis=-1, keepdims=True) / x.shape[-1]
    return np.asarray(x * (mean_square + eps) ** -0.5 * weight)


def layer_norm(x: Float64, weight: Float64, bias: Float64 | None, eps: float) -> Float64:
    variance = x.var(axis=-1, keepdims=True)
    normal = (x - x.mean(axis=-1, keepdims=True)) * (variance + eps) ** -0.5 * weight
    return np.asarray(normal if bias is None else normal + bias)


def rotate(x: Float64, positions: Sequence[int] | npt.NDArray[Any], rope: Rope) -> Float64:
    """Rope over `[T, heads, Dh]`: each pair as a complex number, turned by e^(i t)."""
    result = x.copy()
    for pair, frequency in enumerate(rope.frequencies):
        if rope.interleaved:
            a, b = 2 * pair, 2 * pair + 1
        else:
            a, b = pair, pair + rope.dim // 2
        angle = np.asarray(positions, np.float64) * frequency
        turned = (x[..., a] + 1j * x[..., b]) * np.exp(1j * angle)[:, None] * rope.scale
        result[..., a], result[..., b] = turned.real, turned.imag
    return result


def angle_error(position: int) -> float:
    """How far the float32 product of a position and a float32 frequency of up to 1 may be off."""
    return position * 2.0**-23


def stored(values: Float64, kv_dtype: str, calibrated: Sequence[float] | None = None) -> Float64:
    """Keys or values `[..., heads, dim]` as a KV pool of this dtype gives them back; calibrated:
    the scales of the heads, which only `fp8_e4m3` heeds."""
    dtype = KV_DTYPES[kv_dtype]
    if kv_dtype not in KV_LARGEST_CODE:
        return values.astype(np.float32).astype(dtype).astype(np.float64)
    dim = values.shape[-1]
    turn = hadamard(dim) if kv_dtype == "int8" else np.eye(dim)
    turned = values.astype(np.float32) @ turn
    largest = KV_LARGEST_CODE[kv_dtype]
    scale = np.abs(turned).max(axis=-1, keepdims=True) / largest
    if calibrated is not None and kv_dtype == "fp8_e4m3":
        scale = np.broadcast_to(np.array(calibrated)[:, None], scale.shape)
    codes = np.where(scale >= 2.0**-126, turned, 0) / np.where(scale >= 2.0**-126, scale, 1)
    codes = np.clip(codes, -largest, largest)
    codes = np.round(codes) if kv_dtype == "int8" else codes.astype(dtype).astype(np.float64)
    return np.asarray(codes * scale @ turn)


@functools.cache
def hadamard(dim: int) -> Float64:
    """The symmetric, orthogonal matrix by which int8 KV is turned: a sign for every pair of indexes
    in one block, by the parity of the bits that both have."""
    block = dim & -dim
    signs = [[(-1) ** (i & j).bit_count() for j in range(block)] for i in range(block)]
    blocks = np.kron(np.eye(dim // block), np.array(signs) / math.sqrt(block))
    return np.asarray(blocks, np.float64)


def sigmoid(x: Float64) -> Float64:
    return 0.5 * (1 + np.tanh(x / 2))


def gated_act(gate: Float64, up: Float64, kind: str) -> Float64:
    if kind == "silu":
        return gate * sigmoid(gate) * up
    if kind == "gelu":
        normal_cdf = np.vectorize(lambda z: 0.5 * math.erfc(-z / math.sqrt(2)), otypes=[float])
        return np.asarray(gate * normal_cdf(gate) * up)
    if kind == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return np.asarray(0.5 * gate * (1 + np.tanh(inner)) * up)
    if kind == "relu":
        return np.where(gate > 0, gate, 0.0) * up
    assert kind == "swiglu_oai"
    gate = np.where(gate > 7, 7.0, gate)
    up = np.where(np.abs(up) > 7, 7 * np.sign(up), up)
    return gate * sigmoid(1.702 * gate) * (up + 1)


def attend(
    queries: Float64,
    keys: Float64,
    values: Float64,
    visible: npt.NDArray[np.bool_],
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Float64 | None = None,
) -> Float64:
    """Attention of one sequence, a query at a time.

    queries `[n, H, Dh]`, keys `[C, Hk, Dh]`, values `[C, Hk, Dv]`, visible `[n, C]`; `[n, H * Dv]`.
    """
    count, heads, dim = queries.shape
    groups = (keys.shape[1], heads // keys.shape[1])
    output = np.zeros((count, *groups, values.shape[2]))
    for row in range(count):
        seen = np.flatnonzero(visible[row])
        if not len(seen):
            continue
        scores = queries[row].reshape(*groups, dim) @ keys[seen].transpose(1, 2, 0) * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        top = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total += np.exp(sinks.reshape(*groups, 1) - top)
        output[row] = weights @ values[seen].transpose(1, 0, 2) / total
    return output.reshape(count, heads * values.shape[2])
