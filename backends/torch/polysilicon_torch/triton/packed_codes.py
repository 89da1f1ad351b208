"""What kernels read of a packed matrix: tiles of its codes as floats, and their scales.

An unsigned code c below 128 becomes a bfloat16 without a conversion: put under the exponent of 128
its bits read as 128 + c, exactly, and likewise as 1024 + c in float16. A product takes the excess
off through the sum of the inputs. Only shifts, masks and constants stand between the load of the
words and the matrix product, so that the compiler loads them straight into its operand's layout.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import triton
import triton.language as tl

from polysilicon_torch.placed import WHOLE_ROW, PackedMatrix


@triton.constexpr_function
def plane_width(bits: int, plane: int) -> int:
    """Bits of a code that a plane holds, 0 where the code has no such plane: `placed.PLANES`."""
    first = 2 if bits < 4 else 4 if bits < 8 else 8
    rest = bits - first
    second = 2 if rest > 1 else rest
    return (first, second, rest - second)[plane]


@triton.constexpr_function
def unit_of(bits: int) -> int:
    """Inputs of a unit of four words."""
    width: int = plane_width(bits, 0)
    return 4 * 32 // width


@triton.constexpr_function
def run_of(group: int, limit: int = 128) -> int:
    """Inputs that a product may sum before it scales them: a power of two that divides a group."""
    run = 16
    while run < min(limit, 128) and group % (2 * run) == 0:
        run *= 2
    return run


@triton.constexpr_function
def _magic(format: str, bits: int, dtype: tl.dtype) -> int:
    """The exponent under which a code is put, 0 where it is converted."""
    if format != "affine" or dtype.name == "fp32" or (dtype.name == "bf16" and bits == 8):
        return 0
    return 0x4300 if dtype.name == "bf16" else 0x6400


@triton.constexpr_function
def excess_of(format: str, bits: int, dtype: tl.dtype) -> int:
    """What `code_tile` adds to every code."""
    magic = _magic(format, bits, dtype)
    return 128 if magic == 0x4300 else 1024 if magic == 0x6400 else 0


@triton.constexpr_function
def factor_of(format: str) -> float:
    """What the values of `code_tile` are to be multiplied by, beside the scale."""
    return 256.0 if format == "f8_e4m3" else 16384.0 if format == "f4_e2m1" else 1.0


@triton.jit
def _spread(word: tl.tensor, HALF: tl.constexpr) -> tl.tensor:
    """The halves of a word of 2 * HALF bits at bits 0 and 16 of an int32."""
    wide = word.to(tl.int32)
    return (wide & ((1 << HALF) - 1)) | ((wide << (16 - HALF)) & (((1 << HALF) - 1) << 16))


@triton.jit
def _code_pairs(
    first: tl.tensor,
    second: tl.tensor | None,
    third: tl.tensor | None,
    pair: tl.constexpr,
    BITS: tl.constexpr,
) -> tl.tensor:
    """The codes of slots `pair` and `slots / 2 + pair` at bits 0 and 16 of an int32."""
    low: tl.constexpr = plane_width(BITS, 0)
    middle: tl.constexpr = plane_width(BITS, 1)
    high: tl.constexpr = plane_width(BITS, 2)
    codes = (first >> (low * pair)) & (((1 << low) - 1) * 0x10001)
    if middle > 0:
        bits = _spread(second, middle * 16 // low) >> (middle * pair)
        codes |= (bits & (((1 << middle) - 1) * 0x10001)) << low
    if high > 0:
        bits = _spread(third, high * 16 // low) >> (high * pair)
        codes |= (bits & (((1 << high) - 1) * 0x10001)) << (low + middle)
    return codes


@triton.jit
def _value_pairs(
    first: tl.tensor,
    second: tl.tensor | None,
    third: tl.tensor | None,
    table: tl.tensor | None,
    pair: tl.constexpr,
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """`[.., 4, 2]`: the values of two slots, which belong to neighbouring inputs."""
    codes = _code_pairs(first, second, third, pair, BITS)
    magic: tl.constexpr = _magic(FORMAT, BITS, DTYPE)
    if magic != 0:
        codes |= magic * 0x10001
        even = codes.to(tl.int16).to(DTYPE, bitcast=True)
        odd = (codes >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    elif FORMAT == "affine":
        even = (codes & 0xFFFF).to(tl.float32).to(DTYPE)
        odd = (codes >> 16).to(tl.float32).to(DTYPE)
    elif FORMAT == "codebook":
        even = tl.load(table + (codes & 0xFFFF)).to(DTYPE)
        odd = tl.load(table + (codes >> 16)).to(DTYPE)
    else:
        # The bits of small floats go where a float16 has them; that leaves the difference of the
        # exponents' biases to `factor_of`, and keeps subnormals right.
        if FORMAT == "f8_e4m3":
            halves = ((codes & 0x00800080) << 8) | ((codes & 0x007F007F) << 7)
        elif FORMAT == "f8_e5m2":
            halves = codes << 8
        else:
            tl.static_assert(FORMAT == "f4_e2m1")
            halves = ((codes & 0x00080008) << 12) | ((codes & 0x00070007) << 9)
        even = halves.to(tl.int16).to(tl.float16, bitcast=True)
        odd = (halves >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        if tl.float16 != DTYPE:
            even = even.to(tl.float32).to(DTYPE)
            odd = odd.to(tl.float32).to(DTYPE)
    return tl.join(even, odd)


@triton.jit
def code_tile(
    first: tl.tensor,
    second: tl.tensor | None,
    third: tl.tensor | None,
    table: tl.tensor | None,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Words `[ROWS, UNITS, 4]` of each plane to `[ROWS, inputs]`, inputs in their order: values in
    DTYPE, unscaled, `excess_of` above the codes, and to be multiplied by `factor_of`."""
    p0 = _value_pairs(first, second, third, table, 0, FORMAT, BITS, DTYPE)
    p1 = _value_pairs(first, second, third, table, 1, FORMAT, BITS, DTYPE)
    if BITS == 8:
        tile = tl.permute(tl.join(p0, p1), (0, 1, 4, 2, 3))
    else:
        p2 = _value_pairs(first, second, third, table, 2, FORMAT, BITS, DTYPE)
        p3 = _value_pairs(first, second, third, table, 3, FORMAT, BITS, DTYPE)
        if BITS >= 4:
            tile = tl.join(tl.join(p0, p2), tl.join(p1, p3))
            tile = tl.permute(tile, (0, 1, 4, 5, 2, 3))
        else:
            p4 = _value_pairs(first, second, third, table, 4, FORMAT, BITS, DTYPE)
            p5 = _value_pairs(first, second, third, table, 5, FORMAT, BITS, DTYPE)
            p6 = _value_pairs(first, second, third, table, 6, FORMAT, BITS, DTYPE)
            p7 = _value_pairs(first, second, third, table, 7, FORMAT, BITS, DTYPE)
            even = tl.join(tl.join(p0, p4), tl.join(p2, p6))
            odd = tl.join(tl.join(p1, p5), tl.join(p3, p7))
            tile = tl.permute(tl.join(even, odd), (0, 1, 4, 5, 6, 2, 3))
    return tl.reshape(tile, (ROWS, UNITS * unit_of(BITS)))


