"""Builds sampling batches from the fields that a test cares about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polysilicon.batch import SamplingBatch, SparseRows

_OFF: dict[str, tuple[Any, Any]] = {
    "draw": (True, np.bool_),
    "temperature": (1, np.float32),
    "top_k": (0, np.int32),
    "top_p": (1, np.float32),
    "min_p": (0, np.float32),
    "typical_p": (1, np.float32),
    "repetition": (1, np.float32),
    "presence": (0, np.float32),
    "frequency": (0, np.float32),
    "seed": (0, np.uint64),
    "choice": (0, np.uint32),
    "position": (0, np.uint32),
}


def _make(rows: int, **fields: Any) -> SamplingBatch:
    """Scalars and lists become arrays `[rows]`; a dict as bias or counts is every row's, a list of
    dicts is one a row."""
    arrays = {
        name: np.broadcast_to(np.asarray(fields.pop(name, off), dtype), rows).copy()
        for name, (off, dtype) in _OFF.items()
    }
    for name, dtype in (("bias", np.float32), ("counts", np.int32)):
        lists = fields.get(name)
        if lists is not None:
            lists = [lists] * rows if isinstance(lists, dict) else lists
            fields[name] = SparseRows(
                start=np.cumsum([0, *map(len, lists)]).astype(np.int32),
                ids=np.array([key for part in lists for key in part], np.int32),
                values=np.array([value for part in lists for value in part.values()], dtype),
            )
    if fields.get("targets") is not None:
        fields["targets"] = np.asarray(fields["targets"], np.int32)
    return SamplingBatch(**arrays, **fields)


@pytest.fixture(scope="session")
def sampling_batch() -> Callable[..., SamplingBatch]:
    return _make


@pytest.fixture(scope="session")
def pack_mask() -> Callable[[Any], Any]:
    """Packs bool `[L, V]` as `SamplingBatch.mask`, bit by bit."""

    def pack(allowed: Any) -> Any:
        rows, vocabulary = allowed.shape
        packed = np.zeros((rows, (vocabulary + 31) // 32), np.uint32)
        for row, token in np.argwhere(allowed):
            packed[row, token // 32] |= np.uint32(1) << np.uint32(token % 32)
        return packed

    return pack
