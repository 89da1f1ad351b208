"""LoRA for mixed adapters: shrink to the rank, expand and add, by each sequence's slot.

A program takes tokens of one sequence, which have one adapter, so that both products are tiles.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from polysilicon_torch.adapters import LoraTarget
from polysilicon_torch.batches import DeviceBatch
from polysilicon_torch.specialisation import Specialisation
from polysilicon_torch.target import Target
from polysilicon_torch.tuning import Tuning


@triton.jit
def lora_shrink_kernel(
    x: tl.tensor,
    down: tl.tensor,
    ranks: tl.tensor,
    adapter_slot: tl.tensor,
    query_start: tl.tensor,
    middle: tl.tensor,
    tokens: tl.tensor,
    inputs: tl.tensor,
    tiles: tl.tensor,
    x_stride: tl.tensor,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """`middle[split, token, part] = x A^T` over one share of the inputs, for one tile of tokens of
    a sequence and one part. Where no adapter applies, nothing is written."""
    sequence = tl.program_id(0) // tiles
    slot = tl.load(adapter_slot + sequence).to(tl.int64)
    part = tl.program_id(1)
    rank = tl.load(ranks + slot * PARTS + part)
    first = tl.load(query_start + sequence) + tl.program_id(0) % tiles * BLOCK_T
    end = tl.load(query_start + sequence + 1)
    if (slot == 0) | (rank == 0) | (first >= end):
        return
    split = tl.program_id(2)
    share = tl.cdiv(tl.cdiv(inputs, BLOCK_K), SPLITS) * BLOCK_K
    token = (first + tl.arange(0, BLOCK_T)).to(tl.int64)
    real = token < end
    index = tl.arange(0, BLOCK_R)
    input = tl.arange(0, BLOCK_K)
    matrix = down + (slot * PARTS + part) * RANK * inputs
    sums = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    for start in range(split * share, tl.minimum(inputs, split * share + share), BLOCK_K):
        inside = start + input < inputs
        x_tile = tl.load(
            x + token[:, None] * x_stride + (start + input)[None, :],
            mask=real[:, None] & inside[None, :],
            other=0.0,
        )
        tile = tl.load(
            matrix + index[None, :] * inputs + (start + input)[:, None],
            mask=(index < rank)[None, :] & inside[:, None],
            other=0.0,
        )
        sums = tl.dot(x_tile.to(tile.dtype), tile, sums, input_precision="ieee")
    row = (split * tokens + token) * PARTS + part
    mask = real[:, None] & (index < RANK)[None, :]
    tl.store(middle + row[:, None] * RANK + index[None, :], sums, mask=mask)


@triton.jit
def lora_expand_kernel(
    middle: tl.tensor,
    up: tl.tensor,
    ranks: tl.tensor,
    adapter_slot: tl.tensor,
    query_start: tl.tensor,
    output: tl.tensor,
    tokens: tl.tensor,
    outputs: tl.tensor,
    first_output: tl.tensor,
    part_outputs: tl.tensor,
    part: tl.tensor,
    tiles: tl.tensor,
    output_stride: tl.tensor,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """`output += middle B^T` for one tile of tokens of a sequence and BLOCK_N outputs of a part."""
    sequence = tl.program_id(0) // tiles
    slot = tl.load(adapter_slot + sequence).to(tl.int64)
    rank = tl.load(ranks + slot * PARTS + part)
    first = tl.load(query_start + sequence) + tl.program_id(0) % tiles * BLOCK_T
    end = tl.load(query_start + sequence + 1)
    if (slot == 0) | (rank == 0) | (first >= end):
        return
    token = (first + tl.arange(0, BLOCK_T)).to(tl.int64)
    real = token < end
    index = tl.arange(0, BLOCK_R)
    inner = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    for split in range(SPLITS):
        row = (split * tokens + token) * PARTS + part
        inner += tl.load(
            middle + row[:, None] * RANK + index[None, :],
            mask=real[:, None] & (index < rank)[None, :],
            other=0.0,
        )
    own = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    matrix = up + (slot * outputs + first_output) * RANK
    tile = tl.load(
        matrix + own[None, :] * RANK + index[:, None],
        mask=(own < part_outputs)[None, :] & (index < rank)[:, None],
        other=0.0,
    )
    change = tl.dot(inner.to(tile.dtype), tile, input_precision="ieee")
    target = output + token[:, None] * output_stride + (first_output + own)[None, :]
    mask = real[:, None] & (own < part_outputs)[None, :]
    before = tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, (before + change).to(output.dtype.element_ty), mask=mask)


def lora(
    x: torch.Tensor, output: torch.Tensor, target: LoraTarget, batch: DeviceBatch, *, tuning: Tuning
) -> None:
    """`Kernels.lora`, in place. Slot 0 and slots whose rank is 0 leave a part untouched."""
    tokens, inputs = x.shape
    _, parts, rank, _ = target.down.shape
    if not tokens or not rank:
        return
    choice = tuning.pick("lora_shrink", query=batch.max_query, inputs=inputs, rank=rank)
    tiles = triton.cdiv(batch.max_query, choice["BLOCK_T"])
    middle = torch.empty(
        (choice["SPLITS"], tokens, parts, rank), dtype=torch.float32, device=x.device
    )
    programs = len(batch.adapter_slot) * tiles
    block_r = _rank_block(rank)
    lora_shrink_kernel[(programs, parts, choice["SPLITS"])](
        x, target.down, target.ranks, batch.adapter_slot, batch.query_start, middle,
        tokens, inputs, tiles, x.stride(0),
        PARTS=parts, RANK=rank, BLOCK_R=block_r, **choice,
    )  # fmt: skip
    expand = tuning.pick("lora_expand", query=batch.max_query, outputs=sum(target.outputs))
    tiles = triton.cdiv(batch.max_query, expand["BLOCK_T"])
    programs = len(batch.adapter_slot) * tiles
    first = 0
    for part, outputs in enumerate(target.outputs):
        lora_expand_kernel[(programs, triton.cdiv(outputs, expand["BLOCK_N"]))](
            middle, target.up, target.ranks, batch.adapter_slot, batch.query_start, output,
            tokens, sum(target.outputs), first, outputs, part, tiles, output.stride(0),
            PARTS=parts, RANK=rank, SPLITS=choice["SPLITS"], BLOCK_R=block_r, **expand,
        )  # fmt: skip
        first += outputs


def _rank_block(rank: int) -> int:
    return max(16, int(triton.next_power_of_2(rank)))


def specialisations(target: Target, tuning: Tuning) -> Iterator[Specialisation]:
    """Decodes and prefills, of small and of large ranks, for a target of three parts."""
    tables = dict.fromkeys(("ranks", "adapter_slot", "query_start"), "*i32")
    for query in (1, 2048):
        for rank in (16, 64):
            shrink = tuning.pick("lora_shrink", query=query, inputs=4096, rank=rank)
            constants = {"PARTS": 3, "RANK": rank, "BLOCK_R": _rank_block(rank)}
            signature = tables | {"x": "*bf16", "down": "*bf16", "middle": "*fp32"}
            signature |= dict.fromkeys(("tokens", "inputs", "tiles", "x_stride"), "i32")
            yield Specialisation.of(
                f"lora_shrink query={query} rank={rank}",
                lora_shrink_kernel,
                {key: signature[key] for key in lora_shrink_kernel.arg_names if key in signature},
                constants,
                shrink,
                divisible=frozenset({"inputs", "x_stride"}),
                decode=query == 1,
            )
            integers = ("tokens", "outputs", "first_output", "part_outputs", "part", "tiles")
            signature = tables | {"middle": "*fp32", "up": "*bf16", "output": "*bf16"}
            signature |= dict.fromkeys((*integers, "output_stride"), "i32")
            yield Specialisation.of(
                f"lora_expand query={query} rank={rank}",
                lora_expand_kernel,
                {key: signature[key] for key in lora_expand_kernel.arg_names if key in signature},
                {**constants, "SPLITS": shrink["SPLITS"]},
                tuning.pick("lora_expand", query=query, outputs=6144),
                divisible=frozenset({"outputs", "first_output", "part_outputs", "output_stride"}),
                decode=query == 1,
            )
