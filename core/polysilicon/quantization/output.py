"""What a checkpoint that is being written offers, whatever its format."""

from __future__ import annotations

from typing import Protocol

from polysilicon.quantization.source import Unit
from polysilicon.weights.encodings import Float32, GroupAffine
from polysilicon.weights.rtn import Fit


class Output(Protocol):
    """notes: what the user should know, such as what stays dense and what could not be carried."""

    notes: list[str]

    def fit(self, unit: Unit) -> Fit | None:
        """How the grids of a unit's matrices are chosen; None where it stays dense."""

    def quantized(self, unit: Unit, weight: GroupAffine) -> None:
        """Write a unit whose grids `fit` chose, of the unit's shape."""

    def dense(self, unit: Unit, values: Float32) -> None:
        """Write a unit that stays dense, float32."""

    def close(self) -> None:
        """Complete the checkpoint."""
