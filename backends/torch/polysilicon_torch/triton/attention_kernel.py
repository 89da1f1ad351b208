"""The attention kernel over pages, for prefill and decode, and the merge of its context parts."""

from __future__ import annotations

import triton
import triton.language as tl

from polysilicon_torch.triton.attention_codes import turn
from polysilicon_torch.triton.attention_range import LOG2_E, attend_range


@triton.jit
def find_block(
    query_start: tl.tensor,
    block: tl.tensor,
    sequences: tl.tensor,
    FEWEST: tl.constexpr,
    MOST: tl.constexpr,
    BY_SEQUENCE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(sequence, its first token, its number of tokens, the first of them that is the block's). A
    block without tokens gives a number of 0.

    BY_SEQUENCE: blocks are sequences, of up to BLOCK_Q tokens. Else each sequence has blocks of
    BLOCK_Q tokens from `query_start[s] // BLOCK_Q + s` on, which leaves room for its last one.
    Sequences of fewer than FEWEST tokens or more than MOST are another launch's.
    """
    if BY_SEQUENCE:
        sequence = block
    else:
        low = tl.zeros((), tl.int32)
        high = sequences
        while high - low > 1:
            middle = (low + high) // 2
            ahead = tl.load(query_start + middle) // BLOCK_Q + middle <= block
            low = tl.where(ahead, middle, low)
            high = tl.where(ahead, high, middle)
        sequence = low
    begin = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - begin
    first = tl.zeros((), tl.int32)
    if not BY_SEQUENCE:
        first = (block - (begin // BLOCK_Q + sequence)) * BLOCK_Q
    ours = (count >= FEWEST) & (count <= MOST) & (first < count)
    return sequence, begin, tl.where(ours, count, 0), first


@triton.jit(do_not_specialize=["window", "page_table_stride", "tree_stride", "tokens", "sequences"])
def attend_kernel(
    q: tl.tensor,
    key_plane: tl.tensor,
    value_plane: tl.tensor,
    key_scale: tl.tensor,
    value_scale: tl.tensor,
    page_table: tl.tensor,
    query_start: tl.tensor,
    context_len: tl.tensor,
    positions: tl.tensor,
    tree_mask: tl.tensor,
    sinks: tl.tensor,
    output: tl.tensor,
    partial: tl.tensor,
    partial_statistics: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    q_stride: tl.tensor,
    page_table_stride: tl.tensor,
    tree_stride: tl.tensor,
    tokens: tl.tensor,
    sequences: tl.tensor,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    CAUSAL: tl.constexpr,
    FEWEST: tl.constexpr,
    MOST: tl.constexpr,
    BY_SEQUENCE: tl.constexpr,
    ZERO_PADDING: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Grid (blocks of queries, KEY_HEADS * parts of a group's heads, parts of the context).

    A program serves BLOCK_Q tokens of one sequence and BLOCK_H query heads of one key head, as rows
    `token * BLOCK_H + head`, over one part of the context in tiles of BLOCK_N. Keys stand in two
    parts of BLOCK_K and BLOCK_R elements (0 for none), so that dims that are no powers of two waste
    little. The context falls into three ranges: what only some rows see because it lies at the edge
    of the window, what all rows see, and the step's own tokens; the second needs no mask. With a
    block for a sequence memory sets the pace, and all is one range.

    softcap, window: None for none. partial: None where there is one part of the context, whose
    results go to `output` at once; else `[parts, rows, H, VALUE_DIM]`, for which
    partial_statistics `[2, parts, rows, H]` says each row's largest score, by powers of two, and
    sum.
    """
    # From the last block on: with causality those have the most to do.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    part = tl.program_id(2)
    PARTS_OF_GROUP: tl.constexpr = tl.cdiv(HEADS // KEY_HEADS, BLOCK_H)
    key_head = tl.program_id(1) // PARTS_OF_GROUP
    head_in_group = (tl.program_id(1) % PARTS_OF_GROUP) * BLOCK_H

    row = tl.arange(0, BLOCK_M)
    head_in_group += row % BLOCK_H
    head = key_head * (HEADS // KEY_HEADS) + head_in_group
    value_element = tl.arange(0, BLOCK_V)
    real_head = (row < BLOCK_Q * BLOCK_H) & (head_in_group < HEADS // KEY_HEADS)
    if ZERO_PADDING:
        zeros = tl.zeros((BLOCK_M, BLOCK_V), output.dtype.element_ty)
        clear = real_head & (row < BLOCK_H)
        for token in range(tl.load(query_start + sequences) + block, tokens, tl.num_programs(0)):
            at = token * HEADS + head.to(tl.int64)
            pointers = output + at[:, None] * VALUE_DIM + value_element[None, :]
            tl.store(pointers, zeros, mask=clear[:, None] & (value_element < VALUE_DIM)[None, :])

    sequence, begin, count, first = find_block(
        query_start,
        block,
        sequences,
        FEWEST=FEWEST,
        MOST=MOST,
        BY_SEQUENCE=BY_SEQUENCE,
        BLOCK_Q=BLOCK_Q,
    )
    if count == 0:
        return
    context = tl.load(context_len + sequence)
    before = context - count
    token = first + row // BLOCK_H
    real = real_head & (token < count)
    position = tl.load(positions + begin + token, mask=real, other=0)

    high = context
    seen_by_all = before
    if tree_mask is None:
        if CAUSAL:
            high = before + tl.minimum(first + BLOCK_Q, count)
            if window is None:
                seen_by_all = before + first + 1
        elif window is None:
            seen_by_all = context
    low = tl.zeros((), tl.int32)
    edge = tl.zeros((), tl.int32)
    if window is not None:
        low = tl.min(tl.where(real, position, 0x7FFFFFFF), 0) - window + 1
        low = tl.minimum(tl.maximum(low, 0), before)
        edge = tl.maximum(tl.max(tl.where(real, position, 0), 0) - window + 1, low)
    start = low // BLOCK_N * BLOCK_N
    if partial is not None:
        length = tl.cdiv(tl.cdiv(high - start, tl.num_programs(2)), BLOCK_N) * BLOCK_N
        start += part * length
        high = tl.minimum(high, start + length)
    stop = tl.maximum(high, start)
    edge = tl.minimum(tl.maximum(tl.cdiv(edge, BLOCK_N) * BLOCK_N, start), stop)
    inner = tl.maximum(tl.minimum(stop, seen_by_all) // BLOCK_N * BLOCK_N, edge)
    if BY_SEQUENCE:
        inner = start

    key_element = tl.arange(0, BLOCK_K)
    q_rows = q + (begin + token).to(tl.int64)[:, None] * q_stride + head[:, None] * KEY_DIM
    q_mask = real[:, None] & (key_element < KEY_DIM)[None, :]
    q_tile = tl.load(q_rows + key_element[None, :], mask=q_mask, other=0.0)
    q_rest = q_tile
    if BLOCK_R > 0:
        rest_element = BLOCK_K + tl.arange(0, BLOCK_R)
        rest_mask = real[:, None] & (rest_element < KEY_DIM)[None, :]
        q_rest = tl.load(q_rows + rest_element[None, :], mask=rest_mask, other=0.0)

    table = page_table + sequence.to(tl.int64) * page_table_stride
    tree_rows = None
    if tree_mask is not None:
        tree_rows = tree_mask + (begin + token).to(tl.int64)[:, None] * tree_stride
    accumulated = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for phase in tl.static_range(3):
        # The edge of the window, what all rows see, and what is left.
        if phase == 2 or (not BY_SEQUENCE and (phase == 1 or window is not None)):
            accumulated, largest, total = attend_range(
                accumulated,
                largest,
                total,
                (start, edge, inner)[phase],
                (edge, inner, stop)[phase],
                q_tile,
                q_rest,
                key_plane,
                value_plane,
                key_scale,
                value_scale,
                table,
                key_head,
                scale,
                softcap,
                window,
                low,
                high,
                before,
                position,
                positions + begin,
                token,
                real,
                tree_rows,
                MASKED=phase != 1,
                CAUSAL=CAUSAL,
                KEY_HEADS=KEY_HEADS,
                KEY_DIM=KEY_DIM,
                VALUE_DIM=VALUE_DIM,
                PAGE_SIZE=PAGE_SIZE,
                KV=KV,
                NATIVE_FP8=NATIVE_FP8,
                BLOCK_N=BLOCK_N,
                BLOCK_K=BLOCK_K,
                BLOCK_R=BLOCK_R,
                BLOCK_V=BLOCK_V,
            )

    value_mask = real[:, None] & (value_element < VALUE_DIM)[None, :]
    if partial is not None:
        if KV == "int8":
            accumulated = turn(accumulated, DIM=VALUE_DIM, BLOCK=BLOCK_V)
        rows = tl.num_programs(0) * BLOCK_Q
        at = (part * rows + block * BLOCK_Q + row // BLOCK_H).to(tl.int64) * HEADS + head
        pointers = partial + at[:, None] * VALUE_DIM + value_element[None, :]
        if stop > start:
            tl.store(pointers, accumulated, mask=value_mask)
        tl.store(partial_statistics + at, largest, mask=real)
        beyond = tl.num_programs(2).to(tl.int64) * rows * HEADS
        tl.store(partial_statistics + beyond + at, total, mask=real)
    else:
        seen = largest > float("-inf")
        if sinks is not None:
            sink = tl.load(sinks + head, mask=real, other=0.0) * LOG2_E
            largest_of_all = tl.maximum(largest, sink)
            shrink = tl.where(seen, tl.exp2(largest - largest_of_all), 0.0)
            total = total * shrink + tl.exp2(sink - largest_of_all)
            accumulated *= shrink[:, None]
        accumulated = tl.where(seen[:, None], accumulated / total[:, None], 0.0)
        if KV == "int8":
            accumulated = turn(accumulated, DIM=VALUE_DIM, BLOCK=BLOCK_V)
        at = (begin + token).to(tl.int64) * HEADS + head
        pointers = output + at[:, None] * VALUE_DIM + value_element[None, :]
        tl.store(pointers, accumulated.to(output.dtype.element_ty), mask=value_mask)


@triton.jit(do_not_specialize=["tokens", "sequences", "parts"])
def merge_kernel(
    partial: tl.tensor,
    partial_statistics: tl.tensor,
    query_start: tl.tensor,
    sinks: tl.tensor,
    output: tl.tensor,
    tokens: tl.tensor,
    sequences: tl.tensor,
    parts: tl.tensor,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    FEWEST: tl.constexpr,
    MOST: tl.constexpr,
    BY_SEQUENCE: tl.constexpr,
    ZERO_PADDING: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Grid (rows of `partial`, H): the parts of the context of one token and head together."""
    at = tl.program_id(0)
    head = tl.program_id(1)
    rows = tl.num_programs(0)
    element = tl.arange(0, BLOCK_V)
    if ZERO_PADDING:
        for token in range(tl.load(query_start + sequences) + at, tokens, rows):
            pointers = output + (token * HEADS + head.to(tl.int64)) * VALUE_DIM + element
            zeros = tl.zeros((BLOCK_V,), output.dtype.element_ty)
            tl.store(pointers, zeros, mask=element < VALUE_DIM)
    _, begin, count, first = find_block(
        query_start,
        at // BLOCK_Q,
        sequences,
        FEWEST=FEWEST,
        MOST=MOST,
        BY_SEQUENCE=BY_SEQUENCE,
        BLOCK_Q=BLOCK_Q,
    )
    token = first + at % BLOCK_Q
    if token >= count:
        return
    part = tl.arange(0, BLOCK_P)
    index = (part.to(tl.int64) * rows + at) * HEADS + head
    largest = tl.load(partial_statistics + index, mask=part < parts, other=float("-inf"))
    total = tl.load(
        partial_statistics + parts.to(tl.int64) * rows * HEADS + index,
        mask=part < parts,
        other=0.0,
    )
    reference = tl.max(largest, 0)
    seen = reference > float("-inf")
    if sinks is not None:
        sink = tl.load(sinks + head) * LOG2_E
        reference = tl.maximum(reference, sink)
    weights = tl.where(largest > float("-inf"), tl.exp2(largest - reference), 0.0)
    denominator = tl.sum(weights * total, 0)
    if sinks is not None:
        denominator += tl.exp2(sink - reference)
    values = tl.load(
        partial + index[:, None] * VALUE_DIM + element[None, :],
        mask=(weights > 0)[:, None] & (element < VALUE_DIM)[None, :],
        other=0.0,
    )
    mixed = tl.sum(values * weights[:, None], 0)
    mixed = tl.where(seen, mixed / denominator, 0.0)
    pointers = output + ((begin + token).to(tl.int64) * HEADS + head) * VALUE_DIM + element
    tl.store(pointers, mixed.to(output.dtype.element_ty), mask=element < VALUE_DIM)
