"""What formats of integer codes with scales share: groups of every size, zero points."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from polysilicon.weights.encodings import Array, GroupAffine
from polysilicon.weights.formats.checks import refuse
from polysilicon.weights.safetensors import SafetensorsDirectory

MOST_GROUP, LEAST_GROUP = 256, 16
"""Elements of a group that every device runs; a whole row may have more or fewer."""


def fitting_group(columns: int, group: int) -> int | None:
    """The largest group of at most `MOST_GROUP` elements that divides `group`; None where it would
    be of fewer than `LEAST_GROUP`. A group of the whole row stays one."""
    if group == columns:
        return group
    return next(
        (
            group // parts
            for parts in range(1, group // LEAST_GROUP + 1)
            if group % parts == 0 and group // parts <= MOST_GROUP
        ),
        None,
    )


def order_by_group(
    files: SafetensorsDirectory, name: str, groups: int
) -> npt.NDArray[np.int32] | None:
    """The inputs sorted by group, which a stored tensor `[K]` says of each; None where they are.

    Raises ModelError where it does not give each of `groups` equally many inputs.
    """
    index = files.array(name)
    if index.min() < 0 or index.max() >= groups:
        raise refuse(files, name, f"names groups outside 0..{groups - 1}")
    group = len(index) // groups
    if (np.bincount(index, minlength=groups) != group).any():
        raise refuse(files, name, f"does not give each group {group} inputs")
    order = np.argsort(index, kind="stable").astype(np.int32)
    return None if (order == np.arange(len(index))).all() else order


def zero_point_weight(
    *,
    shape: tuple[int, ...],
    bits: int,
    group: int,
    codes: npt.NDArray[np.uint8],
    scale: Array,
    zeros: Array,
    input_order: npt.NDArray[np.int32] | None = None,
) -> GroupAffine:
    """`scale * (code - zero)`.

    codes: packed, as in `GroupAffine`. group: elements that share a scale and a zero point, one
    that `fitting_group` takes. scale, zeros: `[..., N, K / group]`; zeros are integers, or floats
    of 16 bits. input_order: as in `GroupAffine`.

    One zero point for all becomes the offset; others become biases `-scale * zero` in float32.
    With scales of 16 bits and integer zero points all of it is exact in float32.
    """
    columns = shape[-1]
    fitting = fitting_group(columns, group)
    assert fitting is not None
    first = zeros.reshape(-1)[0]
    offset, bias = int(first), None
    if first != offset or not (zeros == first).all():
        # What comes out infinite is refused by `SafetensorsCheckpoint`.
        with np.errstate(over="ignore"):
            offset, bias = 0, -(scale.astype(np.float32) * zeros.astype(np.float32))
    if fitting != group:
        scale = np.repeat(scale, group // fitting, axis=-1)
        bias = None if bias is None else np.repeat(bias, group // fitting, axis=-1)
    return GroupAffine(
        shape=shape,
        bits=bits,
        group=fitting,
        codes=codes,
        scale=scale,
        offset=offset,
        bias=bias,
        input_order=input_order,
    )
