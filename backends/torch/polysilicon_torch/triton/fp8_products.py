"""Products of fp8 activations and fp8 weights on matrix units that take them (W8A8).

The four bytes of a word are not in the order of their inputs; the activations are put in the order
of the weights' bytes instead, for a product does not mind in which order it sums.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from polysilicon_torch.placed import WHOLE_ROW, Matrix, PackedMatrix
from polysilicon_torch.specialisation import Specialisation
from polysilicon_torch.target import Target
from polysilicon_torch.triton.packed_codes import load_scales, run_of
from polysilicon_torch.tuning import Tuning


@triton.jit
def fp8_quantize_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    inputs: tl.tensor,
    padded: tl.tensor,
    x_stride: tl.tensor,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row a program: `codes = x / scale` with `scale = max|x| / LARGEST`, units of 16 inputs in
    the order of a placed matrix's bytes, zeros up to `padded`."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, inputs, BLOCK):
        values = tl.load(x + row * x_stride + start + index, mask=start + index < inputs, other=0.0)
        largest = tl.maximum(largest, tl.abs(values.to(tl.float32)))
    scale = tl.maximum(tl.max(largest, axis=0), 1e-30) / LARGEST
    tl.store(scales + row, scale)
    for start in range(0, padded, BLOCK):
        place = start + index
        # Byte 2 h + m of word j holds input 8 m + 2 j + h of the unit.
        byte = place % 16
        input = place - byte + byte % 2 * 8 + byte // 4 * 2 + byte // 2 % 2
        values = tl.load(x + row * x_stride + input, mask=input < inputs, other=0.0)
        values = tl.clamp(values.to(tl.float32) / scale, -LARGEST, LARGEST)
        values = values.to(codes.dtype.element_ty)
        tl.store(codes + row * padded + place, values, mask=place < padded)


@triton.jit
def fp8_product_kernel(
    x: tl.tensor,
    x_scales: tl.tensor,
    codes: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor | None,
    output: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    units: tl.tensor,
    groups: tl.tensor,
    GROUP: tl.constexpr,
    WHOLE_ROW: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One tile of outputs a program, row tiles first. BLOCK_K divides GROUP."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    own = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    place = tl.arange(0, BLOCK_K)
    real = row < rows
    padded = units * 16
    x_rows = x + (tl.minimum(row, rows - 1).to(tl.int64) * padded)[:, None]
    last = tl.cdiv(outputs, 8) * 8 - 1
    weight_row = tl.minimum(own, last)
    base = (weight_row // 8).to(tl.int64) * (units * 128) + weight_row % 8 * 16
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, padded, BLOCK_K):
        at = start + place
        inside = at < padded
        x_tile = tl.load(x_rows + at[None, :], mask=inside[None, :], other=0.0)
        tile = tl.load(
            codes + base[None, :] + (at // 16 * 128 + at % 16)[:, None],
            mask=inside[:, None],
            other=0.0,
        )
        if WHOLE_ROW:
            # Matrix units that sum fp8 products in fewer bits hand over after each tile.
            sums = tl.dot(x_tile, tile, sums, max_num_imprecise_acc=BLOCK_K)
        else:
            group = tl.minimum(start // GROUP, groups - 1)
            factors = load_scales(scale, None, weight_row, group, groups, SCALE_ROWS, 1, 0)
            sums += tl.dot(x_tile, tile) * factors[None, :]
    if WHOLE_ROW:
        sums *= load_scales(scale, None, weight_row, 0, groups, SCALE_ROWS, 1, 0)[None, :]
    sums *= (tl.load(x_scales + row, mask=real, other=0.0) * FACTOR)[:, None]
    if bias is not None:
        sums += tl.load(bias + own, mask=own < outputs, other=0.0)[None, :]
    tl.store(
        output + row.to(tl.int64)[:, None] * outputs + own[None, :],
        sums.to(output.dtype.element_ty),
        mask=real[:, None] & (own < outputs)[None, :],
    )


def takes_fp8_product(matrix: Matrix, target: Target) -> bool:
    """Whether `fp8_product` can multiply by a matrix on a target."""
    return (
        isinstance(matrix, PackedMatrix)
        and matrix.format == "f8_e4m3"
        and matrix.scale.super is None
        and len(matrix.shape) == 2
        and run_of(matrix.group) >= 32
        and target.fp8 != "none"
    )


def fp8_product(
    x: torch.Tensor,
    matrix: PackedMatrix,
    *,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    tuning: Tuning,
) -> torch.Tensor:
    """As `packed_products.packed_product`, the activations rounded to e4m3 with one scale a row,
    for a matrix that `takes_fp8_product` approves."""
    if matrix.input_order is not None:
        x = x.index_select(1, matrix.input_order)
    fnuz = tuning.target.fp8 == "fnuz"
    dtype = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
    rows, inputs = x.shape
    outputs, padded = matrix.shape[0], matrix.units * 16
    output = torch.empty((rows, outputs), dtype=out_dtype, device=x.device)
    if not output.numel():
        return output
    codes = torch.empty((rows, padded), dtype=dtype, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    fp8_quantize_kernel[(rows,)](
        x, codes, scales, inputs, padded, x.stride(0), LARGEST=_largest(fnuz),
        **tuning.pick("fp8_quantize", inputs=inputs),
    )  # fmt: skip
    choice = tuning.pick("fp8_product", rows=rows, outputs=outputs, run=run_of(matrix.group))
    grid = (triton.cdiv(rows, choice["BLOCK_M"]), triton.cdiv(outputs, choice["BLOCK_N"]))
    fp8_product_kernel[grid](
        codes,
        scales,
        matrix.planes[0].view(dtype),
        matrix.scale.values,
        bias,
        output,
        rows,
        outputs,
        matrix.units,
        matrix.scale.values.shape[-2],
        GROUP=matrix.group,
        WHOLE_ROW=matrix.group == WHOLE_ROW,
        SCALE_ROWS=matrix.scale.values.shape[-1],
        FACTOR=_factor(fnuz),
        **choice,
    )
    return output


def _largest(fnuz: bool) -> float:
    return 240.0 if fnuz else 448.0


def _factor(fnuz: bool) -> float:
    """A weight's e4m3fn bits read as e4m3fnuz are half its value."""
    return 2.0 if fnuz else 1.0


