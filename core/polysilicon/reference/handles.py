"""Weights placed in host memory: dequantised once, to float32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from polysilicon.backend import Handle, Shard, Weight

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
    if not parts:
        raise ValueError("put takes at least one part")
    axis = -1 if len(parts[0].shape) == 1 else -2
    frames = {
        tuple(size for i, size in enumerate(p.shape) if i != len(p.shape) + axis) for p in parts
    }
    if len(frames) > 1 or not 1 <= len(parts[0].shape) <= 3:
        shapes = ", ".join(str(part.shape) for part in parts)
        raise ValueError(f"parts of one product differ in their outputs only, got {shapes}")
    arrays = [_cut(part.dequantize(), shard) for part in parts]
    return ReferenceHandle(
        # concatenate copies, so that nothing given stays in use
        np.concatenate(arrays, axis=axis, dtype=np.float32),
        tuple(array.shape[axis] for array in arrays),
    )


def _cut(array: Float32, shard: Shard | None) -> Float32:
    if shard is None:
        return array
    if shard.axis == "columns" and array.ndim == 1:
        raise ValueError("a vector has no columns to shard; place it whole, or by rows")
    axis = -1 if array.ndim == 1 or shard.axis == "columns" else -2
    if array.shape[axis] % shard.ranks:
        raise ValueError(
            f"{array.shape[axis]} {shard.axis} do not divide among {shard.ranks} ranks"
        )
    return np.split(array, shard.ranks, axis=axis)[shard.rank]
