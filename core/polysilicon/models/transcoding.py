"""Turning weights that a device does not run into the nearest encoding that it does."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from polysilicon.backend import Capabilities
from polysilicon.errors import ModelError
from polysilicon.weights.encodings import (
    DENSE_DTYPES,
    Array,
    Dense,
    Float32,
    GroupAffine,
    GroupFloat,
    Scales,
    SuperScaled,
    Weight,
    pack_codes,
    unpack_codes,
)


def transcode(weight: Weight, capabilities: Capabilities) -> Weight:
    """The weight itself where the device takes it, or its values in an encoding that it takes.

    Table entries that are whole multiples of a power of two become the codes of a `GroupAffine`,
    exactly. All else becomes `Dense`, in the first of the dense dtypes taken that fits: a 16-bit
    one that holds every value exactly; else f16, which has 3 more mantissa bits than bf16, unless
    its range is too small; else bf16; else f32. Raises ModelError when the device takes none.
    """
    if capabilities.takes(weight.encoding):
        return weight
    affine = _as_affine(weight)
    if affine is not None and capabilities.takes(affine.encoding):
        return affine
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


def narrow(values: Float32) -> Dense:
    """Computed values in 16 bits: f16, unless its range is too small, else bf16."""
    array, error = _narrowed(values, "f16")
    return Dense(array=array if error <= 2.0**-8 else _narrowed(values, "bf16")[0])


def _as_affine(weight: Weight) -> GroupAffine | None:
    """A `GroupFloat` with table entries at whole steps, up to 255 of them apart."""
    if not isinstance(weight, GroupFloat) or weight.block is not None:
        return None
    table = weight.values_table
    if not np.isfinite(table).all():
        return None
    _, exponent = math.frexp(float(np.abs(table).max()))
    step = np.float32(2.0 ** (exponent - 7))
    steps = table / step
    if (steps != np.rint(steps)).any():
        return None
    while (steps % 2 == 0).all() and steps.any():
        steps, step = steps / 2, step * 2
    offset = max(0, -int(steps.min()))
    bits = max(2, (int(steps.max()) + offset).bit_length())
    if bits > 8:
        return None
    codes = (steps + offset).astype(np.uint8)
    return GroupAffine(
        shape=weight.shape,
        bits=bits,
        group=weight.group,
        codes=pack_codes(codes[unpack_codes(weight.codes, weight.bits, weight.shape[-1])], bits),
        scale=_times(weight.scale, step),
        offset=offset,
        input_order=weight.input_order,
        input_scale=weight.input_scale,
    )


def _times(scales: Scales, power: np.float32) -> Scales:
    """Scales times a power of two, in their own dtype where its range allows it, else in f32."""
    if isinstance(scales, SuperScaled):
        scale = _times(scales.scale, power)
        assert not isinstance(scale, SuperScaled)
        return dataclasses.replace(scales, scale=scale)
    wide = scales.astype(np.float32) * power
    with np.errstate(over="ignore"):
        own = wide.astype(scales.dtype)
    return own if (own.astype(np.float32) == wide).all() else wide


def _narrowed(values: Float32, name: str) -> tuple[Array, float]:
    """Values in a 16-bit dtype, and the largest error relative to the largest value."""
    with np.errstate(over="ignore", invalid="ignore"):
        array = values.astype(DENSE_DTYPES[name])
        error = np.abs(array.astype(np.float32) - values).max(initial=0.0)
    return array, float(error / max(np.abs(values).max(initial=0.0), np.float32(1e-38)))
