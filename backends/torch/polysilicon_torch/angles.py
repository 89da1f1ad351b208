"""Rotary frequencies for integer arithmetic, which gives a token's angle without rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch


def turns_of(frequencies: Sequence[float]) -> torch.Tensor:
    """Radians a position as int64 in 2^-64 of a full turn, whole turns dropped. The product with a
    position, wrapped to 64 bits, is the token's angle: within 2^-34 of a turn for all int32."""
    units = [round(Fraction(f) / Fraction(math.tau) * 2**64) % 2**64 for f in frequencies]
    return torch.tensor([unit - (unit >> 63 << 64) for unit in units], dtype=torch.int64)