@triton.jit
def load_scales(
    values: tl.tensor,
    super: tl.tensor | None,
    row: tl.tensor,
    group: tl.tensor,
    groups: tl.tensor,
    SCALE_ROWS: tl.constexpr,
    SUPER_GROUP: tl.constexpr,
    OFFSET: tl.constexpr,
) -> tl.tensor:
    """float32 scales by row and group, which broadcast. groups: those of a row."""
    block = row // 8
    lane = row % 8 if SCALE_ROWS == 8 else 0
    scales = tl.load(values + (block * groups + group) * SCALE_ROWS + lane).to(tl.float32)
    if super is not None:
        above = block * tl.cdiv(groups, SUPER_GROUP) + group // SUPER_GROUP
        factor = tl.load(super + above * SCALE_ROWS + lane).to(tl.float32)
        scales = (scales - OFFSET) * factor
    return scales


def packed_arguments(matrix: PackedMatrix) -> dict[str, Any]:
    """A packed matrix as the arguments by which every kernel takes one."""
    first, second, third = (*matrix.planes, None, None)[:3]
    scale, shift = matrix.scale, matrix.bias
    return {
        "first": first,
        "second": second,
        "third": third,
        "scale": scale.values,
        "scale_super": scale.super,
        "shift": None if shift is None else shift.values,
        "shift_super": None if shift is None else shift.super,
        "table": matrix.table,
        "units": matrix.units,
        "groups": scale.values.shape[-2],
        "FORMAT": matrix.format,
        "BITS": matrix.bits,
        "OFFSET": matrix.offset,
        "GROUP": matrix.group,
        "WHOLE_ROW": matrix.group == WHOLE_ROW,
        "SCALE_ROWS": scale.values.shape[-1],
        "SCALE_SUPER": scale.super_group,
        "SCALE_OFFSET": scale.offset,
        "SHIFT_ROWS": 8 if shift is None else shift.values.shape[-1],
        "SHIFT_SUPER": 1 if shift is None else shift.super_group,
        "SHIFT_OFFSET": 0 if shift is None else shift.offset,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedKind:
    """An encoding as kernels are compiled for it. super_group: 0 without super-scales."""

    name: str
    format: str = "affine"
    bits: int
    group: int
    offset: int = 0
    shift: bool = False
    scale: str = "fp16"
    super_group: int = 0
    super_offset: int = 0
    scale_rows: int = 8

    def signature(self) -> dict[str, str]:
        """Triton's types of the arguments that `packed_arguments` gives for such a matrix."""
        scale = "u8" if self.super_group else self.scale
        names = {"first": "*i32", "scale": f"*{scale}", "units": "i32", "groups": "i32"}
        if self.super_group:
            names["scale_super"] = "*fp16"
        if self.shift:
            names["shift"] = f"*{scale}"
            if self.super_group:
                names["shift_super"] = "*fp16"
        for plane, name in ((1, "second"), (2, "third")):
            if plane_width(self.bits, plane):
                width = plane_width(self.bits, plane) * unit_of(self.bits) // 4
                names[name] = f"*i{width}"
        if self.format == "codebook":
            names["table"] = "*fp32"
        return names

    def constants(self) -> dict[str, int | str | bool | None]:
        """The constexprs among those arguments, with None for the pointers that are not given."""
        absent = {"second", "third", "scale_super", "shift", "shift_super", "table"}
        return dict.fromkeys(sorted(absent - self.signature().keys())) | {
            "FORMAT": self.format,
            "BITS": self.bits,
            "OFFSET": self.offset,
            "GROUP": self.group,
            "WHOLE_ROW": self.group == WHOLE_ROW,
            "SCALE_ROWS": self.scale_rows,
            "SCALE_SUPER": self.super_group or 1,
            "SCALE_OFFSET": self.super_offset,
            "SHIFT_ROWS": self.scale_rows if self.shift else 8,
            "SHIFT_SUPER": self.super_group if self.shift and self.super_group else 1,
            "SHIFT_OFFSET": 0,
        }


KINDS = (
    PackedKind(name="Q4_0", bits=4, group=32, offset=8),
    PackedKind(name="Q4_1", bits=4, group=32, shift=True),
    PackedKind(name="Q5_0", bits=5, group=32, offset=16),
    PackedKind(name="Q5_1", bits=5, group=32, shift=True),
    PackedKind(name="Q8_0", bits=8, group=32, offset=128),
    PackedKind(name="Q2_K", bits=2, group=16, shift=True, super_group=16),
    PackedKind(name="Q3_K", bits=3, group=16, offset=4, super_group=16, super_offset=32),
    PackedKind(name="Q4_K", bits=4, group=32, shift=True, super_group=8),
    PackedKind(name="Q5_K", bits=5, group=32, shift=True, super_group=8),
    PackedKind(name="Q6_K", bits=6, group=16, offset=32, super_group=16, super_offset=128),
    PackedKind(name="W4/128", bits=4, group=128, offset=8),
    PackedKind(name="AWQ", bits=4, group=128, shift=True),
    PackedKind(name="MLX", bits=4, group=64, shift=True, scale="bf16"),
    PackedKind(name="W7", bits=7, group=64, shift=True, scale="bf16"),
    PackedKind(name="W8A16", bits=8, group=WHOLE_ROW, offset=128),
    PackedKind(name="fp8/row", format="f8_e4m3", bits=8, group=WHOLE_ROW, scale="fp32"),
    PackedKind(name="fp8/128x128", format="f8_e4m3", bits=8, group=128, scale="fp32", scale_rows=1),
    PackedKind(name="e5m2", format="f8_e5m2", bits=8, group=WHOLE_ROW, scale="fp32"),
    PackedKind(name="MXFP4", format="f4_e2m1", bits=4, group=32, scale="fp32"),
    PackedKind(name="NVFP4", format="f4_e2m1", bits=4, group=16, scale="fp32"),
    PackedKind(name="NF4", format="codebook", bits=4, group=64, scale="fp32"),
    PackedKind(name="IQ", format="codebook", bits=8, group=32, scale="fp32"),
)
"""What the formats of checkpoints are placed as, for ahead-of-time compilation."""
