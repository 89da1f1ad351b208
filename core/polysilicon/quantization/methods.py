"""The methods that look at a linear's inputs, as `calibration.run` calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from polysilicon.quantization.awq import Scaling, find_scale
from polysilicon.quantization.gptq import curvature, gptq_codes
from polysilicon.quantization.source import ModelSource, Unit
from polysilicon.weights.encodings import Float32, GroupAffine
from polysilicon.weights.rtn import Fit

ChooseFit = Callable[[Unit], Fit | None]
"""How the grid of a unit is chosen; None where it stays dense."""

Advance = Callable[[int], None]
"""Takes a number of elements that are done."""

EXPERT_TOKENS = 128
"""Tokens that an expert has to see. Of fewer, one learns little of its inputs: it is rounded to
nearest."""

# Inputs of which the text has too little are not left without any weight.
_IMPORTANCE_FLOOR = np.float32(0.01)
_TOKENS_AT_ONCE = 2048

# Of the experts of a mixture, how many are looked at for the scale that all share, and how many
# rows of each of their matrices.
_SEARCH_EXPERTS, _SEARCH_ROWS = 16, 64


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


class Scarce:
    """The experts that saw fewer than `EXPERT_TOKENS` tokens."""

    def __init__(self, source: ModelSource) -> None:
        self._experts = source.config.experts
        self._found: set[tuple[str, int]] = set()

    def holds(self, keys: Sequence[str], x: Float32, expert: int | None) -> bool:
        """Whether an expert is one of them, by what its first linears see."""
        if expert is None or len(x) >= EXPERT_TOKENS:
            return False
        self._found.add((keys[0].rpartition(".expert_")[0], expert))
        return True

    def notes(self) -> list[str]:
        if not self._found or self._experts is None:
            return []
        total = sum(self._experts.layers) * self._experts.count
        return [
            f"{len(self._found)} of {total} experts saw fewer than {EXPERT_TOKENS} tokens of the "
            "text and are rounded to nearest. A longer or more varied text would reach more."
        ]


class GPTQ:
    """Quantises every linear where the run meets it, so that later ones see what became of it.

    weights: the quantised matrices, by unit and place in it. scarce: experts that were not fitted.
    """

    def __init__(self, source: ModelSource, fit: ChooseFit, advance: Advance) -> None:
        self.weights: dict[tuple[str, int], GroupAffine] = {}
        self.scarce = Scarce(source)
        self._source = source
        self._fit = fit
        self._advance = advance

    def table(self, key: str, rows: npt.NDArray[np.int64]) -> Float32:
        return self._source.parameter(key).take_rows(rows).dequantize()

    def mixture(self, keys: Sequence[str], x: Float32) -> None:
        """Each expert is fitted alone."""

    def visit(
        self, keys: Sequence[str], x: Float32, expert: int | None = None
    ) -> Sequence[Float32]:
        weights, factors = None, None
        if not self.scarce.holds(keys, x, expert) and self._any_fit(keys, expert):
            inputs = hessian(x)
            weights, factors = importance(inputs), curvature(inputs)
        values: dict[tuple[str, int], Float32] = {}
        results = []
        for key in keys:
            unit, matrix = self._source.place(key, expert)
            at = unit.name, matrix
            if at not in values:
                values[at] = self._source.values(unit, matrix)
                fit = self._fit(unit)
                if fit is not None:
                    grid = fit(values[at], weights)
                    codes = (
                        grid.nearest(values[at])
                        if factors is None
                        else gptq_codes(values[at], grid, factors)
                    )
                    self.weights[at] = grid.weight(codes)
                    values[at] = self.weights[at].dequantize()
                if unit.linear:
                    self._advance(values[at].size)
            rows = self._source.rows(unit, key)
            results.append(values[at] if rows is None else values[at][rows])
        return results

    def _any_fit(self, keys: Sequence[str], expert: int | None) -> bool:
        units = (self._source.place(key, expert)[0] for key in keys)
        return any(self._fit(unit) is not None for unit in units)


class AWQ:
    """Finds how the inputs of linears are scaled; the model itself runs as it is.

    scaling: what was found. importance: of the inputs of each matrix, as scaled, by unit and place
    in it. scarce: experts that were not looked at.
    """

    def __init__(self, source: ModelSource, fit: ChooseFit, advance: Advance) -> None:
        self.scaling = Scaling(source)
        self.importance: dict[tuple[str, int], Float32] = {}
        self.scarce = Scarce(source)
        self._source = source
        self._fit = fit
        self._advance = advance

    def table(self, key: str, rows: npt.NDArray[np.int64]) -> Float32:
        return self._source.parameter(key).take_rows(rows).dequantize()

    def mixture(self, keys: Sequence[str], x: Float32) -> None:
        readers = self.scaling.mixture_readers(keys)
        chosen: list[tuple[Float32, Fit]] = []
        for key in readers:
            stack = self._source.shapes[key]
            count = stack[0] if len(stack) == 3 else 0
            experts = range(0, count, -(-count // _SEARCH_EXPERTS)) if count else [None]
            for expert in experts:
                unit, matrix = self._source.place(key, expert)
                fit = self._fit(unit)
                if fit is not None:
                    values = self._rows(key, unit, self._source.values(unit, matrix))
                    chosen.append((values[:: -(-len(values) // _SEARCH_ROWS)].copy(), fit))
        if chosen:
            inputs = (hessian(x) / len(x)).astype(np.float32)
            scale = find_scale(chosen, inputs, np.abs(x).mean(axis=0))
            self.scaling.add_mixture(readers, scale)

    def visit(
        self, keys: Sequence[str], x: Float32, expert: int | None = None
    ) -> Sequence[Float32]:
        places = {key: self._source.place(key, expert) for key in keys}
        units = {(unit.name, matrix): unit for unit, matrix in places.values()}
        values = {at: self._source.values(unit, at[1]) for at, unit in units.items()}
        fits = {at: self._fit(unit) for at, unit in units.items()}
        chosen = [(values[at], fit) for at, fit in fits.items() if fit is not None]
        if chosen and not self.scarce.holds(keys, x, expert):
            inputs = hessian(x) / len(x)
            scale = self.scaling.columns_of(keys[0], expert)
            if scale is None and self.scaling.takes(keys):
                scale = find_scale(chosen, inputs.astype(np.float32), np.abs(x).mean(axis=0))
                self.scaling.add(keys, scale, expert)
            if scale is not None:
                inputs = inputs / np.outer(scale, scale)
            self.importance |= dict.fromkeys(units, importance(inputs))
        for at, unit in units.items():
            if unit.linear:
                self._advance(values[at].size)
        return [
            self._rows(key, unit, values[unit.name, matrix])
            for key, (unit, matrix) in places.items()
        ]

    def _rows(self, key: str, unit: Unit, values: Float32) -> Float32:
        rows = self._source.rows(unit, key)
        return values if rows is None else values[rows]


Calibrated = GPTQ | AWQ
