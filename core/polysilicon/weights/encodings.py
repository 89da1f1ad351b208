"""The three canonical weight encodings that every checkpoint format is read into.

A weight is a matrix `[N, K]` (N outputs, K inputs), a stack of E expert matrices `[E, N, K]`, or a
vector `[N]`. Groups run along the last axis. Codes are kept packed at their own width, so that no
format grows when it is read.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
Rows = npt.NDArray[np.integer[Any]]

DENSE_DTYPES = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}


def pack_codes(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Pack unsigned codes along the last axis into a little-endian bit stream.

    Code i takes bits `[i * bits, (i + 1) * bits)` of its row's stream, lowest bit first; a row ends
    on a byte border, padded with zero bits. `codes` is uint8 `[..., K]` with values below
    `2**bits`; the result is uint8 `[..., ceil(K * bits / 8)]`.
    """
    assert 1 <= bits <= 8
    if bits == 8:
        return codes
    count = codes.shape[-1]
    size = -(-count * bits // 8)
    per_word = 8 // bits if 8 % bits == 0 else 8
    word_bytes = 1 if 8 % bits == 0 else bits
    padding = -count % per_word
    if padding:
        codes = np.concatenate([codes, np.zeros((*codes.shape[:-1], padding), np.uint8)], axis=-1)
    lanes = codes.reshape(*codes.shape[:-1], (count + padding) // per_word, per_word)
    words: Array = np.zeros(lanes.shape[:-1], np.uint8 if word_bytes == 1 else "<u8")
    for lane in range(per_word):
        words |= np.left_shift(lanes[..., lane], lane * bits, dtype=words.dtype)
    stream = words[..., None].view(np.uint8)[..., :word_bytes]
    stream = stream.reshape(*codes.shape[:-1], lanes.shape[-2] * word_bytes)
    return np.ascontiguousarray(stream[..., :size])


def unpack_codes(packed: npt.NDArray[np.uint8], bits: int, count: int) -> npt.NDArray[np.uint8]:
    """Undo `pack_codes`: uint8 `[..., ceil(count * bits / 8)]` to codes uint8 `[..., count]`."""
    assert 1 <= bits <= 8
    if bits == 8:
        return packed
    per_word = 8 // bits if 8 % bits == 0 else 8
    word_bytes = 1 if 8 % bits == 0 else bits
    padding = -packed.shape[-1] % word_bytes
    if padding:
        packed = np.concatenate(
            [packed, np.zeros((*packed.shape[:-1], padding), np.uint8)], axis=-1
        )
    stream = packed.reshape(*packed.shape[:-1], packed.shape[-1] // word_bytes, word_bytes)
    if word_bytes == 1:
        words: Array = stream[..., 0]
    else:
        wide = np.zeros((*stream.shape[:-1], 8), np.uint8)
        wide[..., :word_bytes] = stream
        words = wide.view("<u8")[..., 0]
    codes = np.empty((*words.shape, per_word), np.uint8)
    mask = words.dtype.type((1 << bits) - 1)
    for lane in range(per_word):
        codes[..., lane] = (words >> words.dtype.type(lane * bits)) & mask
    codes = codes.reshape(*words.shape[:-1], words.shape[-1] * per_word)
    return np.ascontiguousarray(codes[..., :count])


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SuperScaled:
    """Scales that are themselves codes: `scale[s] * (code - offset)`, s = group index // group.

    codes: uint8 `[..., ceil(G * bits / 8)]`, packed by `pack_codes`; G = number of weight groups in
    a row (`count`).
    scale: f16, bf16 or f32 `[..., ceil(G / group)]`. Both products of K-quants are exact in
    float32.
    """

    codes: npt.NDArray[np.uint8]
    bits: int
    offset: int
    count: int
    scale: Array
    group: int

    def values(self) -> Float32:
        """float32 `[..., G]`."""
        codes = unpack_codes(self.codes, self.bits, self.count).astype(np.float32)
        scale = np.repeat(self.scale.astype(np.float32), self.group, axis=-1)
        return scale[..., : self.count] * (codes - np.float32(self.offset))

    def take_rows(self, index: Rows) -> SuperScaled:
        """The rows (axis -2) that `index` names, in its order."""
        return dataclasses.replace(
            self, codes=self.codes.take(index, axis=-2), scale=self.scale.take(index, axis=-2)
        )

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes


Scales = Array | SuperScaled


def scale_values(scales: Scales) -> Float32:
    """Scales of either form as float32 `[..., G]`."""
    return scales.values() if isinstance(scales, SuperScaled) else scales.astype(np.float32)


def _take_scale_rows(scales: Scales, index: Rows) -> Scales:
    if isinstance(scales, SuperScaled):
        return scales.take_rows(index)
    return scales.take(index, axis=-2)


class Weight(ABC):
    """One tensor of a checkpoint in a canonical encoding. `shape` is the logical shape."""

    shape: tuple[int, ...]

    @abstractmethod
    def dequantize(self) -> Float32:
        """The values as float32 of the logical shape: what every kernel is held to."""

    @abstractmethod
    def take_rows(self, index: Rows) -> Weight:
        """The outputs that `index` names, in its order; values are exactly those of the rows taken.

        index: integers `[M]`, each a row (axis -2 of a matrix or a stack, axis 0 of a vector);
        rows may be left out and repeated. A quantised vector has no rows of codes, so it becomes
        `Dense` float32.
        """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held, scales included."""

    @property
    @abstractmethod
    def encoding(self) -> str:
        """A short name such as `dense:bf16`, `affine:4/32` or `float:f8_e4m3/128`."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Dense(Weight):
    """Plain numbers. array: f32, f16 or bf16 (ml_dtypes) of the logical shape."""

    array: Array

    def __post_init__(self) -> None:
        assert self.array.dtype in DENSE_DTYPES.values(), self.array.dtype

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.array.shape

    def dequantize(self) -> Float32:
        return np.asarray(self.array, np.float32)

    def take_rows(self, index: Rows) -> Dense:
        return Dense(array=self.array.take(index, axis=-2 if self.array.ndim > 1 else 0))

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    @property
    def encoding(self) -> str:
        name = next(name for name, dtype in DENSE_DTYPES.items() if dtype == self.array.dtype)
        return f"dense:{name}"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GroupAffine(Weight):
    """`scale[g] * (code - offset) + bias[g]`, evaluated in float32 in that order.

    shape: logical `[..., N, K]`. bits: 2 to 8.
    group: elements that share a scale, 16 to 256 or K; divides K.
    codes: uint8 `[..., N, ceil(K * bits / 8)]`, packed by `pack_codes`.
    scale, bias: `[..., N, K / group]`, f16, bf16 or f32, or codes under a super-scale. Symmetric
    formats store an `offset` and no bias.
    input_order: int32 `[K]` or None; stored column j multiplies input `input_order[j]` (GPTQ's
    act-order).
    input_scale: static scale of the activations for integer products, or None.
    """

    shape: tuple[int, ...]
    bits: int
    group: int
    codes: npt.NDArray[np.uint8]
    scale: Scales
    offset: int = 0
    bias: Scales | None = None
    input_order: npt.NDArray[np.int32] | None = None
    input_scale: float | None = None

    def __post_init__(self) -> None:
        *rows, columns = self.shape
        assert 2 <= self.bits <= 8
        assert columns % self.group == 0, (self.shape, self.group)
        assert self.codes.shape == (*rows, -(-columns * self.bits // 8)), self.codes.shape

    def dequantize(self) -> Float32:
        *rows, columns = self.shape
        codes = unpack_codes(self.codes, self.bits, columns).astype(np.float32)
        values = codes.reshape(*rows, columns // self.group, self.group)
        values -= np.float32(self.offset)
        # Scales may be so large that values come out infinite.
        with np.errstate(over="ignore", invalid="ignore"):
            values *= scale_values(self.scale)[..., None]
            if self.bias is not None:
                values += scale_values(self.bias)[..., None]
        return in_input_order(values.reshape(self.shape), self.input_order)

    def take_rows(self, index: Rows) -> Weight:
        if len(self.shape) == 1:
            return Dense(array=self.dequantize().take(index))
        return dataclasses.replace(
            self,
            shape=(*self.shape[:-2], len(index), self.shape[-1]),
            codes=self.codes.take(index, axis=-2),
            scale=_take_scale_rows(self.scale, index),
            bias=None if self.bias is None else _take_scale_rows(self.bias, index),
        )

    @property
    def nbytes(self) -> int:
        return (
            self.codes.nbytes + self.scale.nbytes + (0 if self.bias is None else self.bias.nbytes)
        )

    @property
    def encoding(self) -> str:
        return f"affine:{self.bits}/{self.group}"


# fp4 e2m1: sign, two exponent bits, one mantissa bit (OCP Microscaling Formats 1.0).
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)

FLOAT_TABLES: dict[str, Float32] = {
    "f8_e4m3": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32),
    "f8_e5m2": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e5m2).astype(np.float32),
    "f4_e2m1": np.concatenate([_E2M1, -_E2M1]),
}


def _e8m0() -> Array:
    bits = np.arange(256, dtype=np.uint16) << 7
    bits[0], bits[255] = 0x0040, 0x7FC0
    return bits.view(ml_dtypes.bfloat16)


E8M0 = _e8m0()
"""Scales of the OCP Microscaling Formats by code: 2^(code - 127), all exact in bf16; 255 is NaN."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GroupFloat(Weight):
    """`scale[g] * table[code]`, evaluated in float32.

    format: a key of `FLOAT_TABLES`, or `codebook` with a `table` of its own (nf4, IQ types).
    shape, group, codes, scale, input_order, input_scale: as in `GroupAffine`; bits are those that
    the table's length needs, 3 to 8.
    block: `(rows, columns)` of 2-D scale blocks, or None. With it, scale is
    `[..., ceil(N / rows), ceil(K / columns)]`.
    """

    shape: tuple[int, ...]
    format: str
    group: int
    codes: npt.NDArray[np.uint8]
    scale: Scales
    table: Float32 | None = None
    block: tuple[int, int] | None = None
    input_order: npt.NDArray[np.int32] | None = None
    input_scale: float | None = None

    def __post_init__(self) -> None:
        *rows, columns = self.shape
        assert (self.table is not None) == (self.format == "codebook")
        assert self.block is not None or columns % self.group == 0
        assert self.codes.shape == (*rows, -(-columns * self.bits // 8)), self.codes.shape

    @property
    def values_table(self) -> Float32:
        """float32 `[2**bits]`: what each code stands for before scaling."""
        return FLOAT_TABLES[self.format] if self.table is None else self.table

    @property
    def bits(self) -> int:
        return (len(self.values_table) - 1).bit_length()

    def dequantize(self) -> Float32:
        *rows, columns = self.shape
        values = self.values_table[unpack_codes(self.codes, self.bits, columns)]
        scale = scale_values(self.scale)
        if self.block is not None:
            height, width = self.block
            scale = np.repeat(np.repeat(scale, height, axis=-2), width, axis=-1)
            scale = scale[..., : rows[-1], :columns]
        else:
            values = values.reshape(*rows, columns // self.group, self.group)
            scale = scale[..., None]
        # Scales may be so large that values come out infinite.
        with np.errstate(over="ignore", invalid="ignore"):
            values = (values * scale).reshape(self.shape)
        return in_input_order(values, self.input_order)

    def take_rows(self, index: Rows) -> Weight:
        if len(self.shape) == 1:
            return Dense(array=self.dequantize().take(index))
        scale_rows, block = index, self.block
        if block is not None:
            # Rows in a new order no longer fill blocks of equal scale, so each brings its own.
            scale_rows, block = index % self.shape[-2] // block[0], (1, block[1])
        return dataclasses.replace(
            self,
            shape=(*self.shape[:-2], len(index), self.shape[-1]),
            codes=self.codes.take(index, axis=-2),
            scale=_take_scale_rows(self.scale, scale_rows),
            block=block,
        )

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    @property
    def encoding(self) -> str:
        span = "x".join(map(str, self.block)) if self.block else str(self.group)
        return f"float:{self.format}/{span}"


def in_input_order(values: Float32, order: npt.NDArray[np.int32] | None) -> Float32:
    """Put stored columns back where the inputs are: stored column j becomes column `order[j]`."""
    if order is None:
        return values
    result = np.empty_like(values)
    result[..., order] = values
    return result
