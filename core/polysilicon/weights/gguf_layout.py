"""How the blocks of a GGUF type are taken apart: what the descriptions of all types share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from polysilicon.weights.encodings import Array, Float32, Scales, SuperScaled, pack_codes

Bytes = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """How the blocks of a type become a `GroupAffine` or a `GroupFloat`.

    bits, group, offset, table: those of the weight. format: `affine`, or that of a `GroupFloat`.
    codes: blocks uint8 `[B, size]` to codes uint8 `[B, elements]`, in the order of the elements.
    scale, bias: blocks uint8 `[..., N, B, size]` to scales of `[..., N, B * elements / group]`.
    """

    bits: int
    group: int
    format: str = "affine"
    table: Float32 | None = None
    offset: int = 0
    codes: Callable[[Bytes], Bytes]
    scale: Callable[[Bytes], Scales]
    bias: Callable[[Bytes], Scales] | None = None


def half(start: int) -> Callable[[Bytes], Array]:
    """The f16 at byte `start` of every block: `[..., B]`."""

    def read(blocks: Bytes) -> Array:
        return np.ascontiguousarray(blocks[..., start : start + 2]).view("<f2")[..., 0]

    return read


def words(blocks: Bytes, start: int, end: int, dtype: str) -> Array:
    """Bytes `[start, end)` of every block as little-endian words: `[..., B, W]`."""
    return np.ascontiguousarray(blocks[..., start:end]).view(dtype)


def planes(stored: Bytes, run: int, bits: int) -> Bytes:
    """Split bytes that each hold `8 // bits` fields of elements `run` apart.

    stored: uint8 `[B, S]`, in runs of `run` bytes. Field f of a run's byte j belongs to element
    `f * run + j` of the `run * 8 // bits` elements that the run covers: uint8 `[B, S * 8 // bits]`.
    """
    fields = 8 // bits
    runs = stored.reshape(len(stored), -1, 1, run)
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(fields, 1)
    return ((runs >> shifts) & np.uint8((1 << bits) - 1)).reshape(len(stored), -1)


def nibbles(start: int) -> Callable[[Bytes], Bytes]:
    """32 elements in 16 bytes from `start` on: the low nibbles, then the high ones."""
    return lambda blocks: planes(blocks[:, start : start + 16], 16, 4)


def nibble_pairs(stored: Bytes) -> Bytes:
    """Both nibbles of every byte, the low one first: uint8 `[..., S]` to `[..., 2 * S]`."""
    pairs = np.stack([stored & np.uint8(15), stored >> np.uint8(4)], axis=-1)
    return pairs.reshape(*stored.shape[:-1], 2 * stored.shape[-1])


def super_scaled(codes: Bytes, bits: int, scale: Array, offset: int = 0) -> SuperScaled:
    """codes: uint8 `[..., B, G]`, G scales in each of a row's B blocks; scale `[..., B]`."""
    *rows, count, group = codes.shape
    return SuperScaled(
        codes=pack_codes(codes.reshape(*rows, count * group), bits),
        bits=bits,
        offset=offset,
        count=count * group,
        scale=scale,
        group=group,
    )
