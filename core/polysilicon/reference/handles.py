"""Weights placed in host memory: dequantised once, to float32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from polysilicon.backend import Handle, Shard, Weight
from polysilicon.device_checks import check_parts, shard_window

Float32 = npt.NDArray[np.float32]


class ReferenceHandle:
    """Fused parts, concatenated along their outputs: `[N]`, `[N, K]` or `[E, N, K]`."""

    def __init__(self, array: Float32, parts: tuple[int, ...]) -> None:
        self.array = array
        self.parts = parts

    @property
    def nbytes(self) -> int:
        return self.array.nbytes


def weights_of(handle: Handle) -> Float32:
    assert isinstance(handle, ReferenceHandle), "a handle of another device"
    return handle.array


def placed_bytes(parts: Sequence[Weight], shard: Shard | None) -> int:
    """Bytes that `place` will take."""
    elements = sum(int(np.prod(part.shape, dtype=object)) for part in parts)
    return 4 * elements // (1 if shard is None else shard.ranks)


def place(parts: Sequence[Weight], shard: Shard | None) -> ReferenceHandle:
    """Dequantise, cut out the shard and fuse."""
    check_parts(parts, shard)
    axis = -1 if len(parts[0].shape) == 1 else -2
    arrays = [_cut(part.dequantize(), shard) for part in parts]
    return ReferenceHandle(
        # concatenate copies, so that nothing given stays in use
        np.concatenate(arrays, axis=axis, dtype=np.float32),
        tuple(array.shape[axis] for array in arrays),
    )


def _cut(array: Float32, shard: Shard | None) -> Float32:
    rows = slice(*shard_window(array.shape[-2 if array.ndim > 1 else -1], "rows", shard))
    if array.ndim == 1:
        return array[rows]
    return array[..., rows, slice(*shard_window(array.shape[-1], "columns", shard))]
