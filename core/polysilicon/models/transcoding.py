"""Turning weights that a device does not run into the nearest encoding that it does."""

from __future__ import annotations

import numpy as np

from polysilicon.backend import Capabilities
from polysilicon.errors import ModelError
from polysilicon.weights.encodings import DENSE_DTYPES, Dense, Float32, Weight


def transcode(weight: Weight, capabilities: Capabilities) -> Weight:
    """The weight itself where the device takes it, or its values as `Dense`.

    Of the dense dtypes that the device takes: a 16-bit one that holds every value exactly, or else
    f16 where no value overflows (it has 3 more mantissa bits than bf16), bf16, f32.
    Raises ModelError when the device takes none.
    """
    if capabilities.takes(weight.encoding):
        return weight
    taken = [name for name in ("f16", "bf16", "f32") if capabilities.takes(f"dense:{name}")]
    if not taken:
        raise ModelError(
            f"The device takes neither {weight.encoding} nor any dense encoding. "
            "Choose another backend or another file of this model."
        )
    values = weight.dequantize()
    for name in taken:
        if _held(values, name, exactly=True) and name != "f32":
            return Dense(array=values.astype(DENSE_DTYPES[name]))
    for name in taken:
        if _held(values, name, exactly=False):
            return Dense(array=values.astype(DENSE_DTYPES[name]))
    return Dense(array=values.astype(DENSE_DTYPES[taken[-1]]))


def transcode_vector(values: Float32, capabilities: Capabilities) -> Weight:
    """Norm weights and biases: float32 where the device takes it, as they are small."""
    if capabilities.takes("dense:f32"):
        return Dense(array=values)
    return transcode(Dense(array=values), capabilities)


def _held(values: Float32, name: str, *, exactly: bool) -> bool:
    with np.errstate(over="ignore"):
        stored = values.astype(DENSE_DTYPES[name]).astype(np.float32)
    if exactly:
        return bool(np.array_equal(stored, values, equal_nan=True))
    return bool((np.isfinite(stored) | ~np.isfinite(values)).all())
