"""Turning weights that a device does not run into the nearest encoding that it does."""

from __future__ import annotations

import numpy as np

from polysilicon.backend import Capabilities
from polysilicon.errors import ModelError
from polysilicon.weights.encodings import DENSE_DTYPES, Array, Dense, Float32, Weight


def transcode(weight: Weight, capabilities: Capabilities) -> Weight:
    """The weight itself where the device takes it, or its values as `Dense`.

    Of the dense dtypes that the device takes: a 16-bit one that holds every value exactly; else
    f16, which has 3 more mantissa bits than bf16, unless its range is too small; else bf16; else
    f32. Raises ModelError when the device takes none.
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
    narrow = {name: _narrowed(values, name) for name in taken if name != "f32"}
    for tolerance in (0.0, 2.0**-8):
        for array, error in narrow.values():
            if error <= tolerance:
                return Dense(array=array)
    return Dense(array=values if "f32" in taken else narrow[taken[-1]][0])


def transcode_vector(values: Float32, capabilities: Capabilities) -> Weight:
    """Norm weights and biases: float32 where the device takes it, as they are small."""
    if capabilities.takes("dense:f32"):
        return Dense(array=values)
    return transcode(Dense(array=values), capabilities)


def _narrowed(values: Float32, name: str) -> tuple[Array, float]:
    """Values in a 16-bit dtype, and the largest error relative to the largest value."""
    with np.errstate(over="ignore", invalid="ignore"):
        array = values.astype(DENSE_DTYPES[name])
        error = np.abs(array.astype(np.float32) - values).max(initial=0.0)
    return array, float(error / max(np.abs(values).max(initial=0.0), np.float32(1e-38)))
