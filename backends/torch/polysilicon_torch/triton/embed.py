"""Rows of embedding tables, dense and quantised, and the tokens that name them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from polysilicon_torch.placed import DenseMatrix, Matrix
from polysilicon_torch.specialisation import Specialisation
from polysilicon_torch.target import Target
from polysilicon_torch.triton.packed_codes import (
    KINDS,
    factor_of,
    load_scales,
    packed_arguments,
    plane_width,
    unit_of,
)
from polysilicon_torch.tuning import Tuning

WIDTHS = (576, 4096)
"""Hidden sizes that are compiled ahead of time: SmolLM2, Llama 3 8B."""

TABLE_KINDS = ("Q4_1", "Q6_K", "Q8_0")
"""Of `KINDS`, what is compiled ahead of time."""


@triton.jit
def gather_tokens_kernel(
    tokens: tl.tensor,
    source: tl.tensor,
    previous: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(source + places, mask=places < count, other=-1)
    named = row >= 0
    tl.store(tokens + places, tl.load(previous + row, mask=named), mask=named)


@triton.jit
def embed_kernel(
    table: tl.tensor,
    tokens: tl.tensor,
    output: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One block of columns of one token a program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    token = tl.load(tokens + row).to(tl.int64)
    values = tl.load(table + token * width + columns, mask=inside)
    tl.store(output + row * width + columns, values.to(output.dtype.element_ty), mask=inside)


@triton.jit
def embed_packed_kernel(
    first: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    scale: tl.tensor,
    scale_super: tl.tensor,
    shift: tl.tensor,
    shift_super: tl.tensor,
    table: tl.tensor,
    order: tl.tensor,
    tokens: tl.tensor,
    output: tl.tensor,
    width: tl.tensor,
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
    BLOCK: tl.constexpr,
) -> None:
    """The same of a `PackedMatrix`: columns as stored, put where `order` says."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    stored = tl.minimum(columns, width - 1)
    token = tl.load(tokens + row).to(tl.int64)
    low: tl.constexpr = plane_width(BITS, 0)
    middle: tl.constexpr = plane_width(BITS, 1)
    high: tl.constexpr = plane_width(BITS, 2)
    # `placed`: slot h * slots / 2 + m of word j of a unit holds its input 8 m + 2 j + h.
    unit: tl.constexpr = unit_of(BITS)
    place = stored % unit
    slot = place % 2 * (unit // 8) + place // 8
    block = (token // 8 * units + stored // unit) * 8 + token % 8
    word = block * 4 + place % 8 // 2
    codes = (tl.load(first + word) >> (low * slot)) & ((1 << low) - 1)
    if middle > 0:
        part = tl.load(second + word).to(tl.int32) >> (middle * slot)
        codes |= (part & ((1 << middle) - 1)) << low
    if high > 0:
        part = tl.load(third + word).to(tl.int32) >> (high * slot)
        codes |= (part & ((1 << high) - 1)) << (low + middle)
    if FORMAT == "affine":
        values = (codes - OFFSET).to(tl.float32)
    elif FORMAT == "codebook":
        values = tl.load(table + codes)
    else:
        values = _small_float(codes, FORMAT)
    group = stored * 0 if WHOLE_ROW else stored // GROUP
    values *= load_scales(
        scale, scale_super, token, group, groups, SCALE_ROWS, SCALE_SUPER, SCALE_OFFSET
    )
    if shift is not None:
        values += load_scales(
            shift, shift_super, token, group, groups, SHIFT_ROWS, SHIFT_SUPER, SHIFT_OFFSET
        )
    if order is not None:
        columns = tl.load(order + stored)
    tl.store(output + row * width + columns, values, mask=inside)


@triton.jit
def _small_float(codes: tl.tensor, FORMAT: tl.constexpr) -> tl.tensor:
    """Codes of a small float, by the bits of a float16 whose exponent is biased otherwise."""
    if FORMAT == "f8_e4m3":
        bits = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
    elif FORMAT == "f8_e5m2":
        bits = codes << 8
    else:
        tl.static_assert(FORMAT == "f4_e2m1")
        bits = ((codes & 0x8) << 12) | ((codes & 0x7) << 9)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * factor_of(FORMAT)


def gather_tokens(
    tokens: torch.Tensor, source: torch.Tensor, previous: torch.Tensor, *, tuning: Tuning
) -> None:
    """`Kernels.gather_tokens`: in place, `tokens[t] = previous[source[t]]` where `source[t] >= 0`.
    int32 `[T]`, `[T]` and `[L]`, contiguous."""
    count = len(tokens)
    if count:
        choice = tuning.pick("gather_tokens")
        grid = (triton.cdiv(count, choice["BLOCK"]),)
        gather_tokens_kernel[grid](tokens, source, previous, count, **choice)


def embed(table: Matrix, tokens: torch.Tensor, *, tuning: Tuning) -> torch.Tensor:
    """`Kernels.embed`: rows of a matrix `[V, D]` by token int32 `[T]`: float32 `[T, D]`."""
    count, width = len(tokens), table.shape[-1]
    output = torch.empty((count, width), dtype=torch.float32, device=tokens.device)
    if not count:
        return output
    choice = tuning.pick("embed", width=width)
    grid = (count, triton.cdiv(width, choice["BLOCK"]))
    if isinstance(table, DenseMatrix):
        embed_kernel[grid](table.values, tokens, output, width, **choice)
    else:
        embed_packed_kernel[grid](
            order=table.input_order,
            tokens=tokens,
            output=output,
            width=width,
            **packed_arguments(table),
            **choice,
        )
    return output


def specialisations(target: Target, tuning: Tuning) -> Iterator[Specialisation]:
    """Dense tables, and those of TABLE_KINDS."""
    yield Specialisation.of(
        "gather_tokens",
        gather_tokens_kernel,
        dict.fromkeys(("tokens", "source", "previous"), "*i32") | {"count": "i32"},
        {},
        tuning.pick("gather_tokens"),
        decode=True,
    )
    for width in WIDTHS:
        choice = tuning.pick("embed", width=width)
        for dtype in ("bf16", "fp32"):
            yield Specialisation.of(
                f"embed width={width} {dtype}",
                embed_kernel,
                {"table": f"*{dtype}", "tokens": "*i32", "output": "*fp32", "width": "i32"},
                {},
                choice,
                divisible=frozenset({"width"}),
                decode=True,
            )
        for kind in KINDS:
            if kind.name not in TABLE_KINDS:
                continue
            types = kind.signature() | {"tokens": "*i32", "output": "*fp32", "width": "i32"}
            yield Specialisation.of(
                f"embed width={width} {kind.name}",
                embed_packed_kernel,
                {name: types[name] for name in embed_packed_kernel.arg_names if name in types},
                kind.constants() | {"order": None},
                choice,
                divisible=frozenset({"width"}),
                decode=True,
            )
