"""Holding a config that was written against the model that it is of."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from polysilicon.models.config import ModelConfig
from polysilicon.ops import Rope


def differences(read: ModelConfig, meant: ModelConfig) -> list[str]:
    """Fields in which two configs differ, but for the family's name and the rounding of numbers."""
    return [
        field.name
        for field in dataclasses.fields(meant)
        if field.name != "architecture"
        and not _same(getattr(read, field.name), getattr(meant, field.name))
    ]


def _same(a: object, b: object) -> bool:
    if isinstance(a, Rope) and isinstance(b, Rope):
        return (a.dim, a.interleaved) == (b.dim, b.interleaved) and np.allclose(
            (a.scale, *a.frequencies), (b.scale, *b.frequencies), rtol=1e-5, atol=0
        )
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        return all(
            _same(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a)
        )
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6)
    return a == b
