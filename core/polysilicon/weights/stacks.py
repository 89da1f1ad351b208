"""Matrices of one shape as a stack, and one of a stack: experts are stored in either form."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from polysilicon.weights.encodings import SuperScaled, Weight

Record = TypeVar("Record", Weight, SuperScaled)

_SHARED = frozenset({"table", "input_order"})
"""Arrays that a stack has once, for all of its matrices."""


def have_one_form(weights: Sequence[Weight]) -> bool:
    """Whether matrices can be a stack as they are: of one encoding, with the same tables and input
    orders, and scales of the same dtypes."""
    form = _form(weights[0])
    return all(_form(weight) == form for weight in weights[1:])


def stack_weights(weights: Sequence[Weight]) -> Weight:
    """Matrices `[N, K]` of one shape and form as a stack `[E, N, K]`.

    Values are exactly those of the matrices. `input_scale` is kept where all have the same. Beside
    the matrices, the stack alone takes memory.
    """
    assert all(weight.shape == weights[0].shape for weight in weights)
    assert have_one_form(weights)
    return _stacked(weights)


def take_matrix(stack: Weight, index: int) -> Weight:
    """One matrix `[N, K]` of a stack `[E, N, K]`, in its encoding: views of the stack's arrays."""
    assert len(stack.shape) == 3
    return _taken(stack, index)


def _taken(record: Record, index: int) -> Record:
    assert dataclasses.is_dataclass(record)
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        value: Any = getattr(record, field.name)
        if field.name == "shape":
            changes["shape"] = value[1:]
        elif isinstance(value, SuperScaled):
            changes[field.name] = _taken(value, index)
        elif isinstance(value, np.ndarray) and field.name not in _SHARED:
            changes[field.name] = value[index]
    return dataclasses.replace(record, **changes)


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
