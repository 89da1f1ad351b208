"""Weights as `kernels/weights.cl` reads them: codes in blocks of 32 columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from polysilicon.backend import (
    Dense,
    GroupAffine,
    GroupFloat,
    SuperScaled,
    Weight,
    scale_values,
    unpack_codes,
)

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

BLOCK = 32
"""Columns of a block. Scales are looked up for its halves."""

_WHOLE_ROW = 31
"""A shift that leaves no group number: one group a row."""

_ALIGNMENT = 64
"""Bytes on which sections begin, for vector loads."""

_CHUNK = 1 << 24
"""Elements repacked at a time, which bounds the scratch memory."""

_NUMBER_KINDS = {
    np.dtype(np.float32): 0,
    np.dtype(np.float16): 1,
    np.dtype(ml_dtypes.bfloat16): 2,
}
_SUPER, _NONE = 4, 8

_HEADER_WORDS = 22


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Numbers:
    """Scales or biases of rows: `[R, G]`, or codes of one byte under super-scales `[R, S]`.

    groups: those that the padded columns need; columns of `numbers` up to that are zeros.
    """

    numbers: Array
    groups: int
    supers: Array | None = None
    super_shift: int = 0
    super_offset: int = 0

    @property
    def super_count(self) -> int:
        return ((self.groups - 1) >> self.super_shift) + 1

    @property
    def kind(self) -> int:
        if self.supers is None:
            return _NUMBER_KINDS[self.numbers.dtype]
        return _SUPER + _NUMBER_KINDS[self.supers.dtype]

    @property
    def signature(self) -> tuple[int, ...]:
        return (self.kind, self.groups, self.super_shift, self.super_offset)

    @property
    def usual(self) -> bool:
        """Whether they are of a kind that kernels are built for: float16, plain or under
        super-scales of 8 groups and more."""
        return self.kind == 1 or (self.kind == _SUPER + 1 and self.super_shift >= 3)

    def sections(self) -> Iterator[Array]:
        yield _widened(self.numbers, self.groups)
        if self.supers is not None:
            yield _widened(self.supers, self.super_count)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Packable:
    """One weight as it will be placed. rows: of all experts together."""

    weight: Weight
    rows: int
    columns: int
    macros: tuple[tuple[str, int], ...]
    row_bytes: int
    group_shift: int = 0
    offset: int = 0
    scale: Numbers | None = None
    bias: Numbers | None = None
    table: npt.NDArray[np.float32] | None = None
    order: npt.NDArray[np.int32] | None = None

    @property
    def signature(self) -> tuple[Any, ...]:
        """Matrices of one signature can be placed as one."""
        return (
            self.columns,
            self.macros,
            self.group_shift,
            self.offset,
            *(None if part is None else part.signature for part in (self.scale, self.bias)),
            *(None if part is None else part.tobytes() for part in (self.table, self.order)),
        )

    def code_rows(self) -> Iterator[Bytes]:
        """The rows of codes, some at a time: uint8 `[n, row_bytes]`."""
        step = max(1, _CHUNK // max(1, self.columns))
        weight = self.weight
        if isinstance(weight, Dense):
            flat = weight.array.reshape(self.rows, self.columns)
            for start in range(0, self.rows, step):
                yield _blocks(flat[start : start + step]).view(np.uint8)
            return
        assert isinstance(weight, (GroupAffine, GroupFloat))
        packed = weight.codes.reshape(self.rows, -1)
        for start in range(0, self.rows, step):
            codes = unpack_codes(packed[start : start + step], weight.bits, self.columns)
            yield pack_blocks(_blocks(codes), weight.bits)


def packable(weight: Weight) -> Packable:
    """How a matrix or stack is placed. Groups that the kernels cannot find by shifts are split, or
    where they are no multiple of 16 columns, the weight becomes float32."""
    *rows, columns = weight.shape
    count = int(np.prod(rows))
    blocks = -(-columns // BLOCK)
    whole = () if columns % BLOCK else (("WHOLE", 1),)
    if isinstance(weight, Dense):
        return Packable(
            weight=weight,
            macros=(("DENSE", 1 + _NUMBER_KINDS[weight.array.dtype]), *whole),
            row_bytes=blocks * BLOCK * weight.array.itemsize,
            rows=count,
            columns=columns,
        )
    assert isinstance(weight, (GroupAffine, GroupFloat))
    width = weight.group
    if isinstance(weight, GroupFloat) and weight.block is not None:
        width = weight.block[1]
    if width < columns and width % 16:
        return packable(Dense(array=weight.dequantize()))
    halves = width // 16
    shift = _WHOLE_ROW if width >= columns else (halves & -halves).bit_length() - 1
    split = 1 if width >= columns else halves >> shift
    groups = ((2 * blocks - 1) >> shift) + 1
    macros: tuple[tuple[str, int], ...] = (("CODE_BITS", weight.bits),)
    scale: Any = weight.scale
    bias = table = None
    offset = 0
    if isinstance(weight, GroupAffine):
        bias = None if weight.bias is None else _numbers(weight.bias, groups, split)
        offset = weight.offset
    else:
        macros += (("CODE_TABLE", 1),)
        table = np.zeros(1 << weight.bits, np.float32)
        table[: len(weight.values_table)] = weight.values_table
        if weight.block is not None:
            scale = np.repeat(scale_values(scale), weight.block[0], axis=-2)
            scale = scale[..., : weight.shape[-2], :]
    numbers = _numbers(scale, groups, split)
    if numbers.usual and (bias is None or (bias.usual and bias.kind == numbers.kind)):
        macros += (("NUMBER_KIND", numbers.kind),)
    return Packable(
        weight=weight,
        macros=macros + whole,
        row_bytes=blocks * 4 * weight.bits,
        group_shift=shift,
        offset=offset,
        scale=numbers,
        bias=bias,
        table=table,
        order=weight.input_order,
        rows=count,
        columns=columns,
    )


def _numbers(scales: Array | SuperScaled, groups: int, split: int) -> Numbers:
    """split: groups of the kernels in one of the weight's."""
    if isinstance(scales, SuperScaled):
        span = scales.group
        single = span >= scales.count
        if split == 1 and (single or span & (span - 1) == 0):
            return Numbers(
                numbers=_flat(unpack_codes(scales.codes, scales.bits, scales.count)),
                groups=groups,
                supers=_flat(scales.scale),
                super_shift=_WHOLE_ROW if single else span.bit_length() - 1,
                super_offset=scales.offset,
            )
        scales = scales.values()
    return Numbers(numbers=_flat(np.repeat(scales, split, axis=-1)), groups=groups)


