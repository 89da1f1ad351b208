"""The methods that look at a linear's inputs, as `calibration.run` calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from polysilicon.quantization.awq import Scaling, find_scale
from polysilicon.quantization.gptq import curvature, gptq_codes
from polysilicon.quantization.rtn import Fit
from polysilicon.quantization.source import ModelSource, Unit
from polysilicon.weights.encodings import Float32, GroupAffine

ChooseFit = Callable[[Unit], Fit | None]
"""How the grid of a unit is chosen; None where it stays dense."""

Advance = Callable[[Unit], None]
"""Takes a unit that is done."""

# Inputs of which the text has too little are not left without any weight.
_IMPORTANCE_FLOOR = np.float32(0.01)
_TOKENS_AT_ONCE = 2048


def hessian(x: Float32) -> npt.NDArray[np.float64]:
    """Sum of the outer products of inputs `[T, K]`: float64 `[K, K]`."""
    total = np.zeros((x.shape[1], x.shape[1]))
    for start in range(0, len(x), _TOKENS_AT_ONCE):
        part = x[start : start + _TOKENS_AT_ONCE]
        total += part.T @ part
    return total


def importance(hessian: npt.NDArray[np.float64]) -> Float32:
    """How much each input counts, float32 `[K]`, 1 on average."""
    diagonal = np.diagonal(hessian)
    relative: Float32 = (diagonal / max(diagonal.mean(), 1e-30)).astype(np.float32)
    return relative + _IMPORTANCE_FLOOR


class GPTQ:
    """Quantises every linear where the run meets it, so that later ones see what became of it.

    weights: the quantised units, by name.
    """

    def __init__(self, source: ModelSource, fit: ChooseFit, advance: Advance) -> None:
        self.weights: dict[str, GroupAffine] = {}
        self._source = source
        self._fit = fit
        self._advance = advance

    def table(self, key: str, rows: npt.NDArray[np.int64]) -> Float32:
        return self._source.parameter(key).take_rows(rows).dequantize()

    def visit(self, keys: Sequence[str], x: Float32) -> Sequence[Float32]:
        inputs = hessian(x)
        weights, factors = importance(inputs), curvature(inputs)
        values: dict[str, Float32] = {}
        results = []
        for key in keys:
            (unit,) = self._source.places[key]
            if unit.name not in values:
                values[unit.name] = self._source.values(unit)
                fit = self._fit(unit)
                if fit is not None:
                    grid = fit(values[unit.name], weights)
                    rounded = grid.weight(gptq_codes(values[unit.name], grid, factors))
                    self.weights[unit.name] = rounded
                    values[unit.name] = rounded.dequantize()
                self._advance(unit)
            rows = self._source.rows(unit, key)
            results.append(values[unit.name] if rows is None else values[unit.name][rows])
        return results


class AWQ:
    """Finds how the inputs of linears are scaled; the model itself runs as it is.

    scaling: what was found. importance: of the inputs of each unit, as scaled, by name.
    """

    def __init__(self, source: ModelSource, fit: ChooseFit, advance: Advance) -> None:
        self.scaling = Scaling(source)
        self.importance: dict[str, Float32] = {}
        self._source = source
        self._fit = fit
        self._advance = advance

    def table(self, key: str, rows: npt.NDArray[np.int64]) -> Float32:
        return self._source.parameter(key).take_rows(rows).dequantize()

    def visit(self, keys: Sequence[str], x: Float32) -> Sequence[Float32]:
        units = {unit.name: unit for key in keys for unit in self._source.places[key]}
        fits = {name: self._fit(unit) for name, unit in units.items()}
        values = {name: self._source.values(unit) for name, unit in units.items()}
        inputs = hessian(x) / len(x)
        weights = importance(inputs)
        chosen = [(values[name], fit) for name, fit in fits.items() if fit is not None]
        if chosen and self.scaling.takes(keys):
            scale = find_scale(chosen, inputs.astype(np.float32), np.abs(x).mean(axis=0))
            self.scaling.add(keys, scale)
            weights = importance(inputs / np.outer(scale, scale))
        for name, unit in units.items():
            self.importance[name] = weights
            self._advance(unit)
        results = []
        for key in keys:
            (unit,) = self._source.places[key]
            rows = self._source.rows(unit, key)
            results.append(values[unit.name] if rows is None else values[unit.name][rows])
        return results


Calibrated = GPTQ | AWQ
