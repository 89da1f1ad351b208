"""Sampling batches of the kit."""

from __future__ import annotations

from typing import Any

import numpy as np

from polysilicon.backend import SamplingBatch
from polysilicon.testing.kit import Kit


def sampling(rows: int, **fields: Any) -> SamplingBatch:
    """Greedy rows without anything, but for the fields given: scalars count for every row."""
    defaults: dict[str, tuple[type, Any]] = {
        "draw": (np.bool_, True),
        "temperature": (np.float32, 0),
        "top_k": (np.int32, 0),
        "top_p": (np.float32, 1),
        "min_p": (np.float32, 0),
        "typical_p": (np.float32, 1),
        "repetition": (np.float32, 1),
        "presence": (np.float32, 0),
        "frequency": (np.float32, 0),
        "seed": (np.uint64, 0),
        "choice": (np.uint32, 0),
        "position": (np.uint32, 0),
    }
    arrays: dict[str, Any] = {
        name: np.array(np.broadcast_to(fields.pop(name, value), rows), dtype)
        for name, (dtype, value) in defaults.items()
    }
    return SamplingBatch(**arrays, **fields)


def drawing(kit: Kit, rows: int, **fields: Any) -> SamplingBatch:
    """Rows at temperature 0.8 with random keys."""
    keys = {
        "seed": kit.rng.integers(0, 2**64, rows, np.uint64),
        "choice": kit.rng.integers(0, 4, rows),
        "position": kit.rng.integers(0, 2**32, rows),
    }
    return sampling(rows, **{"temperature": 0.8} | keys | fields)