def specialisations(target: Target, tuning: Tuning) -> Iterator[Specialisation]:
    """Whole-row and 128 x 128 scales, few rows and many, where the target multiplies fp8."""
    if target.fp8 == "none":
        return
    fnuz = target.fp8 == "fnuz"
    element = "*fp8e4b8" if fnuz else "*fp8e4nv"
    yield Specialisation.of(
        "fp8_quantize",
        fp8_quantize_kernel,
        {"x": "*bf16", "codes": element, "scales": "*fp32", "inputs": "i32", "padded": "i32",
         "x_stride": "i32"},
        {"LARGEST": _largest(fnuz)},
        tuning.pick("fp8_quantize", inputs=4096),
        divisible=frozenset({"inputs", "padded", "x_stride"}),
        decode=True,
    )  # fmt: skip
    for group, scale_rows in ((WHOLE_ROW, 8), (128, 1)):
        for rows in (1, 64, 2048):
            whole = group == WHOLE_ROW
            yield Specialisation.of(
                f"fp8_product {'row' if whole else '128x128'} rows={rows}",
                fp8_product_kernel,
                {"x": element, "x_scales": "*fp32", "codes": element, "scale": "*fp32",
                 "output": "*bf16"}
                | dict.fromkeys(("rows", "outputs", "units", "groups"), "i32"),
                {"bias": None, "GROUP": group, "WHOLE_ROW": whole, "SCALE_ROWS": scale_rows,
                 "FACTOR": _factor(fnuz)},
                tuning.pick("fp8_product", rows=rows, outputs=4096, run=128),
                divisible=frozenset({"outputs", "units"}),
                decode=rows == 1,
            )  # fmt: skip
