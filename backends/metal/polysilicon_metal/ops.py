"""The operations on MLX arrays. Values are float32; nothing is computed before its step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from polysilicon.backend import (
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
from polysilicon_metal import kernels
from polysilicon_metal.adapters import MetalAdapterPool, adapted
from polysilicon_metal.attention import Scoring, attend, quantize, turn
from polysilicon_metal.handles import matrix_of, vector_of
from polysilicon_metal.hardware import has_gpu
from polysilicon_metal.moe import route
from polysilicon_metal.pools import MetalKVPool
from polysilicon_metal.tracing import Trace


class MetalOps(Ops):
    """Ops of one run of a forward. No op changes what it was given."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def embed(self, table: Handle, tokens: mx.array) -> mx.array:
        matrix = matrix_of(table, "the table")
        size = sum(matrix.parts)
        trace = self._trace
        trace.vocabulary = size if trace.vocabulary is None else min(size, trace.vocabulary)
        return matrix.rows(tokens)

    def linear(
        self,
        x: mx.array,
        weight: Handle,
        *,
        bias: Handle | None = None,
        adapters: AdapterRef | None = None,
        batch: Batch | None = None,
    ) -> tuple[mx.array, ...]:
        matrix = matrix_of(weight, "the weight")
        if x.shape[-1] != matrix.inputs:
            raise ValueError(f"{x.shape[-1]} inputs do not fit a weight of {matrix.inputs}")
        output = matrix.product(x)
        if bias is not None:
            output = output + vector_of(bias, "the bias", sum(matrix.parts))
        parts = _split(output, matrix.parts)
        if adapters is None:
            return parts
        if batch is None:
            raise ValueError("linear needs the batch to apply adapters")
        return self.lora(x, parts, adapters, batch)

    def rms_norm(
        self, x: mx.array, weight: Handle, *, eps: float, residual: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        hidden = x if residual is None else x + residual
        return mx.fast.rms_norm(hidden, vector_of(weight, "the norm", x.shape[-1]), eps), hidden

    def layer_norm(
        self,
        x: mx.array,
        weight: Handle,
        bias: Handle | None = None,
        *,
        eps: float,
        residual: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        hidden = x if residual is None else x + residual
        width = x.shape[-1]
        own_bias = None if bias is None else vector_of(bias, "the norm's bias", width)
        own_weight = vector_of(weight, "the norm", width)
        return mx.fast.layer_norm(hidden, own_weight, own_bias, eps), hidden

    def add(self, a: mx.array, b: mx.array) -> mx.array:
        if a.shape != b.shape:
            raise ValueError(f"add takes equal shapes, got {a.shape} and {b.shape}")
        return a + b

    def scale(self, x: mx.array, factor: float) -> mx.array:
        return x * factor

    def softcap(self, x: mx.array, cap: float) -> mx.array:
        return cap * mx.tanh(x / cap)

    def rope(self, x: mx.array, positions: mx.array, rope: Rope, *, heads: int) -> mx.array:
        return self._rotated(_by_head(x, heads), positions, rope).reshape(x.shape)

    def gated_act(self, gate: mx.array, up: mx.array, kind: str) -> mx.array:
        if kind == "silu":
            return gate * mx.sigmoid(gate) * up
        if kind == "gelu":
            return 0.5 * gate * (1 + mx.erf(gate / math.sqrt(2))) * up
        if kind == "gelu_tanh":
            cubic = gate + 0.044715 * gate * gate * gate
            return 0.5 * gate * (1 + mx.tanh(math.sqrt(2 / math.pi) * cubic)) * up
        if kind == "relu":
            return mx.maximum(gate, 0) * up
        if kind == "swiglu_oai":
            gate, up = mx.minimum(gate, 7), mx.clip(up, -7, 7)
            return (up + 1) * gate * mx.sigmoid(1.702 * gate)
        raise ValueError(f"unknown activation {kind!r}")

    def attention(
        self,
        q: mx.array,
        k: mx.array | None,
        v: mx.array | None,
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
    ) -> mx.array:
        assert isinstance(pool, MetalKVPool)
        if (k is None) != (v is None):
            raise ValueError("attention takes both k and v, or neither")
        key, value = pool.key, pool.value
        if heads % key.heads or q.shape[-1] != heads * key.dim:
            raise ValueError(
                f"{q.shape[-1]} columns of {heads} heads do not fit the pool's {key.heads} heads "
                f"of {key.dim}"
            )
        place = pool.place_of(layer)
        queries = self._prepared(_by_head(q, heads), batch, rope, q_norm)
        if k is not None and v is not None:
            keys = self._prepared(_by_head(k, key.heads), batch, rope, k_norm)
            calibrated = _calibrated(pool, kv_scales)
            self._store(pool, place, batch, keys, _by_head(v, key.heads), calibrated)
        if pool.turned:
            queries = turn(queries)
        scoring = Scoring(scale=scale, softcap=softcap, causal=causal)
        own_sinks = None if sinks is None else vector_of(sinks, "the sinks", heads)
        tokens = q.shape[0]
        # Rows of padding go to one row more, which is cut off.
        output = mx.zeros((tokens + 1, heads, value.dim))
        for number, blocks in enumerate(self._trace.blocks):
            own = queries[mx.minimum(blocks.rows, tokens - 1)]
            stored = self._trace.keys(pool, place)
            if has_gpu():
                result = kernels.attend(own, stored, pool.spec, batch, blocks, scoring, own_sinks)
            else:
                context = max(blocks.context, pool.spec.page_size)
                visible = self._trace.visible(
                    batch, number, context, window=pool.spec.window, causal=causal
                )
                result = attend(own, stored, pool.spec, batch, blocks, scoring, own_sinks, visible)
            output[blocks.rows] = result
        output = output[:tokens]
        if pool.turned:
            output = turn(output)
        return output.reshape(tokens, heads * value.dim)

    def moe(
        self,
        x: mx.array,
        router_logits: mx.array,
        gate_up: Handle,
        down: Handle,
        *,
        routing: Routing,
        activation: str,
        gate_up_bias: Handle | None = None,
        down_bias: Handle | None = None,
    ) -> mx.array:
        inner_stack = matrix_of(gate_up, "gate_up", stack=True)
        outer_stack = matrix_of(down, "down", stack=True)
        experts, weights = route(router_logits.astype(mx.float32), routing)
        inner = inner_stack.expert_product(x[:, None, :], experts)
        if gate_up_bias is not None:
            inner = inner + _expert_rows(gate_up_bias, experts)
        gate, up = _split(inner, inner_stack.parts)
        outer = outer_stack.expert_product(self.gated_act(gate, up, activation), experts)
        if down_bias is not None:
            outer = outer + _expert_rows(down_bias, experts)
        return (outer * weights[..., None]).sum(axis=1)

    def lora(
        self, x: mx.array, parts: tuple[mx.array, ...], adapters: AdapterRef, batch: Batch
    ) -> tuple[mx.array, ...]:
        pool = adapters.pool
        assert isinstance(pool, MetalAdapterPool)
        pairs = self._trace.factors(pool, adapters.target)
        if self._trace.token_slot is None:
            return parts
        return adapted(x, parts, pairs, self._trace.token_slot)

    def select(self, x: mx.array, rows: mx.array) -> mx.array:
        return x[rows]

    def all_reduce(self, x: mx.array) -> mx.array:
        return x

    def all_gather(self, x: mx.array) -> mx.array:
        return x

    def _prepared(
        self, x: mx.array, batch: Batch, rope: Rope | None, norm: Normalization | None
    ) -> mx.array:
        """Norm and rotation of queries or keys `[T, heads, Dh]`."""
        if norm is not None:
            weight = vector_of(norm.weight, "the norm", x.shape[-1])
            x = mx.fast.rms_norm(x, weight, norm.eps)
        positions: Any = batch.positions
        return x if rope is None else self._rotated(x, positions, rope)

    def _rotated(self, x: mx.array, positions: mx.array, rope: Rope) -> mx.array:
        """Rotate `[T, heads, Dh]`."""
        cosine, sine = self._trace.angles(positions, rope)
        turned, rest = x[..., : rope.dim], x[..., rope.dim :]
        if rope.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
        else:
            a, b = turned[..., : rope.dim // 2], turned[..., rope.dim // 2 :]
        halves = [a * cosine - b * sine, b * cosine + a * sine]
        if rope.interleaved:
            turned = mx.stack(halves, axis=-1).reshape(turned.shape)
        else:
            turned = mx.concatenate(halves, axis=-1)
        return mx.concatenate([turned, rest], axis=-1)

    def _store(
        self,
        pool: MetalKVPool,
        place: int,
        batch: Batch,
        keys: mx.array,
        values: mx.array,
        calibrated: Mapping[str, mx.array],
    ) -> None:
        slots: Any = batch.slots[pool.spec.group]
        for name, rows in (("k", keys), ("v", values)):
            if pool.quantised:
                rows, scales = quantize(rows, pool.key.dtype, calibrated.get(name))
                self._trace.store(pool, place, f"{name}_scale", slots, scales)
            self._trace.store(pool, place, name, slots, rows)


def _calibrated(pool: MetalKVPool, scales: KVScales | None) -> Mapping[str, mx.array]:
    """Scales `[Hk, 1]` of keys and values, where the pool's dtype has a use for them."""
    if scales is None or pool.key.dtype != "fp8_e4m3":
        return {}
    for given in (scales.k, scales.v):
        if len(given) != pool.key.heads:
            raise ValueError(f"{len(given)} KV scales do not fit {pool.key.heads} key heads")
    return {"k": mx.array(scales.k)[:, None], "v": mx.array(scales.v)[:, None]}


def _by_head(x: mx.array, heads: int) -> mx.array:
    if x.shape[-1] % heads:
        raise ValueError(f"{x.shape[-1]} columns are not a whole number of {heads} heads")
    return x.reshape(x.shape[0], heads, x.shape[-1] // heads)


def _split(x: mx.array, sizes: tuple[int, ...]) -> tuple[mx.array, ...]:
    """Parts of these sizes along the last axis."""
    if len(sizes) == 1:
        return (x,)
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes) - 1)]
    return tuple(mx.split(x, ends, axis=-1))


def _expert_rows(bias: Handle, experts: mx.array) -> mx.array:
    """Rows of a bias `[E, N]` by expert: `[T, k, N]`."""
    matrix = matrix_of(bias, "the bias")
    rows = matrix.rows(experts.reshape(-1))
    return rows.reshape(*experts.shape, rows.shape[-1])
