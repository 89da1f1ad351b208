"""GGUF's tensor types and their blocks, decoded exactly into the canonical encodings.

Block layouts are those of ggml (`ggml-common.h`): every quantised row is a run of blocks of 32 to
256 elements. A block's codes and scales are re-ordered, never re-rounded, so `dequantize` of the
result equals ggml's own, to the bit but for signs of zeros.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from polysilicon.weights import gguf_four_bits, gguf_vectors
from polysilicon.weights.encodings import (
    Dense,
    GroupAffine,
    GroupFloat,
    SuperScaled,
    Weight,
    pack_codes,
    unpack_codes,
)
from polysilicon.weights.gguf_layout import (
    BlockLayout,
    Bytes,
    half,
    nibbles,
    planes,
    super_scaled,
)

# Codes are unpacked to a byte each on the way; chunks keep those bytes in the processor's cache.
_CHUNK_ELEMENTS = 1 << 18


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorType:
    """A ggml tensor type: `elements` numbers stored together in `size` bytes."""

    name: str
    elements: int
    size: int


TENSOR_TYPES = {
    number: TensorType(name=name, elements=elements, size=size)
    for number, name, elements, size in [
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (9, "Q8_1", 32, 36),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
        (41, "Q1_0", 128, 18),
        (42, "Q2_0", 64, 18),
    ]
}

REMOVED_TYPES = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}

_DENSE = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


def decode(data: Bytes, kind: TensorType, shape: tuple[int, ...]) -> Weight:
    """The stored bytes of one tensor as a canonical weight.

    data: uint8 of exactly the tensor's size; dense types stay views of it. kind: a type whose name
    is in `SUPPORTED_TYPES`. shape: logical, its last dimension a multiple of `kind.elements`.
    """
    if kind.name in _DENSE:
        return Dense(array=data.view(_DENSE[kind.name]).reshape(shape))
    layout = _LAYOUTS[kind.name]
    blocks = data.reshape(-1, kind.size)
    packed = np.empty((len(blocks), kind.elements * layout.bits // 8), np.uint8)
    step = _CHUNK_ELEMENTS // kind.elements
    for start in range(0, len(blocks), step):
        chunk = slice(start, start + step)
        packed[chunk] = pack_codes(layout.codes(blocks[chunk]), layout.bits)
    rows = data.reshape(*shape[:-1], shape[-1] // kind.elements, kind.size)
    weight: dict[str, Any] = {
        "shape": shape,
        "group": layout.group,
        "codes": packed.reshape(*shape[:-1], -1),
        "scale": layout.scale(rows),
    }
    if layout.format != "affine":
        return GroupFloat(format=layout.format, table=layout.table, **weight)
    return GroupAffine(
        bits=layout.bits,
        offset=layout.offset,
        bias=None if layout.bias is None else layout.bias(rows),
        **weight,
    )


def _five_bits(start: int) -> Callable[[Bytes], Bytes]:
    """Q5_0 and Q5_1: 32 fifth bits in order, then 32 nibbles."""

    def read(blocks: Bytes) -> Bytes:
        fifth = np.unpackbits(blocks[:, start : start + 4], axis=-1, bitorder="little")
        return planes(blocks[:, start + 4 : start + 20], 16, 4) | fifth << np.uint8(4)

    return read


def _codes_q3_k(blocks: Bytes) -> Bytes:
    low = planes(blocks[:, 32:96], 32, 2)
    return low | planes(blocks[:, :32], 32, 1) << np.uint8(2)


def _codes_q5_k(blocks: Bytes) -> Bytes:
    low = planes(blocks[:, 48:176], 32, 4)
    return low | planes(blocks[:, 16:48], 32, 1) << np.uint8(4)


def _codes_q6_k(blocks: Bytes) -> Bytes:
    low = planes(blocks[:, :128], 64, 4)
    return low | planes(blocks[:, 128:192], 32, 2) << np.uint8(4)


def _scale_q2_k(blocks: Bytes) -> SuperScaled:
    return super_scaled(blocks[..., :16] & np.uint8(15), 4, half(80)(blocks))


def _bias_q2_k(blocks: Bytes) -> SuperScaled:
    return super_scaled(blocks[..., :16] >> np.uint8(4), 4, -half(82)(blocks))


def _scale_q3_k(blocks: Bytes) -> SuperScaled:
    """16 scales of 6 bits: low nibbles as two planes of 8, high pairs of bits as four of 4."""
    low, high = blocks[..., None, 96:104], blocks[..., None, 104:108]
    low = (low >> np.array([[0], [4]], np.uint8)) & np.uint8(15)
    high = (high >> np.array([[0], [2], [4], [6]], np.uint8)) & np.uint8(3)
    shape = (*blocks.shape[:-1], 16)
    codes = low.reshape(shape) | high.reshape(shape) << np.uint8(4)
    return super_scaled(codes, 6, half(108)(blocks), offset=32)


def _scale_q4_k(blocks: Bytes) -> SuperScaled:
    """8 scales of 6 bits: four whole ones, then low nibbles whose high bits top the first four."""
    first, mixed = blocks[..., 4:8], blocks[..., 12:16]
    last = (mixed & np.uint8(15)) | (first >> np.uint8(6)) << np.uint8(4)
    return super_scaled(np.concatenate([first & np.uint8(63), last], axis=-1), 6, half(0)(blocks))


def _bias_q4_k(blocks: Bytes) -> SuperScaled:
    """The minimums, stored beside the scales in the same way and subtracted."""
    first, mixed = blocks[..., 8:12], blocks[..., 12:16]
    last = mixed >> np.uint8(4) | (first >> np.uint8(6)) << np.uint8(4)
    return super_scaled(np.concatenate([first & np.uint8(63), last], axis=-1), 6, -half(2)(blocks))


def _scale_q6_k(blocks: Bytes) -> SuperScaled:
    # Signed bytes; flipping the sign bit makes them codes with an offset of 128.
    return super_scaled(blocks[..., 192:208] ^ np.uint8(128), 8, half(208)(blocks), offset=128)


def _codes_tq1_0(blocks: Bytes) -> Bytes:
    """Five ternary digits a byte, in three runs of 32, 16 and 4 bytes (the last one of four).

    Digit i of byte q, highest first, is the whole part of 3 * (q * 3^i mod 256) / 256.
    """
    runs = []
    for start, end, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = 3 ** np.arange(digits, dtype=np.uint8)[:, None]
        shifted = blocks[:, None, start:end] * powers
        runs.append((shifted.astype(np.uint16) * 3 >> 8).reshape(len(blocks), -1))
    return np.concatenate(runs, axis=-1).astype(np.uint8)


def _codes_q1_0(blocks: Bytes) -> Bytes:
    """A bit an element, for minus or plus the scale: -1 and 1 are codes 0 and 2."""
    return np.unpackbits(blocks[:, 2:], axis=-1, bitorder="little") << np.uint8(1)


def _codes_q2_0(blocks: Bytes) -> Bytes:
    return unpack_codes(blocks[:, 2:], 2, 64)


_LAYOUTS = {
    "Q4_0": BlockLayout(bits=4, group=32, offset=8, codes=nibbles(2), scale=half(0)),
    "Q4_1": BlockLayout(bits=4, group=32, codes=nibbles(4), scale=half(0), bias=half(2)),
    "Q5_0": BlockLayout(bits=5, group=32, offset=16, codes=_five_bits(2), scale=half(0)),
    "Q5_1": BlockLayout(bits=5, group=32, codes=_five_bits(4), scale=half(0), bias=half(2)),
    "Q8_0": BlockLayout(
        bits=8,
        group=32,
        offset=128,
        codes=lambda blocks: blocks[:, 2:] ^ np.uint8(128),
        scale=half(0),
    ),
    "Q2_K": BlockLayout(
        bits=2,
        group=16,
        codes=lambda blocks: planes(blocks[:, 16:80], 32, 2),
        scale=_scale_q2_k,
        bias=_bias_q2_k,
    ),
    "Q3_K": BlockLayout(bits=3, group=16, offset=4, codes=_codes_q3_k, scale=_scale_q3_k),
    "Q4_K": BlockLayout(
        bits=4,
        group=32,
        codes=lambda blocks: planes(blocks[:, 16:144], 32, 4),
        scale=_scale_q4_k,
        bias=_bias_q4_k,
    ),
    "Q5_K": BlockLayout(bits=5, group=32, codes=_codes_q5_k, scale=_scale_q4_k, bias=_bias_q4_k),
    "Q6_K": BlockLayout(bits=6, group=16, offset=32, codes=_codes_q6_k, scale=_scale_q6_k),
    "Q1_0": BlockLayout(bits=2, group=128, offset=1, codes=_codes_q1_0, scale=half(0)),
    "Q2_0": BlockLayout(bits=2, group=64, offset=1, codes=_codes_q2_0, scale=half(0)),
    "TQ1_0": BlockLayout(bits=2, group=256, offset=1, codes=_codes_tq1_0, scale=half(52)),
    "TQ2_0": BlockLayout(
        bits=2,
        group=256,
        offset=1,
        codes=lambda blocks: planes(blocks[:, :64], 32, 2),
        scale=half(64),
    ),
    **gguf_four_bits.LAYOUTS,
    **gguf_vectors.LAYOUTS,
}

SUPPORTED_TYPES = (*_DENSE, *_LAYOUTS)
