"""Rotary frequencies: the scalings that models are published with, as formulas over arrays.

Frequencies are float64 `[dim / 2]`, angles in radians a position. Two scalings depend on the
sequence in transformers: dynamic NTK recomputes its base as a sequence grows, LongRoPE switches
between two lists of factors. Keys that are already cached would then carry rotations of another
base, so here both choices are made once, from the context that the model is loaded for
(`max_length`), as llama.cpp and vLLM do.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from polysilicon.ops import Rope

Frequencies = npt.NDArray[np.float64]


def base_frequencies(base: float, dim: int) -> Frequencies:
    """`base^(-2i / dim)` (arXiv 2104.09864)."""
    exponents: Frequencies = np.arange(0, dim, 2, dtype=np.float64) / -dim
    return np.power(base, exponents)


def dynamic_ntk_base(base: float, dim: int, *, factor: float, ratio: float) -> float:
    """The base of dynamic NTK scaling for a context of `ratio` times the trained one.

    `base * (factor * ratio - (factor - 1))^(dim / (dim - 2))`; unchanged up to ratio 1.
    """
    return float(base * (factor * max(ratio, 1.0) - (factor - 1)) ** (dim / (dim - 2)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN (arXiv 2309.00071): high frequencies stay, low ones are divided by `factor`.

    original: tokens of context before scaling. beta_fast, beta_slow: full rotations over it between
    which the two are blended. truncate: the blend's ends are rounded outwards to whole dimensions.
    """

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def apply(self, frequencies: Frequencies, base: float, dim: int) -> Frequencies:
        def dimension(rotations: float) -> float:
            return dim * math.log(self.original / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001
        ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
        blended: Frequencies = frequencies / self.factor * ramp + frequencies * (1 - ramp)
        return blended


def yarn_magnitude(factor: float, multiplier: float = 1.0) -> float:
    """YaRN's `0.1 * multiplier * ln(factor) + 1`, or 1 where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0


def llama3_frequencies(
    frequencies: Frequencies, *, factor: float, low: float, high: float, original: int
) -> Frequencies:
    """Llama 3.1's scaling: wavelengths above `original / low` are stretched by `factor`, those
    below `original / high` stay, and those between are interpolated."""
    wavelengths = 2 * math.pi / frequencies
    blend = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    return (1 - blend) * frequencies / factor + blend * frequencies


def longrope_magnitude(factor: float, original: int) -> float:
    """LongRoPE's `sqrt(1 + ln(factor) / ln(original))` (arXiv 2402.13753)."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def as_rope(frequencies: Frequencies, scale: float = 1.0) -> Rope:
    """The half-split `Rope` of these frequencies."""
    return Rope(
        dim=2 * len(frequencies),
        frequencies=tuple(float(frequency) for frequency in frequencies),
        scale=scale,
    )
