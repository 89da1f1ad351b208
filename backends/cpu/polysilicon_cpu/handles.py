"""Weights placed on the device: repacked matrices, and vectors of float32."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from polysilicon.backend import Dense, GroupAffine, GroupFloat, Handle, Shard, SuperScaled, Weight
from polysilicon.device_checks import check_parts, shard_window
from polysilicon_cpu import library
from polysilicon_cpu.arrays import Array, Float32, address, aligned

if TYPE_CHECKING:
    from polysilicon_cpu.device import CPUDevice

_DENSE, _AFFINE, _FLOAT = 0, 1, 2
_NUMBERS = {"float32": 0, "float16": 1, "bfloat16": 2}
_ACTIVATIONS = {"auto": 0, "f32": 1, "bf16": 2, "int8": 3}


class VectorHandle:
    """float32 `[N]` of concatenated parts: norm weights, biases, sinks."""

    def __init__(self, array: Float32, parts: tuple[int, ...]) -> None:
        self.array = array
        self.parts = parts

    @property
    def nbytes(self) -> int:
        return self.array.nbytes


class MatrixHandle:
    """Fused parts of a product, repacked by the native library.

    inputs: K. experts: matrices of a stack, None for a plain matrix.
    """

    def __init__(
        self,
        device: CPUDevice,
        pointer: int,
        *,
        parts: tuple[int, ...],
        inputs: int,
        experts: int | None,
    ) -> None:
        self.pointer = pointer
        self.parts = parts
        self.inputs = inputs
        self.experts = experts
        self.nbytes: int = library.load().ps_weight_bytes(pointer)
        self._device = device
        self.finalizer = weakref.finalize(self, library.load().ps_weight_destroy, pointer)
        # At the interpreter's end the device may still compute with it.
        self.finalizer.atexit = False

    def values(self) -> Float32:
        """float32 `[N, K]` of a plain matrix, dequantised."""
        count = sum(self.parts)
        rows = np.arange(count, dtype=np.int32)
        result = aligned(count * self.inputs)
        error = library.ErrorText()
        if not library.load().ps_weight_rows(
            self._device.pointer, self.pointer, address(rows), count, address(result),
            ctypes.byref(error),
        ):  # fmt: skip
            library.raise_error(error)
        return result.reshape(count, self.inputs)


def matrix_of(handle: Handle, what: str, *, stack: bool = False) -> MatrixHandle:
    """A handle as a matrix, or as a stack of them. Raises ValueError."""
    if not isinstance(handle, MatrixHandle) or (handle.experts is not None) != stack:
        raise ValueError(
            f"{what} is not a {'stack of matrices' if stack else 'matrix'} placed here"
        )
    return handle


def vector_of(handle: Handle, what: str, size: int) -> VectorHandle:
    """A handle as a vector of this size. Raises ValueError."""
    if not isinstance(handle, VectorHandle):
        raise ValueError(f"{what} is not a vector placed on this device")
    if len(handle.array) != size:
        raise ValueError(f"{what} has {len(handle.array)} elements where {size} are needed")
    return handle


def place(
    device: CPUDevice, parts: Sequence[Weight], shard: Shard | None, activations: str
) -> VectorHandle | MatrixHandle:
    """See `Device.put`."""
    check_parts(parts, shard)
    if len(parts[0].shape) == 1:
        return _place_vector(parts, shard)
    return _place_matrix(device, parts, shard, activations)


def _place_vector(parts: Sequence[Weight], shard: Shard | None) -> VectorHandle:
    cut = [part.dequantize()[slice(*shard_window(part.shape[0], "rows", shard))] for part in parts]
    sizes = tuple(len(part) for part in cut)
    array = aligned(sum(sizes))
    np.concatenate(cut, out=array)
    return VectorHandle(array, sizes)


def _place_matrix(
    device: CPUDevice, parts: Sequence[Weight], shard: Shard | None, activations: str
) -> MatrixHandle:
    kept: list[Array] = []
    descriptions = (library.PartDescription * len(parts))()
    for description, part in zip(descriptions, parts, strict=True):
        _describe(part, description, kept)
        rows, columns = part.shape[-2:]
        description.row_begin, description.row_end = shard_window(rows, "rows", shard)
        window = shard_window(columns, "columns", shard)
        description.column_begin, description.column_end = window
    error = library.ErrorText()
    chosen = _ACTIVATIONS[activations]
    pointer = library.load().ps_weight_create(
        device.pointer, descriptions, len(parts), chosen, ctypes.byref(error)
    )
    if not pointer:
        library.raise_error(error)
    return MatrixHandle(
        device,
        pointer,
        parts=tuple(part.row_end - part.row_begin for part in descriptions),
        inputs=descriptions[0].column_end - descriptions[0].column_begin,
        experts=parts[0].shape[0] if len(parts[0].shape) == 3 else None,
    )


def _describe(part: Weight, description: library.PartDescription, kept: list[Array]) -> None:
    """Fill in a part's encoding. kept: arrays that must live as long as the description."""

    def pointer(array: Array, dtype: type[np.generic] | None = None) -> int:
        kept.append(np.ascontiguousarray(array, dtype))
        return address(kept[-1])

    def scales(values: Array | SuperScaled) -> library.ScaleDescription:
        numbers = values.scale if isinstance(values, SuperScaled) else values
        result = library.ScaleDescription(
            numbers=pointer(numbers), type=_NUMBERS[numbers.dtype.name]
        )
        if isinstance(values, SuperScaled):
            result.codes = pointer(values.codes)
            result.bits, result.offset = values.bits, values.offset
            result.super_group = values.group
        return result

    description.experts = part.shape[0] if len(part.shape) == 3 else 1
    description.rows, description.columns = part.shape[-2:]
    if isinstance(part, Dense):
        description.encoding = _DENSE
        description.numbers = pointer(part.array)
        description.type = _NUMBERS[part.array.dtype.name]
        return
    if not isinstance(part, (GroupAffine, GroupFloat)):
        raise ValueError(f"{type(part).__name__} is not one of the canonical encodings")
    description.bits = part.bits
    description.group = part.group
    description.codes = pointer(part.codes)
    description.scale = scales(part.scale)
    if part.input_order is not None:
        description.input_order = pointer(part.input_order, np.int32)
    if isinstance(part, GroupAffine):
        description.encoding = _AFFINE
        description.offset = part.offset
        if part.bias is not None:
            description.bias = scales(part.bias)
        return
    description.encoding = _FLOAT
    # A code names any of 2^bits entries; those that a short table lacks are 0.
    table = np.zeros(1 << part.bits, np.float32)
    table[: len(part.values_table)] = part.values_table
    description.table = pointer(table)
    if part.block is not None:
        description.block_rows, description.block_columns = part.block


def placed_bytes(parts: Sequence[Weight], shard: Shard | None) -> int:
    """About what `place` takes: weights are repacked without growing."""
    return sum(part.nbytes for part in parts) // (1 if shard is None else shard.ranks)
