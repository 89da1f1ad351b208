"""What every format checks of stored tensors before it uses them."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from polysilicon.errors import ModelError
from polysilicon.weights.encodings import Array
from polysilicon.weights.files import TensorInfo, shown
from polysilicon.weights.safetensors import SafetensorsDirectory

SCALE_TYPES = ("F16", "BF16", "F32")
_MEND = "Download the checkpoint again, or quantise the model again with a current tool."


def refuse(files: SafetensorsDirectory, name: str, problem: str) -> ModelError:
    """The error for a stored tensor; `problem` completes 'tensor NAME ...'."""
    return ModelError(f"{files.path}: tensor {shown(name)} {problem}. {_MEND}")


def stored(
    files: SafetensorsDirectory,
    name: str,
    *,
    types: Collection[str],
    shape: tuple[int | None, ...] | None = None,
) -> TensorInfo:
    """The entry of a stored tensor that must be there, of one of `types` and of `shape`.

    shape: None for any, or with a None for an axis of any size. No axis may be empty.
    """
    info = files.tensors.get(name)
    if info is None:
        raise ModelError(f"{files.path} lacks tensor {shown(name)}. {_MEND}")
    if info.type not in types:
        raise refuse(files, name, f"is {info.type}, expected {' or '.join(types)}")
    wanted = (None,) * len(info.shape) if shape is None else shape
    fits = len(wanted) == len(info.shape) and all(
        size > 0 and want in (None, size) for want, size in zip(wanted, info.shape, strict=True)
    )
    if not fits:
        expected = ", ".join("any" if size is None else str(size) for size in wanted)
        raise refuse(files, name, f"has shape {list(info.shape)}, expected [{expected}]")
    return info


def finite(files: SafetensorsDirectory, name: str) -> Array:
    """The numbers of a stored tensor of scales or biases. Raises ModelError for NaN or infinity."""
    array = files.array(name)
    # A signalling NaN of bfloat16 warns too.
    with np.errstate(invalid="ignore"):
        is_finite = bool(np.isfinite(array).all())
    if not is_finite:
        raise refuse(files, name, "holds numbers that are not finite")
    return array
