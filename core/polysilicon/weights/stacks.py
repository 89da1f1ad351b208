"""Matrices of one shape as a stack: what checkpoints store expert by expert, as devices take it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from polysilicon.weights.encodings import Dense, SuperScaled, Weight

Record = TypeVar("Record", Weight, SuperScaled)

_SHARED = frozenset({"table", "input_order"})
"""Arrays that a stack has once, for all of its matrices."""


def stack_weights(weights: Sequence[Weight]) -> Weight:
    """Matrices `[N, K]` of one shape as a stack `[E, N, K]`, in their encoding.

    Values are exactly those of the matrices. Where the encodings, the dtypes of scales, tables or
    input orders differ between them, no encoding holds all as they are, and the stack is `Dense`
    float32. `input_scale` is kept where all have the same. Beside the matrices, the stack alone
    takes memory.
    """
    first = weights[0]
    assert all(weight.shape == first.shape for weight in weights)
    form = _form(first)
    if all(_form(weight) == form for weight in weights[1:]):
        return _stacked(weights)
    values = np.empty((len(weights), *first.shape), np.float32)
    for target, weight in zip(values, weights, strict=True):
        target[:] = weight.dequantize()
    return Dense(array=values)


def _form(record: Weight | SuperScaled) -> tuple[object, ...]:
    """What records that go into one stack have in common."""
    assert dataclasses.is_dataclass(record)
    form: list[object] = [type(record)]
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, SuperScaled):
            form.append(_form(value))
        elif isinstance(value, np.ndarray):
            form.append((value.dtype, value.shape))
            form.append(value.tobytes() if field.name in _SHARED else None)
        elif field.name != "input_scale":
            form.append(value)
    return tuple(form)


def _stacked(records: Sequence[Record]) -> Record:
    """Records of one form as one whose arrays have a further, first axis."""
    first = records[0]
    assert dataclasses.is_dataclass(first)
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(first):
        values: list[Any] = [getattr(record, field.name) for record in records]
        if field.name == "shape":
            changes["shape"] = (len(records), *values[0])
        elif field.name == "input_scale":
            changes["input_scale"] = values[0] if len(set(values)) == 1 else None
        elif isinstance(values[0], SuperScaled):
            changes[field.name] = _stacked(values)
        elif isinstance(values[0], np.ndarray) and field.name not in _SHARED:
            changes[field.name] = np.stack(values)
    return dataclasses.replace(first, **changes)
