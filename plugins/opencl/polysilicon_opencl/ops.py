"""The operations: each enqueues its kernels at once and gives back a value that they will fill."""

from __future__ import annotations

import math

import numpy as np
import pyopencl as cl
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
from polysilicon.device_checks import check_indexes

from polysilicon_opencl import attention, products
from polysilicon_opencl.adapters import OpenCLAdapterPool
from polysilicon_opencl.batches import Step
from polysilicon_opencl.handles import matrix_of, vector_of
from polysilicon_opencl.pools import OpenCLKVPool
from polysilicon_opencl.runtime import Runtime
from polysilicon_opencl.values import Block, Integers, Value, Workspace

_ACTIVATIONS = {"silu": 3, "gelu": 4, "gelu_tanh": 5, "relu": 6, "swiglu_oai": 7}
_ADD, _SCALE, _SOFTCAP = range(3)
"""The kinds of `kernels/elementwise.cl`."""

_SCORINGS = {"softmax": 0, "softmax_top_k": 1, "sigmoid": 2}


class OpenCLOps(Ops):
    """Values are `Value`s, and of a batch `Integers`; no op changes what it was given."""

    def __init__(self, runtime: Runtime, workspace: Workspace) -> None:
        self.runtime = runtime
        self.workspace = workspace
        self.step: Step | None = None
        self._constants: dict[tuple[float, ...], cl.Buffer] = {}

    @property
    def current(self) -> Step:
        """The step that is being enqueued."""
        assert self.step is not None, "ops are called by a program's forward"
        return self.step

    def embed(self, table: Handle, tokens: Integers) -> Value:
        return products.embed(self, matrix_of(table), tokens)

    def linear(
        self,
        x: Value,
        weight: Handle,
        *,
        bias: Handle | None = None,
        adapters: AdapterRef | None = None,
        batch: Batch | None = None,
    ) -> tuple[Value, ...]:
        bias_buffer = None if bias is None else vector_of(bias)
        parts = products.linear(self, x, matrix_of(weight), bias_buffer)
        if adapters is not None:
            if batch is None:
                raise ValueError("linear needs the batch to apply adapters")
            self._adapt(x, parts, adapters)
        return parts

    def rms_norm(
        self, x: Value, weight: Handle, *, eps: float, residual: Value | None = None
    ) -> tuple[Value, Value]:
        return self._normalize(x, weight, None, eps, residual, centred=False)

    def layer_norm(
        self,
        x: Value,
        weight: Handle,
        bias: Handle | None = None,
        *,
        eps: float,
        residual: Value | None = None,
    ) -> tuple[Value, Value]:
        return self._normalize(x, weight, bias, eps, residual, centred=True)

    def add(self, a: Value, b: Value) -> Value:
        if (a.rows, a.columns) != (b.rows, b.columns):
            raise ValueError(
                f"add takes equal shapes, got {(a.rows, a.columns)} and {(b.rows, b.columns)}"
            )
        return self._elementwise(_ADD, a, b)

    def scale(self, x: Value, factor: float) -> Value:
        return self._elementwise(_SCALE, x, x, factor)

    def softcap(self, x: Value, cap: float) -> Value:
        return self._elementwise(_SOFTCAP, x, x, cap)

    def gated_act(self, gate: Value, up: Value, kind: str) -> Value:
        if kind not in _ACTIVATIONS:
            raise ValueError(f"unknown activation {kind!r}")
        return self._elementwise(_ACTIVATIONS[kind], gate, up)

    def rope(self, x: Value, positions: Integers, rope: Rope, *, heads: int) -> Value:
        table = self.rope_table(positions, rope)
        out = self.workspace.floats(x.rows, x.columns)
        self.runtime.launch(
            self.runtime.kernel("rope", "rope"), heads, x.rows, x.buffer, x.at, x.stride,
            table.buffer, len(rope.frequencies), int(rope.interleaved), heads,
            by_head(x, heads), out.buffer,
        )  # fmt: skip
        return out

    def constants(self, numbers: tuple[float, ...]) -> cl.Buffer:
        """Numbers of the model as float32, uploaded once."""
        buffer = self._constants.get(numbers)
        if buffer is None:
            buffer = self._constants[numbers] = self.runtime.upload(np.array(numbers, np.float32))
        return buffer

    def rope_table(self, positions: Integers, rope: Rope) -> Block:
        """Cosines and sines of the step's angles, worked out once a step."""
        step, runtime = self.current, self.runtime
        key = (rope.frequencies, rope.scale, positions.at)
        table = step.rope_tables.get(key)
        if table is None:
            frequencies = self.constants(rope.frequencies)
            pairs = len(rope.frequencies)
            table = step.rope_tables[key] = self.workspace.take(8 * pairs * positions.count)
            runtime.launch(
                runtime.kernel("rope", "rope_table"), positions.count, 1, positions.buffer,
                positions.at, frequencies, pairs, rope.scale, table.buffer,
            )  # fmt: skip
        return table

    def attention(
        self,
        q: Value,
        k: Value | None,
        v: Value | None,
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
    ) -> Value:
        assert isinstance(pool, OpenCLKVPool), "a KV pool of another device"
        if (k is None) != (v is None):
            raise ValueError("attention takes both k and v, or neither")
        case = attention.Attention(
            ops=self,
            pool=pool,
            layer=layer,
            heads=heads,
            key_dim=by_head(q, heads),
        )
        queries = case.prepare(q, k, v, scale, rope, q_norm, k_norm, kv_scales)
        return case.attend(
            queries,
            softcap=softcap,
            sinks=None if sinks is None else vector_of(sinks),
            causal=causal,
        )

    def moe(
        self,
        x: Value,
        router_logits: Value,
        gate_up: Handle,
        down: Handle,
        *,
        routing: Routing,
        activation: str,
        gate_up_bias: Handle | None = None,
        down_bias: Handle | None = None,
    ) -> Value:
        top_k = routing.top_k
        experts, weights = self._route(router_logits, routing)
        gate, up = products.experts(self, x, matrix_of(gate_up), experts, top_k)
        if gate_up_bias is not None:
            bias = self.embed(gate_up_bias, experts)
            gate = self.add(gate, bias.part(0, gate.columns))
            up = self.add(up, bias.part(gate.columns, up.columns))
        inner = self.gated_act(gate, up, activation)
        (results,) = products.experts(self, inner, matrix_of(down), experts, 1)
        if down_bias is not None:
            results = self.add(results, self.embed(down_bias, experts))
        out = self.workspace.floats(x.rows, results.columns)
        self.runtime.launch(
            self.runtime.kernel("moe", "mix_experts"), x.rows, 1, results.buffer, results.at,
            results.stride, weights.buffer, top_k, results.columns, out.buffer,
        )  # fmt: skip
        return out

    def lora(
        self, x: Value, parts: tuple[Value, ...], adapters: AdapterRef, batch: Batch
    ) -> tuple[Value, ...]:
        copies = tuple(self.contiguous(part, copy=True) for part in parts)
        self._adapt(x, copies, adapters)
        return copies

    def select(self, x: Value, rows: Integers) -> Value:
        step = self.current
        if rows.buffer is step.buffer and rows.at == step.rows_at:
            check_indexes("rows", step.host.logit_rows, x.rows)
        return self._take_rows(x, rows.count, rows.buffer, rows.at)

    def all_reduce(self, x: Value) -> Value:
        return x

    def all_gather(self, x: Value) -> Value:
        return x

    def contiguous(self, x: Value, *, copy: bool = False) -> Value:
        """x, or a copy of it, whose rows follow on each other."""
        if x.contiguous and not copy:
            return x
        return self._take_rows(x, x.rows, self.runtime.nothing, -1)

    def _take_rows(self, x: Value, count: int, rows: cl.Buffer, rows_at: int) -> Value:
        out = self.workspace.floats(count, x.columns)
        self.runtime.launch(
            self.runtime.kernel("rows", "take_rows"), count, 1, x.buffer, x.at, x.stride, rows,
            rows_at, x.columns, out.buffer,
        )  # fmt: skip
        return out

    def _elementwise(self, kind: int, a: Value, b: Value, factor: float = 0.0) -> Value:
        out = self.workspace.floats(a.rows, a.columns)
        self.runtime.launch(
            self.runtime.kernel("elementwise", "elementwise"),
            math.ceil(a.columns / self.runtime.tuning.segment), a.rows, kind, a.buffer, a.at,
            a.stride, b.buffer, b.at, b.stride, factor, a.columns, out.buffer,
        )  # fmt: skip
        return out

    def _normalize(
        self,
        x: Value,
        weight: Handle,
        bias: Handle | None,
        eps: float,
        residual: Value | None,
        *,
        centred: bool,
    ) -> tuple[Value, Value]:
        out = self.workspace.floats(x.rows, x.columns)
        hidden = x if residual is None else self.workspace.floats(x.rows, x.columns)
        other = x if residual is None else residual
        weight_buffer = vector_of(weight)
        self.runtime.launch(
            self.runtime.kernel("normalize", "normalize_rows"), x.rows, 1, x.buffer, x.at, x.stride,
            other.buffer, other.at, other.stride, int(residual is not None), weight_buffer,
            weight_buffer if bias is None else vector_of(bias), int(bias is not None), eps,
            int(centred), x.columns, out.buffer, hidden.buffer,
        )  # fmt: skip
        return out, hidden

    def _route(self, logits: Value, routing: Routing) -> tuple[Integers, Block]:
        """Experts of each token, best first, and their weights `[T, top_k]`."""
        if routing.scoring not in _SCORINGS:
            raise ValueError(f"unknown routing {routing.scoring!r}")
        size = 4 * logits.rows * routing.top_k
        merit = self.workspace.take(4 * logits.rows * logits.columns)
        chosen, weights = self.workspace.take(size), self.workspace.take(size)
        correction = routing.correction
        self.runtime.launch(
            self.runtime.kernel("moe", "route", LANES=1), logits.rows, 1, logits.buffer,
            logits.at, logits.stride, logits.columns, routing.top_k, _SCORINGS[routing.scoring],
            self.runtime.nothing if correction is None else vector_of(correction),
            int(correction is not None), routing.groups, routing.top_groups,
            int(routing.renormalize), routing.scale, merit.buffer, chosen.buffer, weights.buffer,
        )  # fmt: skip
        count = logits.rows * routing.top_k
        return Integers(chosen.buffer, 0, count, chosen), weights

    def _adapt(self, x: Value, parts: tuple[Value, ...], adapters: AdapterRef) -> None:
        """Add the adapters' share to the parts, in place."""
        step, pool = self.current, adapters.pool
        assert isinstance(pool, OpenCLAdapterPool), "an adapter pool of another device"
        target = pool.target(adapters.target)
        check_indexes("adapter slots", step.host.adapter_slot, pool.slots)
        if not step.adapted:
            return
        runtime, ranks = self.runtime, target.rank * len(target.outputs)
        inner = self.workspace.floats(x.rows, ranks)
        runtime.launch(
            runtime.kernel("lora", "lora_down"), ranks, x.rows, x.buffer, x.at, x.stride,
            step.buffer, step.adapter_slots_at, target.down, target.inputs, ranks, inner.buffer,
        )  # fmt: skip
        kernel = runtime.kernel("lora", "lora_up")
        first = 0
        for index, (part, outputs) in enumerate(zip(parts, target.outputs, strict=True)):
            runtime.launch(
                kernel, math.ceil(outputs / runtime.tuning.segment), x.rows, inner.buffer,
                index * target.rank, ranks, step.buffer, step.adapter_slots_at, target.up,
                target.rank, sum(target.outputs), first, outputs, part.buffer, part.at,
                part.stride,
            )  # fmt: skip
            first += outputs


def by_head(x: Value, heads: int) -> int:
    """The width of a head."""
    if x.columns % heads:
        raise ValueError(f"{x.columns} columns are not a whole number of {heads} heads")
    return x.columns // heads
