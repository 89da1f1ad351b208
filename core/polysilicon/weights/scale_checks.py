"""Scales that no weight can have: they would spread NaN or infinity to every output."""

from __future__ import annotations

import math

import numpy as np

from polysilicon.weights.encodings import (
    Array,
    GroupAffine,
    GroupFloat,
    Scales,
    SuperScaled,
    Weight,
)

_LARGEST = float(np.finfo(np.float32).max)


def scale_problem(weight: Weight) -> str | None:
    """Why a weight cannot have its scales and biases; None where it can, and where it has none.

    It completes `tensor NAME has ...`. Values are bounded without a look at the codes: by the
    largest scale times the code farthest from zero, plus the largest bias. So a scale that is as
    large as that is refused even where all the codes under it are small.
    """
    if isinstance(weight, GroupAffine):
        farthest = _farthest(weight.bits, weight.offset)
        bias = 0.0 if weight.bias is None else _largest(weight.bias)
    elif isinstance(weight, GroupFloat):
        levels = np.abs(weight.values_table)
        farthest, bias = float(levels[np.isfinite(levels)].max()), 0.0
    else:
        return None
    scale = _largest(weight.scale)
    if not math.isfinite(scale + bias):
        return "scales or biases that are not finite"
    if scale * farthest + bias > _LARGEST:
        return "scales or biases so large that its values are not finite in float32"
    return None


def _farthest(bits: int, offset: int) -> float:
    """How far a code of so many bits can be from the offset."""
    return float(max(abs(offset), abs((1 << bits) - 1 - offset)))


def _largest(scales: Scales) -> float:
    """The largest magnitude; not finite where one of the numbers is not."""
    if isinstance(scales, SuperScaled):
        return _largest_number(scales.scale) * _farthest(scales.bits, scales.offset)
    return _largest_number(scales)


def _largest_number(numbers: Array) -> float:
    # Magnitudes of floats are ordered as their bits are without the sign, infinity and NaN last,
    # and integers are compared many times as fast as 16-bit floats.
    unsigned = np.dtype(f"u{numbers.itemsize}")
    magnitude = unsigned.type((1 << (8 * numbers.itemsize - 1)) - 1)
    bits = (numbers.view(unsigned) & magnitude).max(initial=0)
    return float(np.array([bits], unsigned).view(numbers.dtype)[0])
