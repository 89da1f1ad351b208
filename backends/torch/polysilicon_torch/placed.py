"""Weight matrices on the device: dense, or codes in the layout that the product kernels read.

Codes are split into bit planes whose widths are powers of two (5 = 4 + 1, 6 = 4 + 2, 3 = 2 + 1,
7 = 4 + 2 + 1; lowest bits first), so that a kernel unpacks them by shifts alone. A word of the
first plane is an int32 of `slots` codes (16, 8 or 4 codes of 2, 4 or 8 bits); words of the others
hold the remaining bits of the same codes in an int16 or int8. Four words are a unit of `4 * slots`
consecutive inputs: slot `h * slots / 2 + m` of word j belongs to input `8 * m + 2 * j + h` of the
unit. So one shift brings two neighbouring inputs to the halves of a word, where they become a pair
of 16-bit floats, and the four words are what four neighbouring lanes of a matrix unit's operand
need. The words of eight rows lie together: 128 consecutive bytes are what one load into such an
operand takes, from global memory in whole lines, from shared memory without bank conflicts.

Scales that are codes under a super-scale stay so, one byte a code: K-quants grow by an eighth of a
bit a weight, where float32 pairs, the next exact form, would add two bits.
"""

from __future__ import annotations

import dataclasses

import torch

PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
"""Widths of the bit planes of a code, lowest bits first."""

WHOLE_ROW = 1 << 30
"""The group of a matrix with one scale a row."""

FORMATS = ("affine", "f8_e4m3", "f8_e5m2", "f4_e2m1", "codebook")


BLOCK_ROWS = 8
"""Rows whose words lie together."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PlacedScales:
    """Scales or biases `[.., B, G, R]` of B blocks of 8 rows: plain, or under a super-scale,
    `(codes - offset) * super[g // super_group]`.

    R: 8, the block's rows, or 1 where they share a scale (2-D scale blocks).
    values: f16, bf16 or f32; uint8 codes where there is a super-scale.
    super: f16, bf16 or f32 `[.., B, ceil(G / super_group), R]`, or None.
    """

    values: torch.Tensor
    super: torch.Tensor | None = None
    super_group: int = 1
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes + (0 if self.super is None else self.super.nbytes))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DenseMatrix:
    """values: `[N, K]`, or a stack `[E, N, K]`, contiguous, of the activation dtype or float32."""

    values: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PackedMatrix:
    """`scale * (code - offset) + bias` (format `affine`) or `scale * decode(code)` (the others).

    shape: logical `[N, K]` or `[E, N, K]`. format: one of FORMATS. bits: 2 to 8.
    planes: int32, int16 and int8 `[.., B, units, 8, 4]`, B = ceil(N / 8); padding is 0.
    group: consecutive stored inputs that share a scale: a multiple of 16, or WHOLE_ROW.
    table: float32 `[2**bits]` of a codebook. input_order: int64 `[K]`, the input that each stored
    column multiplies: a product takes `x[:, input_order]`.
    e4m3 holds no -0 and no NaN, so that its codes are e4m3fnuz ones too, of half the value.
    """

    shape: tuple[int, ...]
    format: str
    bits: int
    planes: tuple[torch.Tensor, ...]
    group: int
    scale: PlacedScales
    offset: int = 0
    bias: PlacedScales | None = None
    table: torch.Tensor | None = None
    input_order: torch.Tensor | None = None

    @property
    def slots(self) -> int:
        """Codes in a word."""
        return 32 // PLANES[self.bits][0]

    @property
    def units(self) -> int:
        """Units of four words in a row."""
        return int(self.planes[0].shape[-3])

    @property
    def nbytes(self) -> int:
        tensors = (*self.planes, self.table, self.input_order)
        scales = (self.scale, self.bias)
        return sum(part.nbytes for part in (*tensors, *scales) if part is not None)


Matrix = DenseMatrix | PackedMatrix
