"""The inner loop of attention: queries of one block over a range of a sequence's context."""

from __future__ import annotations

import triton
import triton.language as tl

from polysilicon_torch.triton.attention_codes import e4m3_values

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_values(
    plane: tl.tensor,
    row: tl.tensor,
    element: tl.tensor,
    inside: tl.tensor,
    dtype: tl.constexpr,
    KV: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
) -> tl.tensor:
    """Codes of a plane `[rows, DIM]` as `dtype`: row and element broadcast against each other.
    inside: rows that are read, the others give 0; None for all. PADDED: elements go beyond DIM."""
    pointers = plane + row * DIM + element
    if PADDED:
        mask = element < DIM
        if inside is not None:
            mask = mask & inside
        x = tl.load(pointers, mask=mask, other=0)
    elif inside is not None:
        x = tl.load(pointers, mask=inside, other=0)
    else:
        x = tl.load(pointers)
    if KV == "fp8_e4m3":
        return e4m3_values(x, dtype, NATIVE_FP8)
    if KV == "int8":
        return x.to(tl.float32).to(dtype)
    return x.to(dtype)


@triton.jit
def attend_range(
    accumulated: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    q_tile: tl.tensor,
    q_rest: tl.tensor,
    key_plane: tl.tensor,
    value_plane: tl.tensor,
    key_scale: tl.tensor,
    value_scale: tl.tensor,
    table: tl.tensor,
    key_head: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    before: tl.tensor,
    position: tl.tensor,
    own_positions: tl.tensor,
    token: tl.tensor,
    real: tl.tensor,
    tree_rows: tl.tensor,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The online softmax (arXiv 2205.14135) over the context from start on, in whole tiles: sums
    of weighted values, the largest score by powers of two, and sums of weights, by row. MASKED: a
    row sees of a tile what lies in [low, high) and what window, tree and causality let it see;
    else all."""
    dtype: tl.constexpr = q_tile.dtype
    # The pages of a tile are looked up a tile ahead, so that its loads wait for no other.
    index = start + tl.arange(0, BLOCK_N)
    page = tl.load(table + index // PAGE_SIZE, mask=index < high, other=0)
    for n in tl.range(start, stop, BLOCK_N):
        index = n + tl.arange(0, BLOCK_N)
        inside = None
        inside_row = None
        inside_column = None
        if MASKED:
            inside = (index >= low) & (index < high)
            inside_row = inside[None, :]
            inside_column = inside[:, None]
        slot = (page.to(tl.int64) * KEY_HEADS + key_head) * PAGE_SIZE + index % PAGE_SIZE
        ahead = index + BLOCK_N
        page = tl.load(table + ahead // PAGE_SIZE, mask=ahead < high, other=0)

        keys = load_values(
            key_plane,
            slot[None, :],
            tl.arange(0, BLOCK_K)[:, None],
            inside_row,
            dtype,
            KV=KV,
            NATIVE_FP8=NATIVE_FP8,
            DIM=KEY_DIM,
            PADDED=BLOCK_K > KEY_DIM,
        )
        scores = tl.dot(q_tile, keys, input_precision="ieee")
        if BLOCK_R > 0:
            keys = load_values(
                key_plane,
                slot[None, :],
                BLOCK_K + tl.arange(0, BLOCK_R)[:, None],
                inside_row,
                dtype,
                KV=KV,
                NATIVE_FP8=NATIVE_FP8,
                DIM=KEY_DIM,
                PADDED=BLOCK_K + BLOCK_R > KEY_DIM,
            )
            scores = tl.dot(q_rest, keys, scores, input_precision="ieee")
        if key_scale is not None:
            scales = tl.load(key_scale + slot, mask=inside, other=0.0 if MASKED else None)
            scores *= scales[None, :]
        factor = scale * LOG2_E
        if softcap is not None:
            # tanh by exp2: 1 - 2 / (e^2x + 1), right at both infinities.
            scores = 1 - 2 / (tl.exp2(scores * (2 * factor / softcap)) + 1)
            factor = softcap * LOG2_E

        if MASKED:
            own = index - before
            visible = inside_row
            if tree_rows is not None:
                named = tl.load(
                    tree_rows + own[None, :],
                    mask=real[:, None] & (inside & (own >= 0))[None, :],
                    other=1,
                )
                visible = visible & (named != 0)
            elif CAUSAL:
                visible = visible & (own[None, :] <= token[:, None])
            if window is not None:
                own_position = tl.load(own_positions + own, mask=inside & (own >= 0), other=0)
                key_position = tl.where(own >= 0, own_position, index)
                visible = visible & (key_position[None, :] > position[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1) * factor)
        reference = new_largest
        if MASKED:
            reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores * factor - reference[:, None])
        shrink = tl.exp2(largest - reference)
        largest = new_largest
        total = total * shrink + tl.sum(weights, 1)
        if value_scale is not None:
            scales = tl.load(value_scale + slot, mask=inside, other=0.0 if MASKED else None)
            weights *= scales[None, :]
        values = load_values(
            value_plane,
            slot[:, None],
            tl.arange(0, BLOCK_V)[None, :],
            inside_column,
            dtype,
            KV=KV,
            NATIVE_FP8=NATIVE_FP8,
            DIM=VALUE_DIM,
            PADDED=BLOCK_V > VALUE_DIM,
        )
        accumulated = tl.dot(
            weights.to(dtype), values, accumulated * shrink[:, None], input_precision="ieee"
        )
    return accumulated, largest, total
