"""A step's arrays on the device, padded to buckets."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from polysilicon.backend import Batch
from polysilicon_torch.runtime import Runtime
from polysilicon_torch.staging import Layout

_LEAST_CONTEXT = 256
_LEAST_PAGES = 16


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DeviceBatch:
    """`polysilicon.batch.Batch` as tensors of int32, with T, S, L and P padded.

    Padded tokens belong to no sequence: they stand past `query_start[S]`, their slots lie in page
    0, their token, position and logit row are 0. Padded sequences have no tokens (`query_start`
    repeats the real number of tokens), no context and the adapter slot 0.

    token_sequence: int32 `[T]`, the sequence of each token, -1 for padding.
    tree_mask: bool `[T, M]` or None.
    tokens_padded, sequences_padded: T and S. max_query: at least the most tokens that a sequence
    has in the step. max_context: at least the longest `context_len`; both are buckets, known to
    the host.
    """

    tokens: torch.Tensor
    token_source: torch.Tensor
    positions: torch.Tensor
    query_start: torch.Tensor
    context_len: torch.Tensor
    page_tables: tuple[torch.Tensor, ...]
    slots: tuple[torch.Tensor, ...]
    logit_rows: torch.Tensor
    sequence_slot: torch.Tensor
    adapter_slot: torch.Tensor
    token_sequence: torch.Tensor
    tree_mask: torch.Tensor | None
    tokens_padded: int
    sequences_padded: int
    max_query: int
    max_context: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buckets:
    """The sizes that a step is padded to: steps of the same buckets run the same graph.

    pages: page-table width of each group. tree: columns of the tree mask, None without one.
    """

    tokens: int
    sequences: int
    rows: int
    max_query: int
    max_context: int
    pages: tuple[int, ...]
    tree: int | None

    @classmethod
    def of(cls, batch: Batch) -> Buckets:
        lengths = np.diff(batch.query_start)
        mask = batch.tree_mask
        return cls(
            tokens=bucket(len(batch.tokens)),
            sequences=bucket(len(batch.context_len)),
            rows=bucket(len(batch.logit_rows)),
            max_query=power_of_two(int(lengths.max(initial=1))),
            max_context=power_of_two(max(_LEAST_CONTEXT, int(batch.context_len.max(initial=1)))),
            pages=tuple(
                power_of_two(max(_LEAST_PAGES, table.shape[1])) for table in batch.page_tables
            ),
            tree=None if mask is None else power_of_two(mask.shape[1]),
        )

    def layout(self) -> Layout:
        """Where a step's arrays stand in its buffer."""
        T, S = self.tokens, self.sequences
        shapes: dict[str, tuple[int, ...]] = {
            "tokens": (T,),
            "token_source": (T,),
            "positions": (T,),
            "query_start": (S + 1,),
            "context_len": (S,),
            "logit_rows": (self.rows,),
            "sequence_slot": (S,),
            "adapter_slot": (S,),
            "token_sequence": (T,),
        }
        for group, width in enumerate(self.pages):
            shapes[f"page_table.{group}"] = (S, width)
            shapes[f"slots.{group}"] = (T,)
        arrays: dict[str, tuple[npt.DTypeLike, tuple[int, ...]]] = {
            name: (np.int32, shape) for name, shape in shapes.items()
        }
        if self.tree is not None:
            arrays["tree_mask"] = (np.bool_, (T, self.tree))
        return Layout(arrays)


class StepBuffer:
    """A device buffer for steps of some buckets, and the batch that reads it. What is submitted
    earlier reads what was in it before: transfers keep their place in the stream."""

    def __init__(self, runtime: Runtime, buckets: Buckets) -> None:
        self._runtime = runtime
        self._buckets = buckets
        self._layout = buckets.layout()
        self._buffer = torch.zeros(self._layout.nbytes, dtype=torch.uint8, device=runtime.device)
        views = self._layout.views(self._buffer)
        groups = range(len(buckets.pages))
        self.batch = DeviceBatch(
            **{name: views[name] for name in _WHOLE},
            page_tables=tuple(views[f"page_table.{group}"] for group in groups),
            slots=tuple(views[f"slots.{group}"] for group in groups),
            tree_mask=views.get("tree_mask"),
            tokens_padded=buckets.tokens,
            sequences_padded=buckets.sequences,
            max_query=buckets.max_query,
            max_context=buckets.max_context,
        )

    @property
    def nbytes(self) -> int:
        return self._layout.nbytes

    def fill(self, batch: Batch) -> None:
        """Submit the transfer of a batch of these buckets, padded; its arrays may be reused."""
        staged = self._runtime.host_tensor((self._layout.nbytes,), torch.uint8)
        staged.zero_()
        views = self._layout.host_views(staged)
        tokens, sequences = len(batch.tokens), len(batch.context_len)
        for name in ("tokens", "token_source", "positions", "logit_rows"):
            array = getattr(batch, name)
            views[name][: len(array)] = array
        views["token_source"][tokens:] = -1
        for name in ("context_len", "sequence_slot", "adapter_slot"):
            views[name][:sequences] = getattr(batch, name)
        views["query_start"][: sequences + 1] = batch.query_start
        views["query_start"][sequences + 1 :] = tokens
        views["token_sequence"][:tokens] = np.repeat(
            np.arange(sequences, dtype=np.int32), np.diff(batch.query_start)
        )
        views["token_sequence"][tokens:] = -1
        for group, (table, slots) in enumerate(zip(batch.page_tables, batch.slots, strict=True)):
            views[f"page_table.{group}"][:sequences, : table.shape[1]] = table
            views[f"slots.{group}"][:tokens] = slots
        if batch.tree_mask is not None:
            views["tree_mask"][:tokens, : batch.tree_mask.shape[1]] = batch.tree_mask
        self._buffer.copy_(staged, non_blocking=True)


_WHOLE = (
    "tokens",
    "token_source",
    "positions",
    "query_start",
    "context_len",
    "logit_rows",
    "sequence_slot",
    "adapter_slot",
    "token_sequence",
)


def power_of_two(size: int) -> int:
    """The least power of two that is not below `size`; 1 for less."""
    return 1 << max(0, size - 1).bit_length()


def bucket(size: int) -> int:
    """What a number of tokens, sequences or rows is padded to: at least 1, and above 64 at most an
    eighth more."""
    if size <= 8:
        return power_of_two(size)
    step = max(8, power_of_two(size) // 16)
    return -(-size // step) * step
