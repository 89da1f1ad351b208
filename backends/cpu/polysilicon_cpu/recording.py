"""What a forward did: native ops in order, and the buffers that they write."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from polysilicon.backend import Forward, Ops, Rope
from polysilicon_cpu import library
from polysilicon_cpu.pools import CPUAdapterPool, CPUKVPool
from polysilicon_cpu.symbols import Buffer, Field, Value, symbolic_batch

_NOTHING = library.Operand(-1, 0, 0)

Emit = Callable[[ctypes.CDLL, int], None]
"""Adds one op to a native tape, given the library and the tape; buffers have their numbers then."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Normed:
    """The RMS norm of x, or of `x + residual`, which goes to `hidden`. index: of the op."""

    index: int
    x: Value
    residual: Value | None
    hidden: Value | None
    norm: library.Norm
    out: Value


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Gated:
    """gated_act(gate, up). index: of the op. kind: its native number."""

    index: int
    gate: Value
    up: Value
    kind: int
    out: Value


@dataclasses.dataclass(kw_only=True, eq=False)
class Product:
    """A product of all of a value's columns; parts: the widths of its outputs. The ops before and
    after it that it does itself: a norm, the norm of what that adds to the residual stream, and a
    gated activation of its two parts."""

    index: int
    x: Value
    out: Value
    parts: tuple[int, ...]
    inner: Normed | None = None
    normed: Normed | None = None
    gated: Gated | None = None

    def fused(self) -> library.FusedArguments | None:
        """For the native op, which reads `source` and writes `target`; None: nothing is fused."""
        inner, normed, gated = self.inner, self.normed, self.gated
        if normed is None and gated is None:
            return None
        nothing = library.Norm()
        return library.FusedArguments(
            inner=nothing if inner is None else inner.norm,
            outer=nothing if normed is None else normed.norm,
            residual=operand(None if normed is None else normed.residual),
            hidden=operand(None if normed is None else normed.hidden),
            activation=-1 if gated is None else gated.kind,
        )

    @property
    def source(self) -> Value:
        first = self.inner or self.normed
        return self.x if first is None else first.x

    @property
    def target(self) -> Value:
        return self.out if self.gated is None else self.gated.out


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Output:
    """One array that a step gives back: rows of `width` floats."""

    width: int
    of_logits: bool


