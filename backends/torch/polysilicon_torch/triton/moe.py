"""Mixture of experts on the device: routing, products grouped by expert, weighted sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from polysilicon.backend import Routing
from polysilicon_torch.placed import DenseMatrix, Matrix
from polysilicon_torch.specialisation import Specialisation
from polysilicon_torch.target import Target
from polysilicon_torch.triton.activations import gated_act
from polysilicon_torch.triton.dense_experts import dense_experts_product
from polysilicon_torch.triton.moe_routing import route, sort_by_expert
from polysilicon_torch.triton.packed_products import packed_experts_product
from polysilicon_torch.tuning import Tuning


@triton.jit
def moe_combine_kernel(
    results: tl.tensor,
    weights: tl.tensor,
    output: tl.tensor,
    width: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The weighted sum of one token's results, a block of columns a program."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(TOP_K):
        row = token * TOP_K + choice
        result = tl.load(results + row * width + column, mask=column < width, other=0.0)
        total += tl.load(weights + row) * result
    tl.store(output + token * width + column, total, mask=column < width)


def moe(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: Sequence[Matrix],
    down: Matrix,
    routing: Routing,
    correction: torch.Tensor | None,
    activation: str,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    *,
    tuning: Tuning,
) -> torch.Tensor:
    """`Kernels.moe`. x: of the activation dtype. How many tokens an expert has stays on the
    device: every launch has room for any distribution."""
    tokens, width = len(x), down.shape[-2]
    output = torch.empty((tokens, width), dtype=torch.float32, device=x.device)
    if not output.numel():
        return output
    experts, weights = route(router_logits, routing, correction, tuning=tuning)
    order = sort_by_expert(experts, router_logits.shape[-1], tuning=tuning)
    inner: list[torch.Tensor] = []
    for matrix in gate_up:
        bias = gate_up_bias
        if gate_up_bias is not None and len(gate_up) > 1:
            first = sum(part.shape[-1] for part in inner)
            bias = gate_up_bias[:, first : first + matrix.shape[-2]]
        inner.append(
            _experts_product(x, matrix, bias, x.dtype, order, routing.top_k, tuning=tuning)
        )
    gate, up = inner if len(inner) > 1 else inner[0].chunk(2, dim=-1)
    hidden = gated_act(gate, up, activation, dtype=x.dtype, tuning=tuning)
    results = _experts_product(hidden, down, down_bias, torch.float32, order, 1, tuning=tuning)
    choice = tuning.pick("moe_combine", rows=tokens, width=width)
    moe_combine_kernel[(tokens, triton.cdiv(width, choice["BLOCK"]))](
        results, weights, output, width, TOP_K=routing.top_k, **choice
    )
    return output


def _experts_product(
    x: torch.Tensor,
    matrix: Matrix,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    order: tuple[torch.Tensor, torch.Tensor, int],
    routes: int,
    *,
    tuning: Tuning,
) -> torch.Tensor:
    """x `[T, K]` by the matrix of each of its `routes` experts a row: `[T * routes, N]`."""
    sorted_rows, ends, block = order
    output = torch.empty((len(x) * routes, matrix.shape[-2]), dtype=dtype, device=x.device)
    places: dict[str, Any] = {
        "bias": bias,
        "sorted_rows": sorted_rows,
        "ends": ends,
        "block": block,
        "routes": routes,
        "tuning": tuning,
    }
    if isinstance(matrix, DenseMatrix):
        dense_experts_product(x, matrix, output, **places)
    else:
        packed_experts_product(x, matrix, output, **places)
    return output


def specialisations(target: Target, tuning: Tuning) -> Iterator[Specialisation]:
    """The weighted sum of eight experts."""
    yield Specialisation.of(
        "moe_combine",
        moe_combine_kernel,
        {"results": "*fp32", "weights": "*fp32", "output": "*fp32", "width": "i32"},
        {"TOP_K": 8},
        tuning.pick("moe_combine", rows=1, width=2048),
        divisible=frozenset({"width"}),
        decode=True,
    )
