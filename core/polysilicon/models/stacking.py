"""Experts that are stored one by one, as the stacks that devices take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from polysilicon.models.transcoding import narrow
from polysilicon.weights.encodings import DENSE_DTYPES, Dense, GroupAffine, Weight, scale_values
from polysilicon.weights.rtn import quantize_symmetric
from polysilicon.weights.stacks import have_one_form, stack_weights

FEW_BITS = 4
"""Of integers that a stack of other integers holds nearly as they are."""

_BITS, _GROUP = 8, 32


def stack_experts(weights: Sequence[Weight]) -> Weight:
    """Matrices `[N, K]` of one shape as a stack `[E, N, K]`.

    As they are where they have one form; integers that differ only in how zero points are stored
    are brought into one, exactly where scales have 16 bits. A stack has one order of inputs, while
    act-order gives each expert its own, and checkpoints may mix encodings. Then integers of up to 4
    bits become 8 bits under a scale for every 32 inputs, which adds about 0.2% to the squared error
    that rounding Gaussian weights to 4 bits has left. Everything else becomes 16 bits, or float32
    where one of them is.
    """
    if have_one_form(weights):
        return stack_weights(weights)
    integers = [weight for weight in weights if isinstance(weight, GroupAffine)]
    if len(integers) == len(weights):
        biased = [_biased(weight) for weight in integers]
        if have_one_form(biased):
            return stack_weights(biased)
        if (
            max(weight.bits for weight in integers) <= FEW_BITS
            and weights[0].shape[1] % _GROUP == 0
        ):
            return stack_weights(
                [
                    quantize_symmetric(weight.dequantize(), bits=_BITS, group=_GROUP)
                    for weight in weights
                ]
            )
    return _dense(weights)


def _biased(weight: GroupAffine) -> GroupAffine:
    """The same values with a bias for each group, in float32."""
    scale = scale_values(weight.scale)
    bias = scale * np.float32(-weight.offset)
    if weight.bias is not None:
        bias = bias + scale_values(weight.bias)
    return dataclasses.replace(weight, scale=scale, offset=0, bias=bias)


def _dense(weights: Sequence[Weight]) -> Dense:
    if any(weight.encoding == "dense:f32" for weight in weights):
        return Dense(array=np.stack([weight.dequantize() for weight in weights]))
    matrices = [narrow(weight.dequantize()).array for weight in weights]
    if len({matrix.dtype for matrix in matrices}) > 1:
        matrices = [weight.dequantize().astype(DENSE_DTYPES["bf16"]) for weight in weights]
    return Dense(array=np.stack(matrices))
