"""Compiled forwards and their steps."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from polysilicon.backend import Batch, Forward, Outputs, PendingTokens
from polysilicon_cpu import library
from polysilicon_cpu.arrays import Array, Float32, address
from polysilicon_cpu.calls import Call
from polysilicon_cpu.recording import Recording
from polysilicon_cpu.sampling import CPUPendingTokens
from polysilicon_cpu.trace import RecordingOps

if TYPE_CHECKING:
    from polysilicon_cpu.device import CPUDevice


class CPUProgram:
    """A forward as a native tape."""

    def __init__(self, device: CPUDevice, forward: Forward, hidden: Sequence[int]) -> None:
        native = library.load()
        self.device = device
        self.hidden = tuple(hidden)
        self.recording = Recording(exact=device.exact_attention)
        self.recording.trace(forward, RecordingOps(self.recording), self.hidden)
        self.pointer: int = native.ps_tape_create(device.options.profile)
        self.finalizer = weakref.finalize(self, native.ps_tape_destroy, self.pointer)
        self.finalizer.atexit = False
        self.recording.emit(native, self.pointer)

    @property
    def nbytes(self) -> int:
        """Of the tape's buffers."""
        size: int = library.load().ps_tape_bytes(self.pointer)
        return size

    def __call__(self, batch: Batch, previous: PendingTokens | None) -> PendingStep:
        device = self.device
        pointer = device.open_pointer()
        for pool in self.recording.pools:
            pool.check_open()
        for adapter_pool in self.recording.adapter_pools:
            adapter_pool.check_open()
        step = PendingStep(device, self, len(batch.tokens), len(batch.logit_rows))
        arguments, kept = _arguments(batch, previous, step.outputs)
        step.ticket = library.load().ps_submit_step(pointer, self.pointer, ctypes.byref(arguments))
        step.kept = (self, previous, *kept)
        device.in_flight.add(step)
        return step

    def profile(self) -> str:
        text = ctypes.create_string_buffer(8192)
        library.load().ps_tape_profile(self.pointer, text, len(text))
        return text.value.decode()


class PendingStep(Call):
    """A step's outputs: the logits, then the hidden states that the program gives back."""

    def __init__(self, device: CPUDevice, program: CPUProgram, tokens: int, rows: int) -> None:
        super().__init__(device, 0)
        self._program = program
        self.outputs: list[Float32] = []
        for output in program.recording.outputs:
            count = rows if output.of_logits else tokens
            memory = device.arrays.take(count * output.width, self)
            self.outputs.append(memory.reshape(count, output.width))

    @property
    def logits(self) -> Float32:
        """float32 `[L, V]`, once the call has ended."""
        return self.outputs[0]

    def result(self) -> Outputs:
        self.wait()
        return Outputs(
            logits=self.logits.copy(),
            hidden={
                layer: values.copy()
                for layer, values in zip(self._program.hidden, self.outputs[1:], strict=True)
            },
        )


def _arguments(
    batch: Batch, previous: PendingTokens | None, outputs: list[Float32]
) -> tuple[library.StepArguments, list[Array]]:
    """A step as the native library takes it, and arrays that must be kept for it."""
    kept: list[Array] = []

    def pointer(array: Array, dtype: type[np.generic] = np.int32) -> int:
        whole: npt.NDArray[np.generic] = np.ascontiguousarray(array, dtype)
        kept.append(whole)
        return address(whole)

    groups = (library.GroupView * len(batch.page_tables))()
    for view, table, slots in zip(groups, batch.page_tables, batch.slots, strict=True):
        view.page_table, view.width, view.slots = pointer(table), table.shape[1], pointer(slots)
    addresses = (ctypes.c_void_p * len(outputs))(*(address(output) for output in outputs))
    arguments = library.StepArguments(
        token_count=len(batch.tokens),
        sequence_count=len(batch.context_len),
        row_count=len(batch.logit_rows),
        group_count=len(groups),
        tokens=pointer(batch.tokens),
        positions=pointer(batch.positions),
        query_start=pointer(batch.query_start),
        context_len=pointer(batch.context_len),
        logit_rows=pointer(batch.logit_rows),
        sequence_slot=pointer(batch.sequence_slot),
        adapter_slot=pointer(batch.adapter_slot),
        groups=ctypes.cast(groups, ctypes.c_void_p),
        token_source=pointer(batch.token_source),
        outputs=ctypes.cast(addresses, ctypes.c_void_p),
        output_count=len(outputs),
    )
    if batch.tree_mask is not None:
        arguments.tree_mask = pointer(batch.tree_mask, np.bool_)
        arguments.tree_width = batch.tree_mask.shape[1]
    if previous is not None:
        if not isinstance(previous, CPUPendingTokens):
            raise ValueError("`previous` is not what this device's sample returned")
        arguments.previous = address(previous.tokens)
        arguments.previous_count = len(previous.tokens)
        arguments.after = previous.ticket
    return arguments, kept
