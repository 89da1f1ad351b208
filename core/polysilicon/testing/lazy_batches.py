"""What the lazy device does with a step's arrays: checks them, watches them, pads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from polysilicon.backend import Batch, KVPool, SamplingBatch, SparseRows
from polysilicon.testing.lazy_trace import ContractError

Array = npt.NDArray[np.generic]
Int32 = npt.NDArray[np.int32]

_DTYPES = {
    **dict.fromkeys(("draw", "tree_mask"), np.bool_),
    **dict.fromkeys(("temperature", "top_p", "min_p", "typical_p", "bias.values"), np.float32),
    **dict.fromkeys(("repetition", "presence", "frequency"), np.float32),
    **dict.fromkeys(("choice", "position", "mask"), np.uint32),
    "seed": np.uint64,
}
"""Dtypes of a batch's and a sampling batch's arrays; those that are not listed are int32."""


def named_arrays(value: object, name: str = "") -> Iterator[tuple[str, Array]]:
    """Every array of a batch or a sampling batch with its name."""
    if isinstance(value, np.ndarray):
        yield name, value
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from named_arrays(item, f"{name}[{index}]")
    elif isinstance(value, (Batch, SamplingBatch, SparseRows)):
        for field in dataclasses.fields(value):
            prefix = f"{name}." if name else ""
            yield from named_arrays(getattr(value, field.name), prefix + field.name)


class Watched:
    """The arrays of one call, as they were when it was submitted."""

    def __init__(self, call: str, batch: Batch | SamplingBatch) -> None:
        self._call = call
        self._arrays = [(name, array, array.tobytes()) for name, array in named_arrays(batch)]
        for name, array, _ in self._arrays:
            dtype = np.dtype(_DTYPES.get(name, np.int32))
            if array.dtype != dtype or not array.flags.c_contiguous:
                raise ContractError(
                    f"{call}: {name} is {array.dtype}, contiguous: {array.flags.c_contiguous}; it "
                    f"must be C-contiguous {dtype}"
                )

    def check(self) -> None:
        """Raises ContractError when one of them was changed."""
        for name, array, content in self._arrays:
            if array.tobytes() != content:
                raise ContractError(
                    f"{self._call}: {name} was changed after it was submitted and before its "
                    "result was there; until then it belongs to the device"
                )


def check_batch(batch: Batch, pools: Sequence[KVPool]) -> None:
    """Raises ContractError unless the arrays fit together as `Batch` says. pools: attended to."""
    tokens, sequences = len(batch.tokens), len(batch.context_len)
    sizes = {
        "token_source": tokens, "positions": tokens, "query_start": sequences + 1,
        "sequence_slot": sequences, "adapter_slot": sequences,
    }  # fmt: skip
    for name, size in sizes.items():
        shape = getattr(batch, name).shape
        _require(shape == (size,), f"{name} has shape {shape}, expected ({size},)")
    counts = np.diff(batch.query_start)
    _require(
        bool((batch.query_start[[0, -1]] == [0, tokens]).all() and (counts >= 0).all()),
        f"query_start {batch.query_start.tolist()} does not divide {tokens} tokens",
    )
    _require(
        bool((batch.context_len >= counts).all()), "context_len is less than the step's tokens"
    )
    rows = batch.logit_rows
    _require(bool(((rows >= 0) & (rows < tokens)).all()), "logit_rows lie outside the tokens")
    owner = np.repeat(np.arange(sequences), counts)
    index = np.arange(tokens) - batch.query_start[owner] + (batch.context_len - counts)[owner]
    for pool in pools:
        table, slots = batch.page_tables[pool.spec.group], batch.slots[pool.spec.group]
        page, offset = np.divmod(index, pool.spec.page_size)
        _require(
            table.shape[0] == sequences and table.shape[1] > page.max(initial=-1),
            f"page_tables[{pool.spec.group}] of shape {table.shape} do not hold the context",
        )
        _require(
            np.array_equal(slots, table[owner, page] * pool.spec.page_size + offset),
            f"slots[{pool.spec.group}] are not where the page table puts the step's tokens",
        )


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ContractError(f"a step's {what}")


def pad_batch(batch: Batch) -> Batch:
    """Copies of the arrays with T, S, L and P padded to more than they were.

    Padded tokens are sequences of one token each in page 0; some padded sequences have no tokens;
    padded logit rows are padded tokens.
    """
    tokens, sequences = len(batch.tokens), len(batch.context_len)
    more_tokens = _padding(tokens, 8)
    more_sequences = more_tokens + _padding(sequences + more_tokens, 4)
    empty = more_sequences - more_tokens

    def per_token(values: Int32, fill: int = 0) -> Int32:
        return np.concatenate([values, np.full(more_tokens, fill, np.int32)])

    def per_sequence(values: Int32) -> Int32:
        return np.concatenate([values, np.zeros(more_sequences, np.int32)])

    mask = batch.tree_mask
    return Batch(
        tokens=per_token(batch.tokens),
        token_source=per_token(batch.token_source, -1),
        positions=per_token(batch.positions),
        query_start=np.concatenate(
            [
                batch.query_start,
                np.arange(tokens + 1, tokens + more_tokens + 1, dtype=np.int32),
                np.full(empty, tokens + more_tokens, np.int32),
            ]
        ),
        context_len=np.concatenate(
            [batch.context_len, np.ones(more_tokens, np.int32), np.zeros(empty, np.int32)]
        ),
        page_tables=tuple(
            np.pad(table, ((0, more_sequences), (0, _padding(table.shape[1], 4))))
            for table in batch.page_tables
        ),
        slots=tuple(per_token(slots) for slots in batch.slots),
        logit_rows=np.concatenate(
            [batch.logit_rows, np.full(_padding(len(batch.logit_rows), 4), tokens, np.int32)]
        ),
        sequence_slot=per_sequence(batch.sequence_slot),
        adapter_slot=per_sequence(batch.adapter_slot),
        tree_mask=None if mask is None else np.pad(mask, ((0, more_tokens), (0, 1))),
    )


def _padding(size: int, bucket: int) -> int:
    """How many to add for the next multiple of `bucket` above: at least one."""
    return bucket - size % bucket


def written_pages(batch: Batch, pool: KVPool) -> set[tuple[int, int]]:
    """(page, sequence slot) for every page that the step's tokens are stored in."""
    owner = np.repeat(batch.sequence_slot, np.diff(batch.query_start))
    pages = batch.slots[pool.spec.group] // pool.spec.page_size
    return set(zip(pages.tolist(), owner.tolist(), strict=True))


def touched_pages(batch: Batch, pool: KVPool) -> dict[int, set[int]]:
    """By page, the slots of the sequences that read or write it in the step."""
    touched: dict[int, set[int]] = {}
    for row, table in enumerate(batch.page_tables[pool.spec.group]):
        used = -(-int(batch.context_len[row]) // pool.spec.page_size)
        for page in table[:used].tolist():
            touched.setdefault(page, set()).add(int(batch.sequence_slot[row]))
    return touched
