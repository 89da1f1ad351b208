"""GGUF's types of four bits an element that are looked up in a table: IQ4_NL, IQ4_XS, and the
MXFP4 and NVFP4 of the OCP Microscaling Formats 1.0 and of NVIDIA, in ggml's blocks.
"""

from __future__ import annotations

import numpy as np

from polysilicon.weights.encodings import E8M0, Array, SuperScaled
from polysilicon.weights.gguf_layout import (
    BlockLayout,
    Bytes,
    half,
    nibble_pairs,
    nibbles,
    planes,
    super_scaled,
    words,
)

# `kvalues_iq4nl` of ggml: levels that are finer near zero.
_IQ4_LEVELS = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)


def _unsigned_e4m3() -> Array:
    """f16 by code: ggml passes over the sign, takes 0x7F for zero and 0xFF for a number."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values: Array = np.where(
        exponent == 0, np.ldexp(mantissa, -9), np.ldexp(1 + mantissa / 8, exponent - 7)
    ).astype(np.float16)
    values[0x7F] = 0
    return values


_UNSIGNED_E4M3 = _unsigned_e4m3()


def _scale_iq4_xs(blocks: Bytes) -> SuperScaled:
    """8 scales of 6 bits: low nibbles in 4 bytes, pairs of high bits in a word of 16."""
    low = nibble_pairs(blocks[..., 4:8])
    high = words(blocks, 2, 4, "<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
    codes = low | high.astype(np.uint8) << np.uint8(4)
    return super_scaled(codes, 6, half(0)(blocks), offset=32)


def _scale_mxfp4(blocks: Bytes) -> Array:
    return E8M0[blocks[..., 0]]


def _scale_nvfp4(blocks: Bytes) -> Array:
    scales = _UNSIGNED_E4M3[blocks[..., :4]]
    return scales.reshape(*scales.shape[:-2], -1)


LAYOUTS = {
    "IQ4_NL": BlockLayout(
        bits=4, group=32, format="codebook", table=_IQ4_LEVELS, codes=nibbles(2), scale=half(0)
    ),
    "IQ4_XS": BlockLayout(
        bits=4,
        group=32,
        format="codebook",
        table=_IQ4_LEVELS,
        codes=lambda blocks: planes(blocks[:, 8:136], 16, 4),
        scale=_scale_iq4_xs,
    ),
    "MXFP4": BlockLayout(bits=4, group=32, format="f4_e2m1", codes=nibbles(1), scale=_scale_mxfp4),
    "NVFP4": BlockLayout(
        bits=4,
        group=16,
        format="f4_e2m1",
        codes=lambda blocks: planes(blocks[:, 4:36], 8, 4),
        scale=_scale_nvfp4,
    ),
}
