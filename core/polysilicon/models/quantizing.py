"""Quantising a dense checkpoint's matrices while they are loaded (`--quantize`)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from polysilicon.errors import ConfigError, ModelError
from polysilicon.weights.encodings import (
    Array,
    Dense,
    Float32,
    GroupAffine,
    GroupFloat,
    SuperScaled,
    Weight,
)
from polysilicon.weights.files import shown
from polysilicon.weights.rtn import quantize_affine, quantize_float8, quantize_symmetric
from polysilicon.weights.safetensors import SUPPORTED_TYPES

GROUP = 32
"""Elements that share a scale, in the schemes that have groups."""

_TABLES = frozenset({"embedding", "head"})
# What chooses between experts is small, and a wrong choice costs more than a rounded product.
_LEFT = frozenset({"router", "shared_router"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeScheme:
    """One value of `--quantize`.

    linears: what becomes of a layer's matrices `[..., N, K]`. tables: of the embedding table and
    the output projection; None where they stay dense. grouped: K has to be a multiple of `GROUP`.
    """

    linears: Callable[[Float32], Weight]
    tables: Callable[[Float32], Weight] | None
    grouped: bool


def _eight_bits(values: Float32) -> Weight:
    return quantize_symmetric(values, bits=8, group=GROUP)


def _four_bits(values: Float32) -> Weight:
    return quantize_affine(values, bits=4, group=GROUP)


QUANTIZE_SCHEMES = {
    "w4": QuantizeScheme(linears=_four_bits, tables=_eight_bits, grouped=True),
    "w8": QuantizeScheme(linears=_eight_bits, tables=_eight_bits, grouped=True),
    "fp8": QuantizeScheme(linears=quantize_float8, tables=None, grouped=False),
}
"""By name: `w4` rounds to 4 bits with a scale and a bias for every 32 inputs, `w8` to 8 bits with a
scale, `fp8` to e4m3 with a scale for each output. Embeddings and the output projection have 8 bits
under `w4` and `w8` and stay dense under `fp8`; routers of experts, norms and biases stay dense."""


def check_dense(types: Iterable[str], scheme: str, source: str) -> None:
    """Raises ConfigError where any of a checkpoint's stored types is one of quantised weights."""
    found = Counter(name for name in types if name not in SUPPORTED_TYPES)
    if found:
        raise quantized_already(scheme, source, ", ".join(name for name, _ in found.most_common()))


def quantize_loaded(weight: Weight, key: str, scheme: str, source: str) -> Weight:
    """A matrix as `--quantize` wants it; itself where the scheme leaves it dense.

    key: the family's own name of the tensor. source: what messages call the checkpoint. A matrix
    whose inputs are no multiple of the group stays dense. Raises ConfigError for one that is
    quantised already, and ModelError for one that holds no numbers.
    """
    if not isinstance(weight, Dense):
        raise quantized_already(scheme, source, weight.encoding)
    chosen = QUANTIZE_SCHEMES[scheme]
    module = key.rpartition(".")[0].rpartition(".")[2]
    quantize = chosen.tables if module in _TABLES else chosen.linears
    inputs = weight.shape[-1]
    if quantize is None or module in _LEFT or (chosen.grouped and inputs % GROUP):
        return weight
    values = weight.dequantize()
    if not np.isfinite(values).all():
        raise ModelError(
            f"{source}: the tensor of {shown(key)} holds infinities or NaN and cannot be "
            "quantised. Download it again, or leave --quantize out."
        )
    if values.ndim == 2:
        return quantize(values)
    return _unstacked(quantize(values.reshape(-1, inputs)), weight.shape)


def quantized_already(scheme: str, source: str, what: str) -> ConfigError:
    """The error for a checkpoint that `--quantize` cannot take. what: how it is quantised."""
    return ConfigError(
        f"--quantize {scheme} works on dense checkpoints, and {source} is quantised already "
        f"({what}). Leave --quantize out, or name the unquantised model."
    )


def _unstacked(weight: Weight, shape: tuple[int, ...]) -> Weight:
    """A quantised matrix `[E * N, K]` as the stack `[E, N, K]` that it is made of."""
    assert isinstance(weight, GroupAffine | GroupFloat)

    def rows(array: Array) -> Array:
        return array.reshape(*shape[:-1], -1)

    assert not isinstance(weight.scale, SuperScaled)
    changed: dict[str, Any] = {
        "shape": shape,
        "codes": rows(weight.codes),
        "scale": rows(weight.scale),
    }
    if isinstance(weight, GroupAffine) and weight.bias is not None:
        assert not isinstance(weight.bias, SuperScaled)
        changed["bias"] = rows(weight.bias)
    return dataclasses.replace(weight, **changed)
