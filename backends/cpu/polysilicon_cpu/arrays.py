"""numpy arrays as native code takes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]

_LINE = 64


def address(array: Array) -> int:
    """Where a C-contiguous array's elements begin; it must be kept while the address is used."""
    place: int = array.__array_interface__["data"][0]
    return place


def aligned(count: int) -> Float32:
    """float32 `[count]`, not initialised, at a border of 64 bytes."""
    memory = np.empty(count * 4 + _LINE, np.uint8)
    start = -address(memory) % _LINE
    return memory[start : start + count * 4].view(np.float32)
