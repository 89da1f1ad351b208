"""GGUF's IQ1, IQ2 and IQ3 types, whose codes name vectors of a grid, as codes of single elements.

A code of the file picks a point of a grid, 8 or 4 levels at once, with signs beside it. Element by
element these are few values, so that a table of 8 or 16 entries holds them: 3 or 4 bits an element
where the file has 1.6 to 3.4. Scales stay codes: ggml's `d * (0.5 + s) / 4` is `d * (2 s + 1)`
here, with the power of two in the table.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from polysilicon.weights import gguf_grids
from polysilicon.weights.encodings import Array, Float32, SuperScaled
from polysilicon.weights.gguf_grids import Grid
from polysilicon.weights.gguf_layout import (
    BlockLayout,
    Bytes,
    half,
    nibble_pairs,
    super_scaled,
    words,
)

_IQ1_DELTA = 0.125


def _signed(levels: list[float], divisor: int) -> Float32:
    """The levels, then as many negative ones; the highest bit of a code is the sign."""
    padded = np.zeros(1 << (len(levels) - 1).bit_length(), np.float32)
    padded[: len(levels)] = levels
    padded /= np.float32(divisor)
    return np.concatenate([padded, -padded])


_IQ2_TABLE = _signed([8, 25, 43], 8)
_IQ3_XXS_TABLE = _signed([4, 12, 20, 28, 36, 44, 52, 62], 4)
_IQ3_S_TABLE = _signed([1, 3, 5, 7, 9, 11, 13, 15], 1)
# Here the highest bit is the sign of the delta, which is added to the level.
_IQ1_TABLE = np.array([-1, 0, 1, 0, -1, 0, 1, 0], np.float32) + np.repeat(
    np.array([_IQ1_DELTA, -_IQ1_DELTA], np.float32), 4
)


def _even_signs() -> Bytes:
    """8 signs by the 7 that are stored: the last makes the number of minus signs even."""
    stored = np.arange(128, dtype=np.uint8)
    minus = np.unpackbits(stored[:, None], axis=1).sum(axis=1, dtype=np.uint8)
    signs: Bytes = stored | (minus & np.uint8(1)) << np.uint8(7)
    return signs


_EVEN_SIGNS = _even_signs()


def _elements(grid: Grid, index: npt.NDArray[np.integer], high: Bytes) -> Bytes:
    """Points and the bits above them as codes of elements.

    index: of points, `[B, P]`. high: uint8 `[B, P * length]`, what stands above the bits of a
    level. The result is uint8 `[B, P * length]`.
    """
    levels = grid.points.take(index, axis=0).reshape(len(index), -1)
    return levels | high << np.uint8((grid.levels - 1).bit_length())


def _sign_bits(signs: Bytes) -> Bytes:
    """Bytes of 8 signs `[B, S]` as single bits `[B, 8 * S]`."""
    return np.unpackbits(signs, axis=-1, bitorder="little")


def _signs_in_words(stored: Array) -> Bytes:
    """Words whose low 28 bits are 4 times 7 signs: uint32 `[B, W]` to uint8 `[B, 4 * W]`."""
    sevens = stored[..., None] >> np.arange(0, 28, 7, dtype=np.uint32) & np.uint32(127)
    signs: Bytes = _EVEN_SIGNS[sevens].reshape(len(stored), -1)
    return signs


def _high_fields(stored: Array, bits: int, step: int, count: int) -> npt.NDArray[np.uint16]:
    """`count` fields of `bits` bits, `step` apart, of each of `[B, W]`: uint16 `[B, W * count]`."""
    shifts = np.arange(0, step * count, step, dtype=np.uint16)
    fields = stored.astype(np.uint16)[..., None] >> shifts & np.uint16((1 << bits) - 1)
    return fields.reshape(len(stored), -1)


def _odd(codes: Bytes) -> Bytes:
    return codes << np.uint8(1) | np.uint8(1)


def _codes_iq2_xxs(blocks: Bytes) -> Bytes:
    groups = words(blocks, 2, 66, "<u4").reshape(len(blocks), 8, 2)
    index = np.ascontiguousarray(groups[..., 0]).view(np.uint8)
    return _elements(gguf_grids.IQ2_XXS, index, _sign_bits(_signs_in_words(groups[..., 1])))


def _scale_iq2_xxs(blocks: Bytes) -> SuperScaled:
    return super_scaled(_odd(blocks[..., 9:66:8] >> np.uint8(4)), 5, half(0)(blocks))


def _codes_iq2_xs(blocks: Bytes) -> Bytes:
    stored = words(blocks, 2, 66, "<u2")
    signs = _EVEN_SIGNS[stored >> np.uint16(9)]
    return _elements(gguf_grids.IQ2_XS, stored & np.uint16(511), _sign_bits(signs))


def _scale_iq2_xs(blocks: Bytes) -> SuperScaled:
    return super_scaled(_odd(nibble_pairs(blocks[..., 66:74])), 5, half(0)(blocks))


def _codes_iq2_s(blocks: Bytes) -> Bytes:
    index = blocks[:, 2:34] | _high_fields(blocks[:, 66:74], 2, 2, 4) << np.uint16(8)
    return _elements(gguf_grids.IQ2_S, index, _sign_bits(blocks[:, 34:66]))


def _scale_iq2_s(blocks: Bytes) -> SuperScaled:
    return super_scaled(_odd(nibble_pairs(blocks[..., 74:82])), 5, half(0)(blocks))


def _codes_iq3_xxs(blocks: Bytes) -> Bytes:
    signs = _sign_bits(_signs_in_words(words(blocks, 66, 98, "<u4")))
    return _elements(gguf_grids.IQ3_XXS, blocks[:, 2:66], signs)


def _scale_iq3_xxs(blocks: Bytes) -> SuperScaled:
    return super_scaled(_odd(blocks[..., 69:98:4] >> np.uint8(4)), 5, half(0)(blocks))


def _codes_iq3_s(blocks: Bytes) -> Bytes:
    index = blocks[:, 2:66] | _high_fields(blocks[:, 66:74], 1, 1, 8) << np.uint16(8)
    return _elements(gguf_grids.IQ3_S, index, _sign_bits(blocks[:, 74:106]))


def _scale_iq3_s(blocks: Bytes) -> SuperScaled:
    return super_scaled(_odd(nibble_pairs(blocks[..., 106:110])), 5, half(0)(blocks))


def _codes_iq1_s(blocks: Bytes) -> Bytes:
    index = blocks[:, 2:34] | _high_fields(words(blocks, 34, 50, "<u2"), 3, 3, 4) << np.uint16(8)
    return gguf_grids.IQ1.points.take(index, axis=0).reshape(len(blocks), -1)


def _scale_codes_iq1_s(blocks: Bytes) -> Bytes:
    return _odd(blocks[..., 35:50:2] >> np.uint8(4) & np.uint8(7))


def _scale_iq1_s(blocks: Bytes) -> SuperScaled:
    return super_scaled(_scale_codes_iq1_s(blocks), 4, half(0)(blocks))


def _bias_iq1_s(blocks: Bytes) -> SuperScaled:
    """The delta, an eighth of the scale with a sign of its own, under an eighth of the block's."""
    scale = _scale_codes_iq1_s(blocks)
    codes = np.where(blocks[..., 35:50:2] & np.uint8(128), 15 - scale, 15 + scale)
    with np.errstate(invalid="ignore"):  # of a NaN in a damaged file, which is refused later
        deltas = half(0)(blocks).astype(np.float32) * np.float32(_IQ1_DELTA)
    return super_scaled(codes.astype(np.uint8), 5, deltas, offset=15)


