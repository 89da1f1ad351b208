"""A step's arrays on the device: all in one buffer of int32, uploaded at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyopencl as cl
from polysilicon.backend import Batch

from polysilicon_opencl.runtime import Runtime
from polysilicon_opencl.values import Block, Integers

Int32 = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class QueryBlocks:
    """Tokens that attention work-groups take: `count` times (sequence, first token, tokens) at
    `at`; `queries` is the most tokens of one."""

    at: int
    count: int
    queries: int


class Step:
    """The arrays of one step. batch: as the forward sees it. host: as the core gave it.

    tables: per KV group the page table's place and width. slots: of each KV group. adapter_slots:
    for every token; adapted: whether any has one. tree: place of the tree mask's bytes (0: none).
    rope_tables: angles by what they were worked out for.
    """

    def __init__(self, runtime: Runtime, batch: Batch, tokens: Int32) -> None:
        self.host = batch
        self.tokens = len(batch.tokens)
        counts = np.diff(batch.query_start)
        owner = np.repeat(np.arange(len(counts)), counts)
        adapter_slots = np.zeros(self.tokens, np.int32)
        adapter_slots[: len(owner)] = batch.adapter_slot[owner]
        self.adapted = bool(adapter_slots.any())
        arrays: list[npt.NDArray[Any]] = []
        self._size = 0

        def put(array: npt.NDArray[Any]) -> int:
            at = self._size
            arrays.append(np.ascontiguousarray(array, np.int32).reshape(-1))
            self._size += arrays[-1].size
            return at

        self.tokens_at = put(tokens)
        self.sources_at = put(batch.token_source)
        self.positions_at = put(batch.positions)
        self.rows_at = put(batch.logit_rows)
        self.query_start_at = put(batch.query_start)
        self.context_at = put(batch.context_len)
        self.adapter_slots_at = put(adapter_slots)
        self.slots_at = [put(slots) for slots in batch.slots]
        self.tables = [(put(table), table.shape[1]) for table in batch.page_tables]
        self.tree, self.tree_width = 0, 0
        if batch.tree_mask is not None:
            self.tree_width = batch.tree_mask.shape[1]
            self.tree = put(_words(batch.tree_mask))
        self.blocks: list[QueryBlocks] = []
        for queries, blocks in _query_blocks(batch.query_start, counts, runtime.tuning.queries):
            if len(blocks):
                self.blocks.append(QueryBlocks(at=put(blocks), count=len(blocks), queries=queries))
        self.buffer: cl.Buffer = runtime.upload(np.concatenate(arrays))
        self.positions = Integers(self.buffer, self.positions_at, self.tokens)
        values: dict[str, Any] = {
            "tokens": Integers(self.buffer, self.tokens_at, self.tokens),
            "positions": self.positions,
            "logit_rows": Integers(self.buffer, self.rows_at, len(batch.logit_rows)),
        }
        self.batch = dataclasses.replace(batch, **values)
        self.rope_tables: dict[Any, Block] = {}
        self.checked: set[int] = set()


def _words(mask: npt.NDArray[np.bool_]) -> Int32:
    data = np.zeros(-(-mask.size // 4) * 4, np.uint8)
    data[: mask.size] = mask.reshape(-1)
    return data.view(np.int32)


def _query_blocks(
    query_start: Int32, counts: Int32, queries: int
) -> Sequence[tuple[int, npt.NDArray[Any]]]:
    """Sequences of one token by themselves, so that decodes beside a prefill waste nothing."""
    single = np.flatnonzero(counts == 1)
    ones = np.stack([single, query_start[single], np.ones_like(single)], axis=1)
    several = np.flatnonzero(counts > 1)
    each = -(-counts[several] // queries)
    sequence = np.repeat(several, each)
    number = np.arange(len(sequence)) - np.repeat(np.cumsum(each) - each, each)
    first = query_start[sequence] + number * queries
    count = np.minimum(queries, query_start[sequence + 1] - first)
    return (1, ones), (queries, np.stack([sequence, first, count], axis=1))
