"""What the bytes of GGUF's types stand for, in others' words than those of the code under test."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt

from polysilicon.weights.gguf_blocks import TENSOR_TYPES

TYPES = {kind.name: kind for kind in TENSOR_TYPES.values()}

UNKNOWN_TO_THE_PACKAGE = {"Q1_0": (1, [-1, 1]), "Q2_0": (2, [-1, 0, 1, 2])}
"""Types that the `gguf` package does not dequantise: bits of a code, and its levels under an f16
scale that stands first, as ggml has them."""


def dequantized(raw: npt.NDArray[np.uint8], name: str) -> npt.NDArray[np.float32]:
    """Values float32 `[..., K]` of stored rows `[..., bytes]`."""
    if name not in UNKNOWN_TO_THE_PACKAGE:
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    bits, levels = UNKNOWN_TO_THE_PACKAGE[name]
    blocks = raw.reshape(-1, TYPES[name].size)
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    stream = np.unpackbits(blocks[:, 2:], axis=-1, bitorder="little")
    codes = stream.reshape(len(blocks), -1, bits) @ (1 << np.arange(bits))
    values = scales * np.array(levels, np.float32)[codes]
    return values.reshape(*raw.shape[:-1], -1)