def _codes_iq1_m(blocks: Bytes) -> Bytes:
    stored = nibble_pairs(blocks[:, 32:48])
    index = blocks[:, :32] | (stored & np.uint8(7)).astype(np.uint16) << np.uint16(8)
    return _elements(gguf_grids.IQ1, index, np.repeat(stored >> np.uint8(3), 8, axis=-1))


def _scale_iq1_m(blocks: Bytes) -> SuperScaled:
    """16 scales of 3 bits in 4 words, whose top nibbles together are the block's f16."""
    stored = words(blocks, 48, 56, "<u2")
    codes = stored[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & np.uint16(7)
    tops = (stored >> np.uint16(12)) << np.arange(0, 16, 4, dtype=np.uint16)
    scale = np.bitwise_or.reduce(tops, axis=-1).view("<f2")
    flat = codes.astype(np.uint8).reshape(*stored.shape[:-1], 16)
    return super_scaled(_odd(flat), 4, scale)


def _layout(
    bits: int,
    group: int,
    table: Float32,
    codes: Callable[[Bytes], Bytes],
    scale: Callable[[Bytes], SuperScaled],
) -> BlockLayout:
    return BlockLayout(
        bits=bits, group=group, format="codebook", table=table, codes=codes, scale=scale
    )


LAYOUTS = {
    "IQ2_XXS": _layout(3, 32, _IQ2_TABLE, codes=_codes_iq2_xxs, scale=_scale_iq2_xxs),
    "IQ2_XS": _layout(3, 16, _IQ2_TABLE, codes=_codes_iq2_xs, scale=_scale_iq2_xs),
    "IQ2_S": _layout(3, 16, _IQ2_TABLE, codes=_codes_iq2_s, scale=_scale_iq2_s),
    "IQ3_XXS": _layout(4, 32, _IQ3_XXS_TABLE, codes=_codes_iq3_xxs, scale=_scale_iq3_xxs),
    "IQ3_S": _layout(4, 32, _IQ3_S_TABLE, codes=_codes_iq3_s, scale=_scale_iq3_s),
    "IQ1_M": _layout(3, 16, _IQ1_TABLE, codes=_codes_iq1_m, scale=_scale_iq1_m),
    "IQ1_S": BlockLayout(
        bits=2,
        group=32,
        offset=1,
        codes=_codes_iq1_s,
        scale=_scale_iq1_s,
        bias=_bias_iq1_s,
    ),
}
