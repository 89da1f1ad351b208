"""Rotary position embedding of heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from polysilicon_torch.specialisation import Specialisation
from polysilicon_torch.target import Target
from polysilicon_torch.tuning import Tuning

if TYPE_CHECKING:
    from polysilicon_torch.kernels import DeviceRope


@triton.jit
def cosine_and_sine(angle: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Of an int64 angle in 2^-64 of a turn, in float32 with errors below 2^-23.

    The nearest quarter turn comes off as an integer; minimax polynomials of Cephes' `sinf` and
    `cosf` serve the eighth that is left. No target's library calls: they would differ, and keep a
    slow path for large angles that uses the stack.
    """
    angle = (angle >> 32).to(tl.int32)
    quarter = (angle + 0x20000000) >> 30
    x = (angle - (quarter << 30)).to(tl.float32) * 1.4629180792671596e-09
    square = x * x
    sine = x + x * square * (
        -1.6666654611e-1 + square * (8.3321608736e-3 + square * -1.9515295891e-4)
    )
    cosine = (
        1.0
        - 0.5 * square
        + square
        * square
        * (4.166664568298827e-2 + square * (-1.388731625493765e-3 + square * 2.443315711809948e-5))
    )
    odd = (quarter & 1) != 0
    first = tl.where(odd, sine, cosine)
    second = tl.where(odd, cosine, sine)
    first = tl.where(((quarter + 1) & 2) != 0, -first, first)
    return first, tl.where((quarter & 2) != 0, -second, second)


@triton.jit
def load_head(
    heads: tl.tensor,
    tokens: tl.tensor,
    present: tl.tensor,
    positions: tl.tensor,
    turns: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    rope_scale: tl.tensor,
    row_stride: tl.tensor,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> tl.tensor:
    """One head of some tokens after its norm and rotary embedding: float32 `[tokens, BLOCK]`, 0
    from DIM on and for tokens that are not `present`. heads: where the head's first row begins.
    turns, weight: None for no embedding, no norm."""
    element = tl.arange(0, BLOCK)
    rows = heads + tokens.to(tl.int64)[:, None] * row_stride
    mask = present[:, None] & (element < DIM)[None, :]
    x = tl.load(rows + element[None, :], mask=mask, other=0.0).to(tl.float32)
    if weight is not None:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        x *= inverse * tl.load(weight + element, mask=element < DIM, other=0.0)[None, :]
    if turns is not None:
        turning = element < ROPE_DIM
        if INTERLEAVED:
            pair = element // 2
            partner = element ^ 1
            ahead = (element & 1) == 0
        else:
            pair = element % (ROPE_DIM // 2)
            ahead = element < ROPE_DIM // 2
            partner = tl.where(ahead, element + ROPE_DIM // 2, element - ROPE_DIM // 2)
        other = tl.load(
            rows + partner[None, :], mask=present[:, None] & turning[None, :], other=0.0
        ).to(tl.float32)
        if weight is not None:
            other *= inverse * tl.load(weight + partner, mask=turning, other=0.0)[None, :]
        position = tl.load(positions + tokens, mask=present, other=0).to(tl.int64)
        angle = position[:, None] * tl.load(turns + pair, mask=turning, other=0)[None, :]
        cosine, sine = cosine_and_sine(angle)
        sine = tl.where(ahead[None, :], -sine, sine)
        x = tl.where(turning[None, :], (x * cosine + other * sine) * rope_scale, x)
    return x


@triton.jit(do_not_specialize=["tokens"])
def rope_kernel(
    x: tl.tensor,
    output: tl.tensor,
    positions: tl.tensor,
    turns: tl.tensor,
    rope_scale: tl.tensor,
    row_stride: tl.tensor,
    tokens: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Grid (blocks of tokens, heads)."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1)
    element = tl.arange(0, BLOCK_D)
    present = token < tokens
    turned = load_head(
        x + head * DIM,
        token,
        present,
        positions,
        turns,
        None,
        0.0,
        rope_scale,
        row_stride,
        DIM=DIM,
        BLOCK=BLOCK_D,
        ROPE_DIM=ROPE_DIM,
        INTERLEAVED=INTERLEAVED,
    )
    rows = output + (token.to(tl.int64)[:, None] * HEADS + head) * DIM
    mask = present[:, None] & (element < DIM)[None, :]
    tl.store(rows + element[None, :], turned.to(output.dtype.element_ty), mask=mask)


def rope(
    x: torch.Tensor, positions: torch.Tensor, rope: DeviceRope, heads: int, *, tuning: Tuning
) -> torch.Tensor:
    """`Kernels.rope`: `[T, heads * Dh]` with stride 1 along the last axis, by int32 `[T]`, to a new
    contiguous tensor of the same dtype."""
    tokens, width = x.shape
    output = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    if not output.numel():
        return output
    dim = width // heads
    choice = tuning.pick("rope", tokens=tokens, dim=dim)
    rope_kernel[(triton.cdiv(tokens, choice["BLOCK_T"]), heads)](
        x,
        output,
        positions,
        rope.turns,
        rope.scale,
        x.stride(0),
        tokens,
        HEADS=heads,
        DIM=dim,
        ROPE_DIM=rope.dim,
        INTERLEAVED=rope.interleaved,
        BLOCK_D=triton.next_power_of_2(dim),
        **choice,
    )
    return output


def specialisations(target: Target, tuning: Tuning) -> Iterator[Specialisation]:
    """The shapes of Llama-3-8B and Gemma."""
    for dim in (64, 128, 256):
        yield Specialisation.of(
            f"rope head_dim={dim}",
            rope_kernel,
            {
                "x": "*bf16",
                "output": "*bf16",
                "positions": "*i32",
                "turns": "*i64",
                "rope_scale": "fp32",
                "row_stride": "i32",
                "tokens": "i32",
            },
            {"HEADS": 8, "DIM": dim, "ROPE_DIM": dim, "INTERLEAVED": False, "BLOCK_D": dim},
            tuning.pick("rope", tokens=1, dim=dim),
            divisible=frozenset({"row_stride"}),
            decode=True,
        )