class Recording:
    """The ops of a forward, recorded once, in the order in which it called them.

    outputs: the logits, then the hidden states asked for. kept: objects that native ops point to.
    """

    def __init__(self, *, exact: bool = False) -> None:
        self.exact = exact
        self._open = False
        self.outputs: list[Output] = []
        self.kept: list[object] = []
        self.pools: list[CPUKVPool] = []
        self.adapter_pools: list[CPUAdapterPool] = []
        self._emits: list[Emit] = []
        self._buffers: list[Buffer] = []
        self._ropes: dict[Rope, int] = {}
        self._norms: dict[Buffer, Normed] = {}
        self._gates: dict[Buffer, Gated] = {}
        self._products: list[Product] = []
        self._fused: set[int] = set()

    def trace(self, forward: Forward, ops: Ops, hidden: Sequence[int]) -> None:
        """Call a forward with ops that record here."""
        self._open = True
        result = forward(ops, symbolic_batch())
        for value in (result.logits, *(result.hidden[layer] for layer in hidden)):
            self._add_output(self.own(value, "an output of the forward"))
        self._open = False
        self._fuse()

    def own(self, value: Any, what: str) -> Value:
        """Refuse what is no value of this recording."""
        if not isinstance(value, Value) or value.tape is not self:
            raise ValueError(f"{what} is {type(value).__name__}, no value of this forward")
        return value

    def field(self, value: Any, name: str, what: str) -> None:
        """Refuse what is not a certain field of the batch."""
        if not isinstance(value, Field) or value.name != name:
            raise ValueError(f"{what} takes batch.{name}")

    def new(self, width: int, of_logits: bool, over: Value | None = None) -> Value:
        """A buffer for the op that is recorded next.

        over: a value which that op may overwrite while it reads it, if nothing does so afterwards.
        """
        if not self._open:
            raise ValueError("ops of the cpu backend can be called by a forward alone: see compile")
        buffer = Buffer(width, of_logits, len(self._emits))
        if over is not None and over.width == over.buffer.width:
            buffer.over = over.buffer
        self._buffers.append(buffer)
        return Value(self, buffer, 0, width)

    def add(self, emit: Emit, *values: Value | None) -> None:
        """Record an op that reads or writes these values."""
        for value in values:
            if value is not None:
                value.buffer.last_use = len(self._emits)
                value.buffer.uses += 1
        self._emits.append(emit)

    def add_norm(
        self,
        emit: Emit,
        x: Value,
        residual: Value | None,
        hidden: Value | None,
        norm: library.Norm,
        out: Value,
    ) -> None:
        """Record an RMS norm, which the product that reads it may do instead."""
        self._norms[out.buffer] = Normed(
            index=len(self._emits), x=x, residual=residual, hidden=hidden, norm=norm, out=out
        )
        self.add(emit, x, residual, hidden, out)

    def add_gated(self, emit: Emit, gate: Value, up: Value, kind: int, out: Value) -> None:
        """Record a gated activation, which the product that makes its inputs may do instead."""
        self._gates[gate.buffer] = Gated(
            index=len(self._emits), gate=gate, up=up, kind=kind, out=out
        )
        self.add(emit, gate, up, out)

    def add_product(
        self, emit: Callable[[ctypes.CDLL, int, Product], None], x: Value, out: Value,
        parts: tuple[int, ...],
    ) -> None:  # fmt: skip
        """Record a product of all of a value's columns; `emit` gets it with what it does beside."""
        product = Product(index=len(self._emits), x=x, out=out, parts=parts)
        self._products.append(product)
        self.add(lambda native, tape: emit(native, tape, product), x, out)

    def rope_table(self, rope: Rope) -> Callable[[ctypes.CDLL, int], int]:
        """Makes or finds the native table of a rope."""

        def table(native: ctypes.CDLL, tape: int) -> int:
            if rope not in self._ropes:
                angles = (ctypes.c_double * len(rope.frequencies))(*rope.frequencies)
                self._ropes[rope] = native.ps_tape_rope_table(
                    tape, angles, len(angles), rope.scale, rope.interleaved
                )
            return self._ropes[rope]

        return table

    def emit(self, native: ctypes.CDLL, tape: int) -> None:
        """Write everything to a native tape."""
        self._number_buffers(native, tape)
        for index, emit in enumerate(self._emits):
            if index not in self._fused:
                emit(native, tape)

    def _fuse(self) -> None:
        """Leave ops to the products beside them, where nothing else needs their results."""
        for product in self._products:
            self._fuse_norms(product)
            self._fuse_gated(product)

    def _fuse_norms(self, product: Product) -> None:
        normed = self._norms.get(product.x.buffer)
        if normed is None or normed.index + 1 != product.index or not _read_once(normed.out):
            return
        product.normed = normed
        self._drop(normed.index, normed.out)
        if normed.hidden is not None:
            normed.hidden.buffer.born = product.index
        inner = self._norms.get(normed.x.buffer)
        if (
            inner is not None
            and inner.residual is None
            and inner.index + 1 == normed.index
            and _read_once(inner.out)
        ):
            product.inner = inner
            self._drop(inner.index, inner.out)
        for read in (product.source, normed.residual):
            if read is not None:
                read.buffer.last_use = max(read.buffer.last_use, product.index)

    def _fuse_gated(self, product: Product) -> None:
        out = product.out
        gated = self._gates.get(out.buffer)
        if gated is None or gated.index != product.index + 1 or out.buffer.uses != 3:
            return
        halves = [(value.buffer, value.offset, value.width) for value in (gated.gate, gated.up)]
        width = out.width // 2
        if (
            product.parts == (width, width)
            and halves == [(out.buffer, 0, width), (out.buffer, width, width)]
            and out.buffer.output is None
        ):
            product.gated = gated
            self._drop(gated.index, out)
            gated.out.buffer.born = product.index

    def _drop(self, index: int, value: Value) -> None:
        """An op is done by a product, and a value is not needed any more."""
        self._fused.add(index)
        self._buffers.remove(value.buffer)

    def _number_buffers(self, native: ctypes.CDLL, tape: int) -> None:
        """Give buffers memory that others have done with: a linear scan over their lifetimes.
        Buffers stand in the order of the ops that write them first."""
        free: list[int] = []
        busy: dict[int, int] = {}  # memory to the last use of what is in it
        count = 0
        for buffer in self._buffers:
            over = buffer.over
            for memory in [memory for memory, end in busy.items() if end < buffer.born]:
                free.append(memory)
                del busy[memory]
            if buffer.output is None:
                if over is not None and over.memory >= 0 and over.last_use == buffer.born:
                    buffer.memory = over.memory
                elif free:
                    buffer.memory = free.pop()
                else:
                    buffer.memory, count = count, count + 1
                busy[buffer.memory] = buffer.last_use
            output = -1 if buffer.output is None else buffer.output
            buffer.number = native.ps_tape_buffer(
                tape, buffer.width, int(buffer.of_logits), output, buffer.memory
            )

    def _add_output(self, value: Value) -> None:
        index = len(self.outputs)
        self.outputs.append(Output(width=value.width, of_logits=value.buffer.of_logits))
        if value.width == value.buffer.width and value.buffer.output is None:
            value.buffer.output = index
            return
        target = self.new(value.width, value.buffer.of_logits)
        target.buffer.output = index
        self.add(
            lambda native, tape: native.ps_tape_copy(tape, operand(value), operand(target)),
            value,
            target,
        )


def _read_once(value: Value) -> bool:
    """Whether one op writes a value, one reads it, and no step gives it back."""
    return value.buffer.uses == 2 and value.buffer.output is None


def operand(value: Value | None) -> library.Operand:
    if value is None:
        return _NOTHING
    return library.Operand(value.buffer.number, value.offset, value.width)
