"""Weights placed on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from polysilicon.backend import Dense, Handle, Shard, Weight
from polysilicon.device_checks import check_parts, shard_window
from polysilicon_metal.arrays import Array, to_device
from polysilicon_metal.products import DenseSegment, PackedSegment, Precision, Segment
from polysilicon_metal.quantization import Packed, cut_columns, fuse, pack


class VectorHandle:
    """float32 `[N]` of concatenated parts: norm weights, biases, sinks."""

    def __init__(self, array: mx.array, parts: tuple[int, ...]) -> None:
        self.array = array
        self.parts = parts

    @property
    def nbytes(self) -> int:
        return int(self.array.nbytes)

    def release(self) -> None:
        self.array = self.array[:0]


class MatrixHandle:
    """Fused parts of a product: as few segments as their encodings allow, in order.

    experts: matrices of a stack, None for a plain matrix.
    """

    def __init__(
        self, segments: list[Segment], *, parts: tuple[int, ...], experts: int | None
    ) -> None:
        self.segments = segments
        self.parts = parts
        self.inputs = segments[0].inputs
        self.experts = experts

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments)

    def product(self, x: mx.array) -> mx.array:
        """`[T, K]` to float32 `[T, N]` over all parts."""
        return _joined([segment.product(x) for segment in self.segments])

    def expert_product(self, x: mx.array, experts: mx.array) -> mx.array:
        """`[T, 1 or k, K]` with experts int32 `[T, k]` to float32 `[T, k, N]` over all parts."""
        return _joined([segment.expert_product(x, experts) for segment in self.segments])

    def rows(self, index: mx.array) -> mx.array:
        """Rows of a matrix of one segment: int32 `[n]` to float32 `[n, K]`."""
        if len(self.segments) > 1:
            raise ValueError("a table is placed as one part")
        return self.segments[0].rows(index)

    def release(self) -> None:
        for segment in self.segments:
            segment.release()


AnyHandle = VectorHandle | MatrixHandle


def matrix_of(handle: Handle, what: str, *, stack: bool = False) -> MatrixHandle:
    """A handle as a matrix, or as a stack of them. Raises ValueError."""
    if not isinstance(handle, MatrixHandle) or (handle.experts is not None) != stack:
        raise ValueError(
            f"{what} is not a {'stack of matrices' if stack else 'matrix'} placed here"
        )
    return handle


def vector_of(handle: Handle, what: str, size: int) -> mx.array:
    """float32 `[size]` of a vector's handle. Raises ValueError."""
    if not isinstance(handle, VectorHandle):
        raise ValueError(f"{what} is not a vector placed on this device")
    if handle.array.shape != (size,):
        raise ValueError(f"{what} has {handle.array.size} elements where {size} are needed")
    return handle.array


def placed_bytes(parts: Sequence[Weight], shard: Shard | None) -> int:
    """About what `place` will take."""
    size = sum(part.nbytes for part in parts)
    return size if shard is None else size // shard.ranks


def place(
    parts: Sequence[Weight], shard: Shard | None, precision: Precision, *, keep_dtype: bool
) -> AnyHandle:
    """See `Device.put`. keep_dtype: dense matrices of 16 bits stay as they are."""
    check_parts(parts, shard)
    if len(parts[0].shape) == 1:
        cut = [
            part.dequantize()[slice(*shard_window(part.shape[0], "rows", shard))] for part in parts
        ]
        array = to_device(np.concatenate(cut))
        mx.eval(array)
        return VectorHandle(array, tuple(len(part) for part in cut))
    own = [_cut(part, shard) for part in parts]
    segments: list[Segment] = []
    for group in _fused(own):
        if isinstance(group, Packed):
            segments.append(PackedSegment(group, precision))
        else:
            segments.append(DenseSegment(group, precision, keep_dtype=keep_dtype))
    shape = own[0].shape
    return MatrixHandle(
        segments,
        parts=tuple(part.shape[-2] for part in own),
        experts=shape[0] if len(shape) == 3 else None,
    )


def _cut(part: Weight, shard: Shard | None) -> Weight:
    rows = shard_window(part.shape[-2], "rows", shard)
    if rows != (0, part.shape[-2]):
        part = part.take_rows(np.arange(*rows))
    return cut_columns(part, *shard_window(part.shape[-1], "columns", shard))


def _fused(parts: list[Weight]) -> list[Packed | Array]:
    """Neighbours that can be one matrix, joined."""
    groups: list[list[Any]] = []
    for part in parts:
        packed = pack(part)
        item: Packed | Array = packed if packed is not None else _dense(part)
        if groups and _join(groups[-1][-1], item):
            groups[-1].append(item)
        else:
            groups.append([item])
    return [
        fuse(group) if isinstance(group[0], Packed) else np.concatenate(group, axis=-2)
        for group in groups
    ]


def _dense(part: Weight) -> Array:
    return part.array if isinstance(part, Dense) else part.dequantize()


def _join(last: Packed | Array, item: Packed | Array) -> bool:
    if isinstance(last, Packed) or isinstance(item, Packed):
        return isinstance(last, Packed) and isinstance(item, Packed) and last.fits(item)
    return bool(last.dtype == item.dtype)


def _joined(arrays: list[mx.array]) -> mx.array:
    return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays, axis=-1)
