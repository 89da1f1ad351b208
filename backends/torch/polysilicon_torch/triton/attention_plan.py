"""How an attention is laid out on a device: which launches, in which blocks, in how many parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import triton

from polysilicon_torch.tuning import Tuning

MOST_ROWS_OF_DECODE = 64
"""Queries (tokens of a sequence times heads of a group) up to which one block serves a sequence."""

MOST_PARTS = 64
MOST_MERGED = 8192
"""Parts that a context is split in, and values of them that the merge keeps in registers."""

LEAST_PART = 128
"""Tokens of a context that are worth a block of their own."""

FEW_ROWS = 16
"""Rows that the smallest product takes."""

MANY = 1 << 30
"""More tokens than a step has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads:
    """What an attention's compilation depends on but its block sizes. kv: a key of `KV_DTYPES`;
    kv_bytes, bytes: of an element of a plane, and of A."""

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    page_size: int
    kv: str
    kv_bytes: int
    bytes: int
    causal: bool = True

    @property
    def group(self) -> int:
        return self.heads // self.key_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch of the attention kernel, and of the merge where there is more than one part.

    blocks, head_blocks, parts: the grid. rows: tokens that the blocks have room for. constexprs,
    merge_constexprs: of the kernels, with the options of their compilation.
    """

    blocks: int
    head_blocks: int
    parts: int
    rows: int
    constexprs: Mapping[str, Any]
    merge_constexprs: Mapping[str, Any]


def plan(
    heads: Heads,
    *,
    tokens: int,
    sequences: int,
    max_query: int,
    max_context: int,
    tuning: Tuning,
) -> Iterator[Launch]:
    """The launches that serve a step of so many tokens and sequences, padding included.

    Sequences of few tokens (decodes, drafts) have a block each; the others blocks of a tile's rows.
    Where both may be in a step, they are served by two launches, for the tiles of a prefill are too
    large for a decode, and its context is not split.
    """
    block_h = min(heads.group, MOST_ROWS_OF_DECODE)
    if max_query <= MOST_ROWS_OF_DECODE // block_h:
        yield _launch(heads, tokens, sequences, max_context, tuning, 1, max_query, True, True)
        return
    few = max(1, FEW_ROWS // block_h) if sequences > 1 else 0
    if few:
        yield _launch(heads, tokens, sequences, max_context, tuning, 1, few, True, False)
    yield _launch(heads, tokens, sequences, max_context, tuning, few + 1, MANY, False, True)


def _launch(
    heads: Heads,
    tokens: int,
    sequences: int,
    max_context: int,
    tuning: Tuning,
    fewest: int,
    most: int,
    by_sequence: bool,
    zero_padding: bool,
) -> Launch:
    shape = {
        "dim": max(heads.key_dim, heads.value_dim),
        "bytes": heads.bytes,
        "kv_bytes": heads.kv_bytes,
        "turned": int(heads.kv == "int8"),
    }
    if by_sequence:
        block_h = min(heads.group, MOST_ROWS_OF_DECODE)
        rows = max(FEW_ROWS, triton.next_power_of_2(block_h * most))
        choice = {**tuning.pick("attention_decode", rows=rows, **shape), "BLOCK_M": rows}
    else:
        choice = tuning.pick("attention_prefill", **shape)
        block_h = min(heads.group, choice["BLOCK_M"])
    programs = choice.pop("programs")
    block_q = most if by_sequence else choice["BLOCK_M"] // block_h
    blocks = sequences if by_sequence else tokens // block_q + sequences
    head_blocks = heads.key_heads * -(-heads.group // block_h)
    tiles = dim_blocks(heads.key_dim, heads.value_dim)
    parts = max(
        1,
        min(
            programs * tuning.target.compute_units // (blocks * head_blocks),
            -(-max_context // LEAST_PART),
            MOST_PARTS,
            MOST_MERGED // tiles["BLOCK_V"],
        ),
    )
    selection = {
        "HEADS": heads.heads,
        "VALUE_DIM": heads.value_dim,
        "FEWEST": fewest,
        "MOST": most,
        "BY_SEQUENCE": by_sequence,
        "BLOCK_Q": block_q,
        "BLOCK_V": tiles["BLOCK_V"],
    }
    return Launch(
        blocks=blocks,
        head_blocks=head_blocks,
        parts=parts,
        rows=blocks * block_q,
        constexprs={
            **selection,
            "KEY_HEADS": heads.key_heads,
            "KEY_DIM": heads.key_dim,
            "PAGE_SIZE": heads.page_size,
            "KV": heads.kv,
            "NATIVE_FP8": tuning.target.fp8 == "ocp",
            "CAUSAL": heads.causal,
            "ZERO_PADDING": zero_padding and parts == 1,
            "BLOCK_H": block_h,
            "BLOCK_K": tiles["BLOCK_K"],
            "BLOCK_R": tiles["BLOCK_R"],
            **choice,
        },
        merge_constexprs={
            **selection,
            "ZERO_PADDING": zero_padding,
            "BLOCK_P": triton.next_power_of_2(parts),
            **tuning.pick("attention_merge", dim=heads.value_dim, parts=parts),
        },
    )


def dim_blocks(key_dim: int, value_dim: int) -> dict[str, int]:
    """How heads lie in tiles: keys as their largest power of two and the padded rest, values padded
    to a power of two; at least 16, which is what a product takes."""
    largest = max(16, 1 << key_dim.bit_length() - 1)
    rest = max(0, key_dim - largest)
    return {
        "BLOCK_K": largest,
        "BLOCK_R": max(16, triton.next_power_of_2(rest)) if rest else 0,
        "BLOCK_V": max(16, triton.next_power_of_2(value_dim)),
    }
