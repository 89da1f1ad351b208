"""GPTQ (arXiv 2210.17323): rounding whose errors later columns make up for."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from polysilicon.weights.encodings import Float32
from polysilicon.weights.rtn import Codes, Grid

Float64 = npt.NDArray[np.float64]

# Share of the mean diagonal that is added to it: inputs seen in calibration are not all there are.
DAMPING = 0.01
_BLOCK = 128


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Curvature:
    """What GPTQ needs of a linear's inputs, shared by all matrices that read them.

    order: int64 `[K]`, columns as they are rounded, those of the largest inputs first (act-order).
    upper: float32 `[K, K]`, in that order the upper Cholesky factor of the inverse of the damped
    Hessian.
    """

    order: npt.NDArray[np.int64]
    upper: Float32


def curvature(hessian: Float64) -> Curvature:
    """Factor the sum of outer products of a linear's inputs, float64 `[K, K]`.

    An input that was always 0 gets a curvature of its own, so that its weights are just rounded.
    """
    damped = hessian.copy()
    diagonal = np.einsum("kk->k", damped)
    diagonal[diagonal == 0] = 1
    order = np.argsort(-diagonal, kind="stable")
    diagonal += DAMPING * diagonal.mean()
    damped = damped[np.ix_(order, order)]
    # With J the reversal, J H J = L L^T gives H^-1 = U^T U for the upper U = J L^-1 J.
    lower = np.linalg.cholesky(damped[::-1, ::-1])
    upper = np.linalg.inv(lower)[::-1, ::-1]
    return Curvature(order=order, upper=np.ascontiguousarray(upper, np.float32))


def gptq_codes(weight: Float32, grid: Grid, curvature: Curvature) -> Codes:
    """Codes uint8 `[N, K]` on a grid, chosen so that `weight @ x` changes little.

    Columns are rounded one after the other; each one's error is spread over those that are left, as
    far as their inputs can make up for it. Groups keep the grids that they were given (static
    groups), so the order of rounding leaves no trace in the result.
    """
    scale, origin = grid.steps()
    inverse = np.where(scale == 0, np.float32(0), 1 / np.where(scale == 0, np.float32(1), scale))
    scale, origin, inverse = (np.ascontiguousarray(part.T) for part in (scale, origin, inverse))
    order, upper = curvature.order, curvature.upper
    left = np.ascontiguousarray(weight.T[order], np.float32)
    codes = np.empty(left.shape, np.uint8)
    for start in range(0, len(left), _BLOCK):
        end = min(start + _BLOCK, len(left))
        errors = np.empty((end - start, left.shape[1]), np.float32)
        for column in range(start, end):
            group = order[column] // grid.group
            code = np.rint((left[column] - origin[group]) * inverse[group])
            np.clip(code, 0, grid.levels, out=code)
            codes[order[column]] = code
            error = (left[column] - (code * scale[group] + origin[group])) / upper[column, column]
            errors[column - start] = error
            left[column + 1 : end] -= np.outer(upper[column, column + 1 : end], error)
        left[end:] -= upper[start:end, end:].T @ errors
    return np.ascontiguousarray(codes.T)
