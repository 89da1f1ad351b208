"""The operations in numpy, float32 throughout."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from polysilicon.backend import (
    AdapterPool,
    AdapterRef,
    Batch,
    Handle,
    KVPool,
    KVScales,
    Normalization,
    Ops,
    Rope,
    Routing,
)
from polysilicon.device_checks import check_indexes
from polysilicon.reference.attention import paged_attention
from polysilicon.reference.handles import weights_of
from polysilicon.reference.moe import route
from polysilicon.reference.pools import ReferenceAdapterPool, ReferenceKVPool

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]


class ReferenceOps(Ops):
    """Values are float32 arrays; no op changes what it was given."""

    def embed(self, table: Handle, tokens: Int32) -> Float32:
        rows = weights_of(table)
        check_indexes("tokens", tokens, len(rows))
        return rows.take(tokens, axis=0)

    def linear(
        self,
        x: Float32,
        weight: Handle,
        *,
        bias: Handle | None = None,
        adapters: AdapterRef | None = None,
        batch: Batch | None = None,
    ) -> tuple[Float32, ...]:
        output = x @ weights_of(weight).T
        if bias is not None:
            output += weights_of(bias)
        borders = np.cumsum(weight.parts)[:-1]
        parts = tuple(np.split(output, borders, axis=-1))
        if adapters is None:
            return parts
        if batch is None:
            raise ValueError("linear needs the batch to apply adapters")
        return self.lora(x, parts, adapters, batch)

    def rms_norm(
        self, x: Float32, weight: Handle, *, eps: float, residual: Float32 | None = None
    ) -> tuple[Float32, Float32]:
        hidden = x if residual is None else x + residual
        return _rms(hidden, eps) * weights_of(weight), hidden

    def layer_norm(
        self,
        x: Float32,
        weight: Handle,
        bias: Handle | None = None,
        *,
        eps: float,
        residual: Float32 | None = None,
    ) -> tuple[Float32, Float32]:
        hidden = x if residual is None else x + residual
        centred = hidden - hidden.mean(axis=-1, keepdims=True)
        normal = _rms(centred, eps) * weights_of(weight)
        return (normal if bias is None else normal + weights_of(bias)), hidden

    def add(self, a: Float32, b: Float32) -> Float32:
        if a.shape != b.shape:
            raise ValueError(f"add takes equal shapes, got {a.shape} and {b.shape}")
        return a + b

    def scale(self, x: Float32, factor: float) -> Float32:
        result: Float32 = x * np.float32(factor)
        return result

    def softcap(self, x: Float32, cap: float) -> Float32:
        result: Float32 = np.float32(cap) * np.tanh(x / np.float32(cap))
        return result

    def rope(self, x: Float32, positions: Int32, rope: Rope, *, heads: int) -> Float32:
        return _rotate(_by_head(x, heads), positions, rope).reshape(x.shape)

    def gated_act(self, gate: Float32, up: Float32, kind: str) -> Float32:
        if kind == "silu":
            return gate * _sigmoid(gate) * up
        if kind == "gelu":
            erf = np.fromiter(map(math.erf, (gate / np.sqrt(2)).flat), np.float32, gate.size)
            return np.float32(0.5) * gate * (1 + erf.reshape(gate.shape)) * up
        if kind == "gelu_tanh":
            cubic = gate + np.float32(0.044715) * gate * gate * gate
            tanh: Float32 = np.tanh(np.float32(math.sqrt(2 / math.pi)) * cubic)
            return np.float32(0.5) * gate * (1 + tanh) * up
        if kind == "relu":
            return np.maximum(gate, 0) * up
        if kind == "swiglu_oai":
            gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
            return (up + 1) * gate * _sigmoid(np.float32(1.702) * gate)
        raise ValueError(f"unknown activation {kind!r}")

    def attention(
        self,
        q: Float32,
        k: Float32 | None,
        v: Float32 | None,
        *,
        batch: Batch,
        pool: KVPool,
        layer: int,
        heads: int,
        scale: float,
        rope: Rope | None = None,
        q_norm: Normalization | None = None,
        k_norm: Normalization | None = None,
        softcap: float | None = None,
        sinks: Handle | None = None,
        causal: bool = True,
        kv_scales: KVScales | None = None,
    ) -> Float32:
        assert isinstance(pool, ReferenceKVPool)
        if (k is None) != (v is None):
            raise ValueError("attention takes both k and v, or neither")
        queries = _prepare(_by_head(q, heads), batch, rope, q_norm)
        if k is not None and v is not None:
            key_heads, value_heads = (pool.plane(name, layer).shape[1] for name in ("k", "v"))
            keys = _prepare(_by_head(k, key_heads), batch, rope, k_norm)
            slots = batch.slots[pool.spec.group]
            pool.store(layer, slots, keys, _by_head(v, value_heads), kv_scales)
        output = paged_attention(
            queries,
            batch=batch,
            pool=pool,
            layer=layer,
            scale=scale,
            softcap=softcap,
            sinks=None if sinks is None else weights_of(sinks),
            causal=causal,
        )
        return output.reshape(len(q), heads * output.shape[2])

    def moe(
        self,
        x: Float32,
        router_logits: Float32,
        gate_up: Handle,
        down: Handle,
        *,
        routing: Routing,
        activation: str,
        gate_up_bias: Handle | None = None,
        down_bias: Handle | None = None,
    ) -> Float32:
        experts, weights = route(router_logits, routing)
        output = np.zeros_like(x)
        for expert in np.unique(experts):
            rows, choice = np.nonzero(experts == expert)
            inner = x[rows] @ weights_of(gate_up)[expert].T
            if gate_up_bias is not None:
                inner += weights_of(gate_up_bias)[expert]
            gate, up = np.split(inner, [gate_up.parts[0]], axis=-1)
            result = self.gated_act(gate, up, activation) @ weights_of(down)[expert].T
            if down_bias is not None:
                result += weights_of(down_bias)[expert]
            output[rows] += result * weights[rows, choice, None]
        return output

    def lora(
        self, x: Float32, parts: tuple[Float32, ...], adapters: AdapterRef, batch: Batch
    ) -> tuple[Float32, ...]:
        pool: AdapterPool = adapters.pool
        assert isinstance(pool, ReferenceAdapterPool)
        check_indexes("adapter slots", batch.adapter_slot, pool.slots)
        result = list(parts)
        token_slot = np.zeros(len(x), np.int32)
        token_slot[: batch.query_start[-1]] = np.repeat(
            batch.adapter_slot, np.diff(batch.query_start)
        )
        for slot in np.unique(token_slot[token_slot != 0]):
            rows = np.flatnonzero(token_slot == slot)
            for index, part in enumerate(pool.parts(int(slot), adapters.target)):
                if part is None:
                    continue
                if result[index] is parts[index]:
                    result[index] = parts[index].copy()
                down, up = part
                result[index][rows] += x[rows] @ down.T @ up.T
        return tuple(result)

    def select(self, x: Float32, rows: Int32) -> Float32:
        check_indexes("rows", rows, len(x))
        return x.take(rows, axis=0)

    def all_reduce(self, x: Float32) -> Float32:
        return x

    def all_gather(self, x: Float32) -> Float32:
        return x


def _rms(x: Float32, eps: float) -> Float32:
    """`x / sqrt(mean(x^2) + eps)` over the last axis."""
    root: Float32 = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
    return x / root


def _sigmoid(x: Float32) -> Float32:
    with np.errstate(over="ignore"):  # exp(-x) is infinite for x below -88: the quotient is then 0
        return np.float32(1) / (np.float32(1) + np.exp(-x))


def _by_head(x: Float32, heads: int) -> Float32:
    if x.shape[-1] % heads:
        raise ValueError(f"{x.shape[-1]} columns are not a whole number of {heads} heads")
    return x.reshape(len(x), heads, x.shape[-1] // heads)


def _prepare(x: Float32, batch: Batch, rope: Rope | None, norm: Normalization | None) -> Float32:
    """Norm and rotation of queries or keys `[T, heads, Dh]`."""
    if norm is not None:
        x = _rms(x, norm.eps) * weights_of(norm.weight)
    return x if rope is None else _rotate(x, batch.positions, rope)


def _rotate(x: Float32, positions: Int32, rope: Rope) -> Float32:
    """Rotate `[T, heads, Dh]`."""
    angles = positions[:, None, None] * np.asarray(rope.frequencies, np.float64)
    cosine = (np.cos(angles) * rope.scale).astype(np.float32)
    sine = (np.sin(angles) * rope.scale).astype(np.float32)
    pairs = np.arange(rope.dim).reshape((-1, 2) if rope.interleaved else (2, -1))
    first, second = pairs.T if rope.interleaved else pairs
    a, b = x[..., first], x[..., second]
    result = x.copy()
    result[..., first] = a * cosine - b * sine
    result[..., second] = b * cosine + a * sine
    return result
