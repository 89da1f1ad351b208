"""How a step's queries are divided for attention: on the host, once for all layers.

Sequences with one query, decodes, go alone; the others in blocks of up to `MAX_QUERIES` queries of
one sequence, so that few keys are gathered for nothing where a long chunk stands among decodes.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from polysilicon.backend import Batch
from polysilicon_metal.arrays import bucket

Int32 = npt.NDArray[np.int32]

MAX_QUERIES = 64


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Blocks:
    """rows: int32 `[B, Q]`, tokens, T (the padded number of them) where there is none.
    sequences: int32 `[B]`. context: tokens of the longest context among them, a bucket."""

    rows: Int32
    sequences: Int32
    context: int


def make_blocks(batch: Batch, tokens: int) -> tuple[Blocks, ...]:
    """The blocks of a step, of one query each, then of several. tokens: T, padded."""
    counts = np.diff(batch.query_start)
    result = []
    for several in (False, True):
        sequences = np.flatnonzero(counts > 1 if several else counts == 1)
        if not len(sequences):
            continue
        queries = min(MAX_QUERIES, bucket(int(counts[sequences].max())))
        own = -(-counts[sequences] // queries)
        owner = np.repeat(sequences, own)
        number = np.arange(len(owner)) - np.repeat(np.cumsum(own) - own, own)
        first = batch.query_start[owner] + number * queries
        rows = first[:, None] + np.arange(queries)
        rows = np.where(rows < batch.query_start[owner + 1][:, None], rows, tokens)
        size = bucket(len(owner))
        padded = np.full((size, queries), tokens, np.int32)
        padded[: len(owner)] = rows
        owners = np.zeros(size, np.int32)
        owners[: len(owner)] = owner
        context = bucket(int(batch.context_len[sequences].max()))
        result.append(Blocks(rows=padded, sequences=owners, context=context))
    return tuple(result)
