"""Batches as the core builds them, from one description a sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from polysilicon.backend import Batch


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """What one sequence does in a step.

    tokens: this step's. start: context tokens before them. pages: per KV group, its page table.
    positions: start, start + 1, ... when None. sources: `token_source`, none when None.
    tree: bool `[n, n]`, which of the step's tokens each of them sees.
    """

    tokens: Sequence[int]
    start: int = 0
    pages: Sequence[Sequence[int]] = ()
    positions: Sequence[int] | None = None
    sources: Sequence[int] | None = None
    adapter: int = 0
    tree: npt.NDArray[np.bool_] | None = None

    @property
    def context(self) -> int:
        return self.start + len(self.tokens)


def make_batch(
    chunks: Sequence[Chunk],
    page_sizes: Sequence[int] = (),
    *,
    logit_rows: Sequence[int] | None = None,
    slots: Sequence[int] | None = None,
) -> Batch:
    """A batch of these chunks in order. logit_rows: all rows when None. slots: `sequence_slot`."""
    lengths = [len(chunk.tokens) for chunk in chunks]
    total = sum(lengths)
    tables, token_slots = [], []
    for group, page_size in enumerate(page_sizes):
        width = max(-(-chunk.context // page_size) for chunk in chunks)
        table = np.zeros((len(chunks), width), np.int32)
        group_slots: list[int] = []
        for row, chunk in enumerate(chunks):
            pages = chunk.pages[group][:width]
            table[row, : len(pages)] = pages
            group_slots += [
                pages[index // page_size] * page_size + index % page_size
                for index in range(chunk.start, chunk.context)
            ]
        tables.append(table)
        token_slots.append(_int32(group_slots))
    return Batch(
        tokens=_int32([token for chunk in chunks for token in chunk.tokens]),
        token_source=_int32(
            [source for chunk in chunks for source in chunk.sources or [-1] * len(chunk.tokens)]
        ),
        positions=_int32(
            [
                position
                for chunk in chunks
                for position in (
                    range(chunk.start, chunk.context)
                    if chunk.positions is None
                    else chunk.positions
                )
            ]
        ),
        query_start=_int32(np.cumsum([0, *lengths])),
        context_len=_int32([chunk.context for chunk in chunks]),
        page_tables=tuple(tables),
        slots=tuple(token_slots),
        logit_rows=_int32(range(total) if logit_rows is None else logit_rows),
        sequence_slot=_int32(range(len(chunks)) if slots is None else slots),
        adapter_slot=_int32([chunk.adapter for chunk in chunks]),
        tree_mask=_tree_mask(chunks, lengths),
    )


def _tree_mask(chunks: Sequence[Chunk], lengths: Sequence[int]) -> npt.NDArray[np.bool_] | None:
    if all(chunk.tree is None for chunk in chunks):
        return None
    mask = np.zeros((sum(lengths), max(lengths)), np.bool_)
    first = 0
    for chunk, length in zip(chunks, lengths, strict=True):
        own = np.tri(length, dtype=np.bool_) if chunk.tree is None else chunk.tree
        mask[first : first + length, :length] = own
        first += length
    return mask


def _int32(values: Any) -> npt.NDArray[np.int32]:
    return np.ascontiguousarray(list(values), np.int32)
