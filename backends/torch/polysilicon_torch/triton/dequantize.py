"""The values of packed matrices, for the library to multiply by where rows are very many."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from polysilicon_torch.placed import PackedMatrix
from polysilicon_torch.specialisation import Specialisation
from polysilicon_torch.target import Target
from polysilicon_torch.triton.packed_codes import (
    KINDS,
    code_tile,
    excess_of,
    factor_of,
    load_scales,
    packed_arguments,
    run_of,
    unit_of,
)
from polysilicon_torch.tuning import Tuning

MANY_ROWS = 256
"""From so many rows on, dequantising a matrix costs less than the library's product gains."""


@triton.jit
def dequantize_kernel(
    first: tl.tensor,
    second: tl.tensor | None,
    third: tl.tensor | None,
    scale: tl.tensor,
    scale_super: tl.tensor | None,
    shift: tl.tensor | None,
    shift_super: tl.tensor | None,
    table: tl.tensor | None,
    input_order: tl.tensor | None,
    output: tl.tensor,
    rows: tl.tensor,
    inputs: tl.tensor,
    units: tl.tensor,
    groups: tl.tensor,
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE_ROW: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_SUPER: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    SHIFT_ROWS: tl.constexpr,
    SHIFT_SUPER: tl.constexpr,
    SHIFT_OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """A tile of rows and inputs a program."""
    UNIT: tl.constexpr = unit_of(BITS)
    UNITS: tl.constexpr = BLOCK_K // UNIT
    RUN: tl.constexpr = run_of(GROUP, BLOCK_K)
    EXCESS: tl.constexpr = excess_of(FORMAT, BITS, tl.float32) + OFFSET
    place = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.minimum(place, rows - 1)
    unit = tl.minimum(tl.program_id(1) * UNITS + tl.arange(0, UNITS), units - 1)
    words = ((row // 8).to(tl.int64) * units)[:, None] + unit[None, :]
    words = (words * 32 + (row % 8 * 4)[:, None])[:, :, None] + tl.arange(0, 4)[None, None, :]
    low = tl.load(first + words)
    middle = None if second is None else tl.load(second + words)
    high = None if third is None else tl.load(third + words)
    values = code_tile(low, middle, high, table, BLOCK_M, UNITS, FORMAT, BITS, tl.float32)
    values = tl.reshape(values, (BLOCK_M, BLOCK_K // RUN, RUN)) - EXCESS
    input = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K // RUN) * RUN
    group = 0 if WHOLE_ROW else tl.minimum(input // GROUP, groups - 1)[None, :]
    scales = load_scales(
        scale, scale_super, row[:, None], group, groups, SCALE_ROWS, SCALE_SUPER, SCALE_OFFSET
    )
    values *= scales[:, :, None] * factor_of(FORMAT)
    if shift is not None:
        shifts = load_scales(
            shift, shift_super, row[:, None], group, groups, SHIFT_ROWS, SHIFT_SUPER, SHIFT_OFFSET
        )
        values += shifts[:, :, None]
    values = tl.reshape(values, (BLOCK_M, BLOCK_K))
    column = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = column < inputs
    if input_order is not None:
        column = tl.load(input_order + column, mask=inside, other=0)
    tl.store(
        output + place.to(tl.int64)[:, None] * inputs + column[None, :],
        values.to(output.dtype.element_ty),
        mask=(place < rows)[:, None] & inside[None, :],
    )


def dequantize(matrix: PackedMatrix, *, dtype: torch.dtype, tuning: Tuning) -> torch.Tensor:
    """The values `[N, K]` of a matrix, the inputs in their own order, as `dtype`."""
    rows, inputs = matrix.shape
    output = torch.empty((rows, inputs), dtype=dtype, device=matrix.planes[0].device)
    if output.numel():
        choice = tuning.pick("dequantize", rows=rows, inputs=inputs)
        grid = (triton.cdiv(rows, choice["BLOCK_M"]), triton.cdiv(inputs, choice["BLOCK_K"]))
        dequantize_kernel[grid](
            input_order=matrix.input_order,
            output=output,
            rows=rows,
            inputs=inputs,
            **packed_arguments(matrix),
            **choice,
        )
    return output


def specialisations(target: Target, tuning: Tuning) -> Iterator[Specialisation]:
    """Q4_K to bfloat16."""
    return _specialisations(tuning, main=True)


def more_specialisations(target: Target, tuning: Tuning) -> Iterator[Specialisation]:
    """The other kinds of matrix."""
    return _specialisations(tuning, main=False)


def _specialisations(tuning: Tuning, *, main: bool) -> Iterator[Specialisation]:
    for kind in KINDS:
        if (kind.name == "Q4_K") != main:
            continue
        signature = kind.signature() | {"output": "*bf16", "rows": "i32", "inputs": "i32"}
        yield Specialisation.of(
            f"dequantize {kind.name}",
            dequantize_kernel,
            {key: signature[key] for key in dequantize_kernel.arg_names if key in signature},
            kind.constants() | {"input_order": None},
            tuning.pick("dequantize", rows=28672, inputs=4096),
            divisible=frozenset({"rows", "inputs"}),
        )
