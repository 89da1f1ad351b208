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
class Gated:
    """gated_act(gate, up) as one of a forward's values. kind: its native number."""

    gate: Value
    up: Value
    kind: int


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
        self._gated: dict[Buffer, Gated] = {}
        self._products: list[tuple[int, Value]] = []
        self._fused: dict[Buffer, Gated] = {}

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

    def add_gated(self, emit: Emit, gated: Gated, out: Value) -> None:
        """Record a gated activation; `fused` says whether the product that reads it computes it."""
        self._gated[out.buffer] = gated
        self.add(emit, gated.gate, gated.up, out)

    def add_product(self, emit: Emit, value: Value, out: Value) -> None:
        """Record a product of all of a value's columns."""
        self._products.append((len(self._emits), value))
        self.add(emit, value, out)

    def fused(self, value: Value) -> Gated | None:
        """What a value is computed of by the only op that reads it, a product."""
        return self._fused.get(value.buffer)

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
        for emit in self._emits:
            emit(native, tape)

    def _fuse(self) -> None:
        """Leave gated activations that one product alone reads to that product."""
        for index, value in self._products:
            buffer = value.buffer
            gated = self._gated.get(buffer)
            if gated is None or buffer.uses != 2 or buffer.output is not None:
                continue
            self._fused[buffer] = gated
            self._buffers.remove(buffer)
            for source in (gated.gate, gated.up):
                source.buffer.last_use = max(source.buffer.last_use, index)

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


def operand(value: Value | None) -> library.Operand:
    if value is None:
        return _NOTHING
    return library.Operand(value.buffer.number, value.offset, value.width)
