"""Products with packed matrices on matrix units, `x W^T + bias`, for a few rows or many.

The codes themselves are the operand, exact in 16 bits; sums over the runs of a group are scaled in
float32. The runs of a tile are a batch of small products, which the warps share among them, so that
a tile of few rows occupies them all; their sums meet at the end.
"""

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
    PackedKind,
    code_tile,
    excess_of,
    factor_of,
    load_scales,
    packed_arguments,
    run_of,
    unit_of,
)
from polysilicon_torch.tuning import Tuning


@triton.jit
def expert_of(
    ends: tl.tensor, position: tl.tensor, experts: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """The expert in whose padded run a position of the sorted rows lies; `experts` past all."""
    index = tl.arange(0, BLOCK)
    end = tl.load(ends + index, mask=index < experts, other=0x7FFFFFFF)
    return tl.sum((end <= position).to(tl.int32), axis=0)


@triton.jit
def _words(
    plane: tl.tensor, offset: tl.tensor, BLOCKS: tl.constexpr, UNITS: tl.constexpr
) -> tl.tensor:
    """`[BLOCKS * 8, UNITS, 4]`: the words of row blocks and units, 32 together at each offset."""
    words = tl.load(plane + offset[:, None] + tl.arange(0, 32)[None, :])
    words = tl.permute(tl.reshape(words, (BLOCKS, UNITS, 8, 4)), (0, 2, 1, 3))
    return tl.reshape(words, (BLOCKS * 8, UNITS, 4))


@triton.jit
def _input_sums(
    x_tile: tl.tensor,
    factor: tl.constexpr,
    RUNS: tl.constexpr,
    ROWS: tl.constexpr,
    RUN: tl.constexpr,
) -> tl.tensor:
    """`[RUNS, ROWS, BLOCK_M]`: `factor` times the sums of x `[RUNS, RUN, BLOCK_M]`, row by row."""
    ones = tl.full((RUNS, ROWS if ROWS > 16 else 16, RUN), factor, x_tile.dtype)
    sums = tl.dot(ones, x_tile, input_precision="ieee")
    if ROWS == 1:
        sums = tl.max(sums, axis=1, keep_dims=True)
    return sums


@triton.jit
def packed_product_kernel(
    x: tl.tensor,
    first: tl.tensor,
    second: tl.tensor | None,
    third: tl.tensor | None,
    scale: tl.tensor,
    scale_super: tl.tensor | None,
    shift: tl.tensor | None,
    shift_super: tl.tensor | None,
    table: tl.tensor | None,
    bias: tl.tensor | None,
    sorted_rows: tl.tensor | None,
    ends: tl.tensor | None,
    output: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    units: tl.tensor,
    groups: tl.tensor,
    experts: tl.tensor,
    x_stride: tl.tensor,
    bias_stride: tl.tensor,
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
    ROUTES: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One tile of BLOCK_M rows and BLOCK_N outputs a program, row tiles first.

    With sorted_rows int32 the tile's rows are those at its place, `rows` standing for none, all of
    one expert by `ends`; a row's input is x's row `row // ROUTES`.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    UNIT: tl.constexpr = unit_of(BITS)
    UNITS: tl.constexpr = BLOCK_K // UNIT
    RUN: tl.constexpr = run_of(GROUP, BLOCK_K)
    RUNS: tl.constexpr = BLOCK_K // RUN
    # The runs of one unit stand far apart in the batch: warps share neighbours, and to give them
    # different bits of the same words would move codes between them.
    SPLITS: tl.constexpr = UNIT // RUN if RUN < UNIT else 1
    STRIDE: tl.constexpr = RUNS // SPLITS
    BLOCKS: tl.constexpr = BLOCK_N // 8
    FACTOR: tl.constexpr = factor_of(FORMAT)
    EXCESS: tl.constexpr = excess_of(FORMAT, BITS, DTYPE) + OFFSET
    # Short runs are summed for every output alike, which costs less than to spread their sums.
    SUM_ROWS: tl.constexpr = BLOCK_N if BLOCK_N * RUN <= 2048 else 1
    place = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_blocks = tl.cdiv(outputs, 8)
    expert = tl.zeros((), tl.int64)
    if sorted_rows is not None:
        expert = expert_of(ends, tl.program_id(0) * BLOCK_M, experts, BLOCK_E).to(tl.int64)
        if expert >= experts:
            return
        row = tl.load(sorted_rows + place)
    else:
        row = place
    real = row < rows
    x_row = (row // ROUTES).to(tl.int64) * x_stride
    matrix_blocks = expert * row_blocks
    start = tl.program_id(1) * BLOCK_N
    first += matrix_blocks * (units * 32)
    if second is not None:
        second += matrix_blocks * (units * 32)
    if third is not None:
        third += matrix_blocks * (units * 32)
    scale += matrix_blocks * (groups * SCALE_ROWS)
    if scale_super is not None:
        scale_super += matrix_blocks * (tl.cdiv(groups, SCALE_SUPER) * SCALE_ROWS)
    if shift is not None:
        shift += matrix_blocks * (groups * SHIFT_ROWS)
    if shift_super is not None:
        shift_super += matrix_blocks * (tl.cdiv(groups, SHIFT_SUPER) * SHIFT_ROWS)
    # Row blocks and units past the end read the last one again: no load of weights needs a mask.
    part = tl.arange(0, BLOCKS * UNITS)
    block = tl.minimum(start // 8 + part // UNITS, row_blocks - 1)
    part_unit = part % UNITS
    lane = tl.arange(0, BLOCK_N)
    scale_row = (tl.minimum(start // 8 + lane // 8, row_blocks - 1) * 8 + lane % 8)[None, :, None]
    run = tl.arange(0, RUNS)
    run_start = ((run % STRIDE * SPLITS + run // STRIDE) * RUN)[:, None, None]
    run_input = run_start + tl.arange(0, RUN)[None, :, None]
    if not WHOLE_ROW:
        group = tl.minimum(run_start // GROUP, groups - 1)
        factors = load_scales(
            scale, scale_super, scale_row, group, groups, SCALE_ROWS, SCALE_SUPER, SCALE_OFFSET
        )
        if shift is not None:
            shifts = load_scales(
                shift, shift_super, scale_row, group, groups, SHIFT_ROWS, SHIFT_SUPER, SHIFT_OFFSET
            )
    sums = tl.zeros((RUNS, BLOCK_N, BLOCK_M), tl.float32)
    x_sums = tl.zeros((RUNS, 1, BLOCK_M), tl.float32)
    for start_unit in range(0, units, UNITS):
        offset = (block * units + tl.minimum(start_unit + part_unit, units - 1)) * 32
        low = _words(first, offset, BLOCKS, UNITS)
        middle = None if second is None else _words(second, offset, BLOCKS, UNITS)
        high = None if third is None else _words(third, offset, BLOCKS, UNITS)
        input = start_unit * UNIT + run_input
        x_tile = tl.load(
            x + x_row[None, None, :] + input,
            mask=(input < inputs) & real[None, None, :],
            other=0.0,
        )
        if not WHOLE_ROW:
            # The next tile's scales, before this one's need to be there.
            next_start = (start_unit + UNITS) * UNIT + run_start
            group = tl.minimum(next_start // GROUP, groups - 1)
            next_factors = load_scales(
                scale, scale_super, scale_row, group, groups, SCALE_ROWS, SCALE_SUPER, SCALE_OFFSET
            )
            if shift is not None:
                next_shifts = load_scales(
                    shift, shift_super, scale_row, group, groups, SHIFT_ROWS, SHIFT_SUPER,
                    SHIFT_OFFSET,
                )  # fmt: skip
        codes = code_tile(low, middle, high, table, BLOCK_N, UNITS, FORMAT, BITS, DTYPE)
        codes = tl.permute(tl.reshape(codes, (BLOCK_N, STRIDE, SPLITS, RUN)), (2, 1, 0, 3))
        codes = tl.reshape(codes, (RUNS, BLOCK_N, RUN))
        partial = tl.zeros((RUNS, BLOCK_N, BLOCK_M), tl.float32)
        if shift is not None:
            run_sums = _input_sums(x_tile, 1.0, RUNS, SUM_ROWS, RUN)
            partial += run_sums * (-1.0 * EXCESS)
        elif EXCESS != 0:
            partial += _input_sums(x_tile, -1.0 * EXCESS, RUNS, SUM_ROWS, RUN)
        partial = tl.dot(codes, x_tile, partial, input_precision="ieee")
        if WHOLE_ROW:
            sums += partial
            if shift is not None:
                x_sums += run_sums
        else:
            sums += partial * factors
            factors = next_factors
            if shift is not None:
                sums += run_sums * shifts
                shifts = next_shifts
    total = tl.sum(sums, axis=0)
    own = start + lane
    scale_row = tl.reshape(scale_row, (BLOCK_N, 1))
    if WHOLE_ROW:
        total *= load_scales(
            scale, scale_super, scale_row, 0, groups, SCALE_ROWS, SCALE_SUPER, SCALE_OFFSET
        )
    total *= FACTOR
    if WHOLE_ROW and shift is not None:
        total += tl.sum(x_sums, axis=0) * load_scales(
            shift, shift_super, scale_row, 0, groups, SHIFT_ROWS, SHIFT_SUPER, SHIFT_OFFSET
        )
    if bias is not None:
        total += tl.load(bias + expert * bias_stride + own, mask=own < outputs, other=0.0)[:, None]
    target = output + (row.to(tl.int64) * outputs)[None, :] + own[:, None]
    inside = real[None, :] & (own < outputs)[:, None]
    tl.store(target, total.to(output.dtype.element_ty), mask=inside)


def packed_product(
    x: torch.Tensor,
    matrix: PackedMatrix,
    *,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    tuning: Tuning,
) -> torch.Tensor:
    """`x W^T + bias` for x `[T, K]` of the compute dtype and a matrix `[N, K]`: a new `[T, N]`."""
    rows, outputs = len(x), matrix.shape[0]
    output = torch.empty((rows, outputs), dtype=out_dtype, device=x.device)
    if output.numel():
        choice = _choice(matrix, rows, x.dtype, tuning)
        tiles = triton.cdiv(rows, choice["BLOCK_M"])
        _launch(x, matrix, output, choice, tiles, bias=bias)
    return output


def packed_experts_product(
    x: torch.Tensor,
    matrix: PackedMatrix,
    output: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    sorted_rows: torch.Tensor,
    ends: torch.Tensor,
    block: int,
    routes: int,
    tuning: Tuning,
) -> None:
    """Rows by the matrices of their experts, for what `moe_routing.sort_by_expert` returns.

    output `[R, N]`: its row r is x's row `r // routes` times the matrix of row r's expert in a
    stack `[E, N, K]`, plus that expert's bias `[E, N]`.
    """
    choice = {**_choice(matrix, block, x.dtype, tuning), "BLOCK_M": block}
    tiles = len(sorted_rows) // block
    _launch(
        x, matrix, output, choice, tiles, bias=bias, sorted_rows=sorted_rows, ends=ends,
        routes=routes,
    )  # fmt: skip


def _choice(matrix: PackedMatrix, rows: int, dtype: torch.dtype, tuning: Tuning) -> dict[str, int]:
    outputs, inputs = matrix.shape[-2:]
    return tuning.pick(
        "packed_product",
        rows=rows,
        outputs=outputs,
        inputs=inputs,
        run=run_of(matrix.group),
        bits=matrix.bits,
        bytes=dtype.itemsize,
    )


def _launch(
    x: torch.Tensor,
    matrix: PackedMatrix,
    output: torch.Tensor,
    choice: dict[str, int],
    tiles: int,
    *,
    bias: torch.Tensor | None,
    sorted_rows: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    routes: int = 1,
) -> None:
    if matrix.input_order is not None:
        x = x.index_select(1, matrix.input_order)
    rows, outputs = output.shape
    experts = 1 if ends is None else len(ends)
    packed_product_kernel[(tiles, triton.cdiv(outputs, choice["BLOCK_N"]))](
        x,
        bias=bias,
        sorted_rows=sorted_rows,
        ends=ends,
        output=output,
        rows=rows,
        outputs=outputs,
        inputs=matrix.shape[-1],
        experts=experts,
        x_stride=x.stride(0),
        bias_stride=0 if bias is None or ends is None else bias.stride(0),
        ROUTES=routes,
        BLOCK_E=triton.next_power_of_2(experts),
        **packed_arguments(matrix),
        **choice,
    )


_MAIN_KINDS = ("Q4_1", "Q8_0", "Q4_K", "Q6_K", "W4/128", "fp8/128x128", "MXFP4")


def specialisations(target: Target, tuning: Tuning) -> Iterator[Specialisation]:
    """The main kinds of matrix for one row; 4-bit ones for more rows and for experts too."""
    for kind in KINDS:
        if kind.name in _MAIN_KINDS:
            yield _specialisation(kind, tuning, rows=1)
        if kind.name == "W4/128":
            yield from (_specialisation(kind, tuning, rows=rows) for rows in (16, 200))
            yield _specialisation(kind, tuning, rows=1, outputs=28672)
        if kind.name in ("W4/128", "MXFP4"):
            yield _specialisation(kind, tuning, experts=True, rows=1)


def more_specialisations(target: Target, tuning: Tuning) -> Iterator[Specialisation]:
    """The other kinds, many outputs, more rows, many rows an expert, and float32."""
    for kind in KINDS:
        main = kind.name in _MAIN_KINDS
        if not main:
            yield _specialisation(kind, tuning, rows=1)
        yield _specialisation(kind, tuning, experts=True, rows=1024)
        if kind.name != "W4/128":
            yield from (_specialisation(kind, tuning, rows=rows) for rows in (16, 200))
            yield _specialisation(kind, tuning, rows=1, outputs=28672)
        if main:
            yield _specialisation(kind, tuning, rows=1, element="fp32")


def _specialisation(
    kind: PackedKind,
    tuning: Tuning,
    *,
    rows: int,
    outputs: int = 4096,
    experts: bool = False,
    element: str = "bf16",
) -> Specialisation:
    """rows: those of an expert where there are experts."""
    names = packed_product_kernel.arg_names
    integers = ("rows", "outputs", "inputs", "experts", "x_stride", "bias_stride")
    signature = kind.signature() | dict.fromkeys(integers, "i32")
    signature |= {"x": f"*{element}", "output": f"*{element}"}
    absent = {"bias", "sorted_rows", "ends"}
    sort: dict[str, int] = {}
    if experts:
        signature |= {"sorted_rows": "*i32", "ends": "*i32"}
        absent = {"bias"}
        sort = {"BLOCK_M": tuning.pick("moe_sort", load=rows, experts=128)["BLOCK_M"]}
    choice = tuning.pick(
        "packed_product",
        rows=sort.get("BLOCK_M", rows),
        outputs=outputs,
        inputs=4096,
        run=run_of(kind.group),
        bits=kind.bits,
        bytes=4 if element == "fp32" else 2,
    )
    return Specialisation.of(
        f"packed_product {kind.name} {'experts ' * experts}{element} rows={rows} outputs={outputs}",
        packed_product_kernel,
        {key: signature[key] for key in names if key in signature},
        kind.constants()
        | dict.fromkeys(absent)
        | {"ROUTES": 8 if experts else 1, "BLOCK_E": 128 if experts else 1},
        {**choice, **sort},
        divisible=frozenset({"outputs", "inputs", "x_stride"}),
        decode=rows <= 16 and element == "bf16",
    )
