"""Figures by name: means with their standard errors, and percentiles."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over samples. error: its standard error, the samples' standard deviation (n - 1) over
    the root of n, as if they were independent; None of a single sample, and where it is not
    finite."""

    mean: float
    error: float | None

    def exponential(self) -> Estimate:
        """The estimate of e to this mean."""
        with np.errstate(over="ignore"):
            value = float(np.exp(self.mean))
        finite = self.error is not None and math.isfinite(value)
        return Estimate(mean=value, error=value * (self.error or 0.0) if finite else None)

    def figures(self, name: str) -> dict[str, float | None]:
        return {name: self.mean, f"{name}_stderr": self.error}


def estimate(values: npt.NDArray[np.generic]) -> Estimate:
    """Of at least one value; booleans count as 0 and 1."""
    x = values.astype(np.float64)
    with np.errstate(invalid="ignore"):
        mean = float(x.mean())
    known = len(x) > 1 and math.isfinite(mean)
    return Estimate(mean=mean, error=float(x.std(ddof=1)) / len(x) ** 0.5 if known else None)


def spread(name: str, values: Float64) -> dict[str, float | None]:
    """Mean, percentiles (interpolated linearly, as llama.cpp's) and largest of at least one
    value."""
    with np.errstate(invalid="ignore"):
        percentiles = np.percentile(values, PERCENTILES)
    return {
        **estimate(values).figures(f"mean_{name}"),
        **{f"{name}_p{p:g}": float(x) for p, x in zip(PERCENTILES, percentiles, strict=True)},
        f"{name}_max": float(values.max()),
    }
