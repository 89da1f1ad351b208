"""Gated activations."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from polysilicon_torch.specialisation import Specialisation
from polysilicon_torch.target import Target
from polysilicon_torch.tuning import Tuning

KINDS = ("silu", "gelu", "gelu_tanh", "relu", "swiglu_oai")


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    # exp(-x) is infinite for x below -88: the quotient is then 0, as it should be.
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activate(gate: tl.tensor, up: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """`act(gate) * up` in float32 as `Ops.gated_act` defines it; KIND: one of KINDS."""
    if KIND == "silu":
        result = gate * sigmoid(gate) * up
    elif KIND == "gelu":
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif KIND == "gelu_tanh":
        # (1 + tanh(z)) / 2 = sigmoid(2 z); the factor is 2 sqrt(2 / pi).
        result = gate * sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    elif KIND == "relu":
        result = tl.maximum(gate, 0.0) * up
    else:
        tl.static_assert(KIND == "swiglu_oai")
        bounded = tl.minimum(gate, 7.0)
        result = (tl.clamp(up, -7.0, 7.0) + 1.0) * bounded * sigmoid(1.702 * bounded)
    return result


@triton.jit
def gated_act_kernel(
    gate: tl.tensor,
    up: tl.tensor,
    output: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    width: tl.tensor,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One block of columns of one row a program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    g = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    result = activate(g, u, KIND).to(output.dtype.element_ty)
    tl.store(output + row * width + columns, result, mask=inside)


def gated_act(
    gate: torch.Tensor, up: torch.Tensor, kind: str, *, dtype: torch.dtype, tuning: Tuning
) -> torch.Tensor:
    """`Kernels.gated_act`: `[T, F]` each of A or float32, stride 1 along the last axis, to a
    contiguous tensor of `dtype`. kind: one of KINDS."""
    rows, width = gate.shape
    output = torch.empty(gate.shape, dtype=dtype, device=gate.device)
    if rows:
        choice = tuning.pick("gated_act", rows=rows, width=width)
        grid = (rows, triton.cdiv(width, choice["BLOCK"]))
        gated_act_kernel[grid](
            gate, up, output, gate.stride(0), up.stride(0), width, KIND=kind, **choice
        )
    return output


def specialisations(target: Target, tuning: Tuning) -> Iterator[Specialisation]:
    """Every kind in bfloat16, for few rows and for many."""
    for kind in KINDS:
        for rows in (1, 8192):
            yield Specialisation.of(
                f"gated_act {kind} rows={rows}",
                gated_act_kernel,
                dict.fromkeys(("gate", "up", "output"), "*bf16")
                | dict.fromkeys(("gate_stride", "up_stride", "width"), "i32"),
                {"KIND": kind},
                tuning.pick("gated_act", rows=rows, width=14336),
                divisible=frozenset(("gate_stride", "up_stride", "width")),
                decode=rows == 1,
            )
