"""Products of dense expert stacks with the rows of each expert."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from polysilicon_torch.placed import DenseMatrix
from polysilicon_torch.specialisation import Specialisation
from polysilicon_torch.target import Target
from polysilicon_torch.triton.packed_products import expert_of
from polysilicon_torch.tuning import Tuning


@triton.jit
def dense_experts_kernel(
    x: tl.tensor,
    values: tl.tensor,
    bias: tl.tensor | None,
    sorted_rows: tl.tensor,
    ends: tl.tensor,
    output: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    experts: tl.tensor,
    x_stride: tl.tensor,
    bias_stride: tl.tensor,
    ROUTES: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One tile of BLOCK_M sorted rows and BLOCK_N outputs a program, row tiles first."""
    expert = expert_of(ends, tl.program_id(0) * BLOCK_M, experts, BLOCK_E).to(tl.int64)
    if expert >= experts:
        return
    row = tl.load(sorted_rows + tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))
    real = row < rows
    own = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    input = tl.arange(0, BLOCK_K)
    x_rows = x + ((row // ROUTES).to(tl.int64) * x_stride)[:, None]
    matrix = values + (expert * outputs + tl.minimum(own, outputs - 1))[None, :] * inputs
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, inputs, BLOCK_K):
        inside = start + input < inputs
        x_tile = tl.load(
            x_rows + (start + input)[None, :], mask=real[:, None] & inside[None, :], other=0.0
        )
        tile = tl.load(matrix + (start + input)[:, None], mask=inside[:, None], other=0.0)
        sums = tl.dot(x_tile, tile.to(x_tile.dtype), sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + expert * bias_stride + own, mask=own < outputs, other=0.0)[None, :]
    tl.store(
        output + (row.to(tl.int64) * outputs)[:, None] + own[None, :],
        sums.to(output.dtype.element_ty),
        mask=real[:, None] & (own < outputs)[None, :],
    )


def dense_experts_product(
    x: torch.Tensor,
    matrix: DenseMatrix,
    output: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    sorted_rows: torch.Tensor,
    ends: torch.Tensor,
    block: int,
    routes: int,
    tuning: Tuning,
) -> None:
    """`packed_products.packed_experts_product` for a dense stack."""
    rows, outputs = output.shape
    choice = tuning.pick("dense_experts", load=block, outputs=outputs, inputs=matrix.shape[-1])
    grid = (len(sorted_rows) // block, triton.cdiv(outputs, choice["BLOCK_N"]))
    dense_experts_kernel[grid](
        x,
        matrix.values,
        bias,
        sorted_rows,
        ends,
        output,
        rows,
        outputs,
        matrix.shape[-1],
        len(ends),
        x.stride(0),
        0 if bias is None else bias.stride(0),
        ROUTES=routes,
        BLOCK_E=triton.next_power_of_2(len(ends)),
        BLOCK_M=block,
        **choice,
    )


def specialisations(target: Target, tuning: Tuning) -> Iterator[Specialisation]:
    """A few rows an expert, and many."""
    integers = ("rows", "outputs", "inputs", "experts", "x_stride", "bias_stride")
    for block in (16, 64):
        yield Specialisation.of(
            f"dense_experts block={block}",
            dense_experts_kernel,
            {"x": "*bf16", "values": "*bf16", "sorted_rows": "*i32", "ends": "*i32",
             "output": "*bf16"} | dict.fromkeys(integers, "i32"),
            {"bias": None, "ROUTES": 8, "BLOCK_E": 128, "BLOCK_M": block},
            tuning.pick("dense_experts", load=block, outputs=1536, inputs=2048),
            divisible=frozenset({"outputs", "inputs", "x_stride"}),
            decode=block == 16,
        )  # fmt: skip
