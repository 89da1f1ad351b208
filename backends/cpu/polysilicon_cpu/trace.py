"""The ops that a forward calls while it is traced: each records a native one."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from polysilicon.backend import (
    AdapterRef,
    Batch,
    Handle,
    KVPool,
    KVScales,
    Normalization,
    Ops,
    Plane,
    Rope,
    Routing,
)
from polysilicon_cpu import library
from polysilicon_cpu.arrays import address
from polysilicon_cpu.handles import MatrixHandle, matrix_of, vector_of
from polysilicon_cpu.pools import CPUAdapterPool, CPUKVPool
from polysilicon_cpu.recording import Product, Recording, operand
from polysilicon_cpu.symbols import Value

_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "swiglu_oai": 4}
_SCORINGS = {"softmax": 0, "softmax_top_k": 1, "sigmoid": 2}


class RecordingOps(Ops):
    """Checks widths, which are known, and records."""

    def __init__(self, recording: Recording) -> None:
        self._tape = recording

    def embed(self, table: Handle, tokens: Any) -> Value:
        matrix = matrix_of(table, "embed's table")
        self._tape.field(tokens, "tokens", "embed")
        out = self._new(matrix.inputs)
        self._keep(matrix)
        self._tape.add(
            lambda native, tape: native.ps_tape_embed(tape, matrix.pointer, operand(out)), out
        )
        return out

    def linear(
        self,
        x: Any,
        weight: Handle,
        *,
        bias: Handle | None = None,
        adapters: AdapterRef | None = None,
        batch: Batch | None = None,
    ) -> tuple[Value, ...]:
        matrix = matrix_of(weight, "linear's weight")
        value = self._own(x, "linear's x")
        if value.width != matrix.inputs:
            raise ValueError(f"linear's x has {value.width} columns, its weight {matrix.inputs}")
        outputs = sum(matrix.parts)
        bias_address = self._vector(bias, "linear's bias", outputs)
        out = self._new(outputs, value)
        self._keep(matrix)

        def emit(native: ctypes.CDLL, tape: int, product: Product) -> None:
            fused = product.fused()
            native.ps_tape_linear(
                tape, operand(product.source), fused and ctypes.byref(fused), matrix.pointer,
                bias_address, operand(product.target),
            )  # fmt: skip

        self._tape.add_product(emit, value, out, matrix.parts)
        if adapters is not None:
            if batch is None:
                raise ValueError("linear needs the batch to apply adapters")
            self._adapt(value, out, matrix.parts, adapters)
        return self._split(out, matrix.parts)

    def rms_norm(
        self, x: Any, weight: Handle, *, eps: float, residual: Any | None = None
    ) -> tuple[Value, Value]:
        value, other, hidden, out = self._norm(x, residual)
        norm = library.Norm(self._vector(weight, "rms_norm's weight", value.width), eps)
        self._tape.add_norm(
            lambda native, tape: native.ps_tape_rms_norm(
                tape, operand(value), operand(other), norm, operand(hidden), operand(out)
            ),
            value, other, hidden, norm, out,
        )  # fmt: skip
        return out, value if hidden is None else hidden

    def layer_norm(
        self,
        x: Any,
        weight: Handle,
        bias: Handle | None = None,
        *,
        eps: float,
        residual: Any | None = None,
    ) -> tuple[Value, Value]:
        value, other, hidden, out = self._norm(x, residual)
        scales = self._vector(weight, "layer_norm's weight", value.width)
        shifts = self._vector(bias, "layer_norm's bias", value.width)
        self._tape.add(
            lambda native, tape: native.ps_tape_layer_norm(
                tape, operand(value), operand(other), scales, shifts, eps,
                operand(hidden), operand(out),
            ),
            value, other, hidden, out,
        )  # fmt: skip
        return out, value if hidden is None else hidden

    def add(self, a: Any, b: Any) -> Value:
        first, second = self._own(a, "add's a"), self._own(b, "add's b")
        self._same("add", first, second)
        out = self._new(first.width, first, over=first)
        self._tape.add(
            lambda native, tape: native.ps_tape_add(
                tape, operand(first), operand(second), operand(out)
            ),
            first,
            second,
            out,
        )
        return out

    def scale(self, x: Any, factor: float) -> Value:
        return self._map("scale", x, factor)

    def softcap(self, x: Any, cap: float) -> Value:
        return self._map("softcap", x, cap)

    def rope(self, x: Any, positions: Any, rope: Rope, *, heads: int) -> Value:
        value = self._own(x, "rope's x")
        self._tape.field(positions, "positions", "rope")
        if value.buffer.of_logits or value.width % heads or rope.dim > value.width // heads:
            raise ValueError(
                f"rope of {rope.dim} elements does not fit {heads} heads in {value.width} columns"
            )
        table = self._tape.rope_table(rope)
        out = self._new(value.width, value)
        self._tape.add(
            lambda native, tape: native.ps_tape_rope(
                tape, operand(value), table(native, tape), heads, operand(out)
            ),
            value,
            out,
        )
        return out

    def gated_act(self, gate: Any, up: Any, kind: str) -> Value:
        first, second = self._own(gate, "gated_act's gate"), self._own(up, "gated_act's up")
        self._same("gated_act", first, second)
        number = _number(_ACTIVATIONS, kind, "activation")
        out = self._new(first.width, first)
        self._tape.add_gated(
            lambda native, tape: native.ps_tape_gated_act(
                tape, operand(first), operand(second), number, operand(out)
            ),
            first, second, number, out,
        )  # fmt: skip
        return out

    def attention(
        self,
        q: Any,
        k: Any | None,
        v: Any | None,
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
        if not isinstance(pool, CPUKVPool):
            raise ValueError("attention's pool is not one of this device")
        if (k is None) != (v is None):
            raise ValueError("attention takes both k and v, or neither")
        planes = {plane.name: plane for plane in pool.spec.planes}
        key, value = planes["k"], planes["v"]
        queries = self._own(q, "attention's q")
        keys = None if k is None else self._own(k, "attention's k")
        values = None if v is None else self._own(v, "attention's v")
        for name, given, width in (
            ("q", queries, heads * key.dim),
            ("k", keys, key.heads * key.dim),
            ("v", values, value.heads * value.dim),
        ):
            if given is not None and (given.width != width or given.buffer.of_logits):
                raise ValueError(
                    f"attention's {name} has {given.width} columns, the pool's heads make {width}"
                )
        if heads % key.heads:
            raise ValueError(f"{heads} query heads do not share {key.heads} key heads evenly")
        if rope is not None and rope.dim > key.dim:
            raise ValueError(f"rope rotates {rope.dim} elements of heads of {key.dim}")
        parameters = library.AttentionParameters(
            heads=heads,
            scale=scale,
            q_norm=self._head_norm(q_norm, "q_norm", key.dim),
            k_norm=self._head_norm(k_norm, "k_norm", key.dim),
            q_eps=0.0 if q_norm is None else q_norm.eps,
            k_eps=0.0 if k_norm is None else k_norm.eps,
            softcap=softcap or 0.0,
            sinks=self._vector(sinks, "attention's sinks", heads),
            causal=causal,
            exact=self._tape.exact,
            key_scales=kv_scales and self._kv_scales(key, kv_scales.k),
            value_scales=kv_scales and self._kv_scales(value, kv_scales.v),
        )
        place = pool.layer_place(layer)
        if pool not in self._tape.pools:
            self._tape.pools.append(pool)
            self._tape.add(lambda native, tape: native.ps_tape_check_batch(tape, pool.pointer))
        table = None if rope is None else self._tape.rope_table(rope)
        out = self._new(heads * value.dim, queries)

        def emit(native: ctypes.CDLL, tape: int) -> None:
            if table is not None:
                parameters.rope = table(native, tape)
            native.ps_tape_attention(
                tape, operand(queries), operand(keys), operand(values), pool.pointer, place,
                ctypes.byref(parameters), operand(out),
            )  # fmt: skip

        self._tape.add(emit, queries, keys, values, out)
        return out

    def moe(
        self,
        x: Any,
        router_logits: Any,
        gate_up: Handle,
        down: Handle,
        *,
        routing: Routing,
        activation: str,
        gate_up_bias: Handle | None = None,
        down_bias: Handle | None = None,
    ) -> Value:
        value = self._own(x, "moe's x")
        logits = self._own(router_logits, "moe's router_logits")
        first = matrix_of(gate_up, "moe's gate_up", stack=True)
        second = matrix_of(down, "moe's down", stack=True)
        experts = first.experts or 0
        inner, width = sum(first.parts) // 2, sum(second.parts)
        if (
            len(set(first.parts)) != 1
            or len(first.parts) != 2
            or second.experts != experts
            or first.inputs != value.width
            or second.inputs != inner
            or logits.width != experts
            or not 1 <= routing.top_k <= experts
            or routing.groups < 1
            or experts % routing.groups
        ):
            raise ValueError("moe's experts, their widths and the routing do not fit each other")
        parameters = library.RoutingParameters(
            top_k=routing.top_k,
            scoring=_number(_SCORINGS, routing.scoring, "routing"),
            correction=self._vector(routing.correction, "routing's correction", experts),
            groups=routing.groups,
            top_groups=routing.top_groups,
            renormalize=routing.renormalize,
            scale=routing.scale,
        )
        kind = _number(_ACTIVATIONS, activation, "activation")
        biases = (
            self._bias_matrix(gate_up_bias, "moe's gate_up_bias", experts, 2 * inner),
            self._bias_matrix(down_bias, "moe's down_bias", experts, width),
        )
        out = self._new(width, value)
        self._keep(first, second)
        self._tape.add(
            lambda native, tape: native.ps_tape_moe(
                tape, operand(value), operand(logits), first.pointer, second.pointer,
                ctypes.byref(parameters), kind, *biases, operand(out),
            ),
            value, logits, out,
        )  # fmt: skip
        return out

    def lora(
        self, x: Any, parts: tuple[Any, ...], adapters: AdapterRef, batch: Batch
    ) -> tuple[Value, ...]:
        value = self._own(x, "lora's x")
        given = [self._own(part, "lora's parts") for part in parts]
        widths = tuple(part.width for part in given)
        # A new buffer, since the parts may be read elsewhere as they are.
        out = self._new(sum(widths), value)
        copies = self._split(out, widths)
        for source, target in zip(given, copies, strict=True):
            self._copy(source, target)
        self._adapt(value, out, widths, adapters)
        return copies

    def select(self, x: Any, rows: Any) -> Value:
        value = self._own(x, "select's x")
        self._tape.field(rows, "logit_rows", "select")
        if value.buffer.of_logits:
            raise ValueError("select takes rows of a value of the step's tokens")
        out = self._tape.new(value.width, True)
        self._tape.add(
            lambda native, tape: native.ps_tape_select(tape, operand(value), operand(out)),
            value,
            out,
        )
        return out

    def all_reduce(self, x: Any) -> Value:
        return self._own(x, "all_reduce's x")

    def all_gather(self, x: Any) -> Value:
        return self._own(x, "all_gather's x")

    def _own(self, value: Any, what: str) -> Value:
        return self._tape.own(value, what)

    def _new(self, width: int, like: Value | None = None, over: Value | None = None) -> Value:
        return self._tape.new(width, like is not None and like.buffer.of_logits, over)

    def _keep(self, *objects: object) -> None:
        self._tape.kept.extend(objects)

    def _same(self, what: str, a: Value, b: Value) -> None:
        if (a.width, a.buffer.of_logits) != (b.width, b.buffer.of_logits):
            raise ValueError(f"{what} takes equal shapes, got {a.width} and {b.width} columns")

    def _split(self, value: Value, widths: tuple[int, ...]) -> tuple[Value, ...]:
        parts, offset = [], 0
        for width in widths:
            parts.append(Value(self._tape, value.buffer, offset, width))
            offset += width
        return tuple(parts)

    def _norm(
        self, x: Any, residual: Any | None
    ) -> tuple[Value, Value | None, Value | None, Value]:
        """x, the residual, the sum of both where there is one, and the result."""
        value = self._own(x, "the norm's x")
        if residual is None:
            return value, None, None, self._new(value.width, value, over=value)
        other = self._own(residual, "the norm's residual")
        self._same("a norm with a residual", value, other)
        hidden = self._new(value.width, value, over=other)
        own = None if value.buffer is other.buffer else value
        return value, other, hidden, self._new(value.width, value, over=own)

    def _map(self, name: str, x: Any, number: float) -> Value:
        value = self._own(x, f"{name}'s x")
        out = self._new(value.width, value, over=value)
        self._tape.add(
            lambda native, tape: getattr(native, f"ps_tape_{name}")(
                tape, operand(value), number, operand(out)
            ),
            value,
            out,
        )
        return out

    def _copy(self, source: Value, target: Value) -> None:
        self._tape.add(
            lambda native, tape: native.ps_tape_copy(tape, operand(source), operand(target)),
            source,
            target,
        )

    def _adapt(self, x: Value, out: Value, widths: tuple[int, ...], adapters: AdapterRef) -> None:
        pool: Any = adapters.pool
        if not isinstance(pool, CPUAdapterPool):
            raise ValueError("the adapter pool is not one of this device")
        place = pool.target_place(adapters.target)
        target = pool.spec.targets[adapters.target]
        if target.inputs != x.width or tuple(target.outputs) != widths or x.buffer.of_logits:
            raise ValueError(f"adapter target {adapters.target!r} has other widths than its linear")
        if pool not in self._tape.adapter_pools:
            self._tape.adapter_pools.append(pool)
        self._tape.add(
            lambda native, tape: native.ps_tape_lora(
                tape, operand(x), pool.pointer, place, operand(out)
            ),
            x,
            out,
        )

    def _vector(self, handle: Handle | None, what: str, size: int) -> int | None:
        if handle is None:
            return None
        vector = vector_of(handle, what, size)
        self._keep(vector)
        return address(vector.array)

    def _head_norm(self, norm: Normalization | None, what: str, size: int) -> int | None:
        return None if norm is None else self._vector(norm.weight, f"attention's {what}", size)

    def _kv_scales(self, plane: Plane, scales: Sequence[float]) -> int | None:
        if plane.dtype != "fp8_e4m3":
            return None
        if len(scales) != plane.heads:
            raise ValueError(f"attention's {plane.name} has {plane.heads} heads, not {len(scales)}")
        values = np.array(scales, np.float32)
        self._keep(values)
        return address(values)

    def _bias_matrix(self, handle: Handle | None, what: str, rows: int, width: int) -> int | None:
        if handle is None:
            return None
        matrix: MatrixHandle = matrix_of(handle, what)
        if (sum(matrix.parts), matrix.inputs) != (rows, width):
            raise ValueError(f"{what} is not [{rows}, {width}]")
        values = matrix.values()
        self._keep(values)
        return address(values)


def _number(numbers: dict[str, int], name: str, what: str) -> int:
    if name not in numbers:
        raise ValueError(f"unknown {what} {name!r}: there are {', '.join(numbers)}")
    return numbers[name]