def _flat(array: Array) -> Array:
    return array.reshape(-1, array.shape[-1])


def _widened(array: Array, columns: int) -> Array:
    """The first columns, with zeros where there are fewer."""
    missing = columns - array.shape[1]
    if missing <= 0:
        return np.ascontiguousarray(array[:, :columns])
    return np.concatenate([array, np.zeros((len(array), missing), array.dtype)], axis=1)


def _blocks(rows: Array) -> Array:
    return _widened(rows, -(-rows.shape[1] // BLOCK) * BLOCK)


def pack_blocks(codes: Bytes, bits: int) -> Bytes:
    """Codes uint8 `[n, 32 * B]` to planes of their bits, block by block: `[n, 4 * bits * B]`."""
    if bits == 8:
        return codes
    rows = len(codes)
    planes = []
    left = bits
    for plane in (4, 2, 1):
        if not bits & plane:
            continue
        left -= plane
        part = codes >> left & (1 << plane) - 1
        lanes = part.reshape(rows, -1, 8 // plane, 4 * plane)
        packed = lanes[:, :, 0].copy()
        for lane in range(1, 8 // plane):
            packed |= lanes[:, :, lane] << plane * lane
        planes.append(packed)
    return np.concatenate(planes, axis=2).reshape(rows, -1)


def packed_size(parts: list[Packable]) -> int:
    """Bytes that `pack` makes of parts with one signature."""
    return _layout(parts)[1]


def pack(parts: list[Packable]) -> Bytes:
    """One buffer of parts that have one signature, row after row."""
    first = parts[0]
    places, size = _layout(parts)
    result = np.zeros(size, np.uint8)
    header = result[: 4 * _HEADER_WORDS].view("<u4")
    header[:7] = (
        sum(part.rows for part in parts),
        first.columns,
        -(-first.columns // BLOCK),
        places["codes"] // 4,
        first.row_bytes,
        first.group_shift,
        0 if first.scale is None else first.scale.groups,
    )
    header[7] = first.offset & 0xFFFFFFFF
    position = places["codes"]
    for part in parts:
        for codes in part.code_rows():
            result[position : position + codes.size] = codes.reshape(-1)
            position += codes.size
    for word, name, array in ((8, "table", first.table), (9, "order", first.order)):
        if array is not None:
            header[word] = places[name] // 4
            result[places[name] : places[name] + array.nbytes] = array.view(np.uint8)
    for word, name in ((10, "scale"), (16, "bias")):
        numbers = getattr(first, name)
        if numbers is None:
            header[word] = _NONE
            continue
        header[word] = numbers.kind
        sections = [list(getattr(part, name).sections()) for part in parts]
        for index, arrays in enumerate(zip(*sections, strict=True)):
            position = places[f"{name}{index}"]
            header[word + 1 + index] = position // 4
            for array in arrays:
                data = array.reshape(-1).view(np.uint8)
                result[position : position + data.size] = data
                position += data.size
        header[word + 3 : word + 6] = (
            numbers.super_shift,
            numbers.super_count,
            numbers.super_offset & 0xFFFFFFFF,
        )
    return result


def _layout(parts: list[Packable]) -> tuple[dict[str, int], int]:
    """Where the sections begin, and the size of all."""
    first = parts[0]
    rows = sum(part.rows for part in parts)
    sizes = {"header": 4 * _HEADER_WORDS, "codes": rows * first.row_bytes}
    for name in ("table", "order"):
        array = getattr(first, name)
        if array is not None:
            sizes[name] = array.nbytes
    for name in ("scale", "bias"):
        numbers = getattr(first, name)
        if numbers is not None:
            sizes[f"{name}0"] = rows * numbers.groups * numbers.numbers.itemsize
            if numbers.supers is not None:
                sizes[f"{name}1"] = rows * numbers.super_count * numbers.supers.itemsize
    # The kernels read vectors of scales, and past the end of the last row.
    sizes["end"] = 16 * 4
    places: dict[str, int] = {}
    position = 0
    for name, size in sizes.items():
        places[name] = position
        position += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places, position
