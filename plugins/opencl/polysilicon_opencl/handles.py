"""Placing weights: which parts stand together, and on the device at all."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyopencl as cl
from polysilicon.backend import (
    Dense,
    DeviceError,
    GroupAffine,
    GroupFloat,
    Handle,
    Shard,
    Weight,
    pack_codes,
    scale_values,
    unpack_codes,
)
from polysilicon.device_checks import check_parts, shard_window

from polysilicon_opencl.packing import Packable, pack, packable, packed_size
from polysilicon_opencl.runtime import Runtime


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Matrix:
    """Parts of one encoding in one buffer. outputs: rows, of one expert where it is a stack.
    parts: how they divide. macros: of the kernels that read it."""

    buffer: cl.Buffer
    outputs: int
    columns: int
    parts: tuple[int, ...]
    macros: dict[str, int]
    ordered: bool


class MatrixHandle:
    """A product's weights. experts: of a stack, else None."""

    def __init__(
        self, matrices: tuple[Matrix, ...], parts: tuple[int, ...], nbytes: int, experts: int | None
    ) -> None:
        self._matrices: tuple[Matrix, ...] | None = matrices
        self.parts = parts
        self.nbytes = nbytes
        self.experts = experts

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        if self._matrices is None:
            raise DeviceError("the weights' device is closed")
        return self._matrices

    def close(self) -> None:
        self._matrices = None
        self.nbytes = 0


class VectorHandle:
    """A vector as float32."""

    def __init__(self, buffer: cl.Buffer, parts: tuple[int, ...]) -> None:
        self._buffer: cl.Buffer | None = buffer
        self.parts = parts
        self.nbytes = 4 * sum(parts)

    @property
    def buffer(self) -> cl.Buffer:
        if self._buffer is None:
            raise DeviceError("the weights' device is closed")
        return self._buffer

    def close(self) -> None:
        self._buffer = None
        self.nbytes = 0


def matrix_of(handle: Handle) -> MatrixHandle:
    if not isinstance(handle, MatrixHandle):
        raise ValueError("this op takes a matrix that this device placed")
    return handle


def vector_of(handle: Handle) -> cl.Buffer:
    if not isinstance(handle, VectorHandle):
        raise ValueError("this op takes a vector that this device placed")
    return handle.buffer


def place(
    runtime: Runtime, parts: Sequence[Weight], shard: Shard | None
) -> MatrixHandle | VectorHandle:
    check_parts(parts, shard)
    cut = [_cut(part, shard) for part in parts]
    sizes = tuple(part.shape[-2 if len(part.shape) > 1 else -1] for part in cut)
    if len(cut[0].shape) == 1:
        vector = np.concatenate([part.dequantize() for part in cut], dtype=np.float32)
        runtime.check_fits("weights", vector.nbytes)
        return VectorHandle(runtime.upload(vector), sizes)
    experts = cut[0].shape[0] if len(cut[0].shape) == 3 else None
    packables = [packable(part) for part in cut]
    # The experts of a stack are found by their size, so its parts are placed one by one.
    groups = (
        [list(group) for _, group in itertools.groupby(packables, lambda part: part.signature)]
        if experts is None
        else [[part] for part in packables]
    )
    nbytes = [packed_size(group) for group in groups]
    for size in nbytes:
        runtime.check_buffer("weights", size)
    runtime.check_fits("weights", sum(nbytes))
    matrices = tuple(_matrix(runtime, group, experts or 1) for group in groups)
    return MatrixHandle(matrices, sizes, sum(nbytes), experts)


def _matrix(runtime: Runtime, group: list[Packable], experts: int) -> Matrix:
    parts = tuple(part.rows // experts for part in group)
    return Matrix(
        buffer=runtime.upload(pack(group)),
        outputs=sum(parts),
        columns=group[0].columns,
        parts=parts,
        macros=dict(group[0].macros),
        ordered=group[0].order is not None,
    )


def _cut(weight: Weight, shard: Shard | None) -> Weight:
    if shard is None:
        return weight
    if shard.axis == "rows":
        rows = weight.shape[-2 if len(weight.shape) > 1 else -1]
        return weight.take_rows(np.arange(*shard_window(rows, "rows", shard)))
    return _columns(weight, *shard_window(weight.shape[-1], "columns", shard))


def _columns(weight: Weight, begin: int, end: int) -> Weight:
    """Some of the inputs. Where they cut through groups, or are spread over them by an order of
    inputs, the weight becomes float32."""
    if isinstance(weight, Dense):
        return Dense(array=weight.array[..., begin:end])
    assert isinstance(weight, (GroupAffine, GroupFloat))
    group, whole = weight.group, weight.group == weight.shape[-1]
    blocked = isinstance(weight, GroupFloat) and weight.block is not None
    if weight.input_order is not None or blocked or (not whole and (begin % group or end % group)):
        return Dense(array=weight.dequantize()[..., begin:end])
    codes = unpack_codes(weight.codes, weight.bits, weight.shape[-1])[..., begin:end]
    groups = slice(None) if whole else slice(begin // group, end // group)
    changes: dict[str, Any] = {
        "shape": (*weight.shape[:-1], end - begin),
        "group": end - begin if whole else group,
        "codes": pack_codes(np.ascontiguousarray(codes), weight.bits),
        "scale": scale_values(weight.scale)[..., groups],
    }
    if isinstance(weight, GroupAffine) and weight.bias is not None:
        changes["bias"] = scale_values(weight.bias)[..., groups]
    return dataclasses.replace(weight, **changes)
