"""The tiny Llama as AutoAWQ stores it."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from .checkpoints import (
    Case,
    Codes,
    Float32,
    Module,
    Rng,
    is_linear,
    packed,
    rounded_to_nearest,
    scaled,
)

ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""The column of a word's eight that stands in each half of its bytes, from the lowest."""


def gemm_words(codes: Codes) -> np.ndarray:
    """int32 `[R, C / 8]` of codes `[R, C]`."""
    shuffled = codes.reshape(len(codes), -1, 8)[..., ORDER].reshape(codes.shape)
    return packed(shuffled, 4).view("<i4")


def quantize(
    rng: Rng, name: str, weight: Float32, *, group: int, layout: str, symmetric: bool
) -> Module | None:
    if not is_linear(name) or name.endswith("layers.1.mlp.down_proj"):
        return None
    size = weight.shape[1] if group == -1 else group
    codes, scale, zero = rounded_to_nearest(weight, 4, size, symmetric=symmetric)
    if layout == "gemm":
        stored = {"qweight": gemm_words(codes.T), "qzeros": gemm_words(zero.T), "scales": scale.T}
    else:
        # Groups are padded to whole words, of 4 words where a group has 32 elements.
        width = -(-zero.shape[1] // 32) * 32 if size == 32 else -(-zero.shape[1] // 8) * 8
        padding = ((0, 0), (0, width - zero.shape[1]))
        stored = {
            "qweight": packed(codes, 4).view("<i4"),
            "qzeros": packed(np.pad(zero, padding), 4).view("<i4"),
            "scales": np.pad(scale, padding),
        }
    return Module(stored=stored, values=scaled(codes, scale, zero, size))


def case(group: int, layout: str, *, symmetric: bool = False) -> Case:
    return Case(
        name=f"awq-{layout}-{group}",
        config={
            "quantization_config": {
                "bits": 4,
                "group_size": group,
                "quant_method": "awq",
                "version": layout,
                "zero_point": True,
                "modules_to_not_convert": ["layers.1.mlp.down_proj"],
            }
        },
        quantize=functools.partial(quantize, group=group, layout=layout, symmetric=symmetric),
        type="awq:4",
    )


CASES = [case(32, "gemm"), case(-1, "gemm", symmetric=True), case(32, "gemv"), case(-1, "gemv")]
CASES.append(
    dataclasses.replace(
        CASES[0],
        name="auto_round-awq",
        config={
            "quantization_config": {
                "bits": 4,
                "group_size": 32,
                "sym": False,
                "quant_method": "auto-round",
                "packing_format": "auto_round:auto_awq",
            }
        },
    )
)
