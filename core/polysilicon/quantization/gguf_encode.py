"""Canonical weights as the blocks of GGUF's tensor types: what `weights.gguf_blocks` reads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from polysilicon.weights.encodings import (
    Array,
    GroupAffine,
    Scales,
    SuperScaled,
    Weight,
    unpack_codes,
)
from polysilicon.weights.stacks import take_matrix

Bytes = npt.NDArray[np.uint8]


def encode(weight: GroupAffine, kind: str) -> Bytes:
    """The blocks of a matrix or stack `[..., N, K]` on grids of `kind`, uint8 `[rows, K / block *
    size]`, those of all matrices."""
    if len(weight.shape) == 3:
        return np.concatenate(
            [_encode(take_matrix(weight, index), kind) for index in range(weight.shape[0])]
        )
    return _encode(weight, kind)


def _encode(weight: Weight, kind: str) -> Bytes:
    assert isinstance(weight, GroupAffine)
    rows, columns = weight.shape
    codes = unpack_codes(weight.codes, weight.bits, columns)
    block = 256 if kind.endswith("_K") else 32
    parts = _ENCODERS[kind](codes.reshape(rows, columns // block, block), weight)
    return np.concatenate(parts, axis=-1).reshape(rows, -1)


def _half(values: Scales) -> Bytes:
    """One f16 a block: `[N, B]` to bytes `[N, B, 2]`."""
    assert isinstance(values, np.ndarray)
    assert values.dtype == np.float16
    return np.ascontiguousarray(values)[..., None].view(np.uint8)


def _super(values: Scales | None) -> tuple[Bytes, Array]:
    """Codes uint8 `[N, B, G]` of scales, and the f16 above them, `[N, B]`."""
    assert isinstance(values, SuperScaled)
    codes = unpack_codes(values.codes, values.bits, values.count)
    return codes.reshape(len(codes), -1, values.group), values.scale


def _planes(codes: Bytes, run: int, bits: int) -> Bytes:
    """Codes of `bits` bits packed so that a byte holds those of elements `run` apart.

    Elements `[f * run + j]` of a stretch of `run * 8 // bits` go into field f of byte j:
    uint8 `[N, B, E]` to `[N, B, E * bits // 8]`.
    """
    fields = 8 // bits
    lanes = codes.reshape(*codes.shape[:2], -1, fields, run)
    packed = np.zeros((*lanes.shape[:3], run), np.uint8)
    for field in range(fields):
        packed |= lanes[..., field, :] << np.uint8(field * bits)
    return packed.reshape(*codes.shape[:2], -1)


def _fifth_bits(codes: Bytes) -> Bytes:
    return np.packbits(codes >> np.uint8(4), axis=-1, bitorder="little")


def _low(codes: Bytes) -> Bytes:
    return codes & np.uint8(15)


def _q4_0(codes: Bytes, weight: GroupAffine) -> list[Bytes]:
    return [_half(weight.scale), _planes(codes, 16, 4)]


def _q4_1(codes: Bytes, weight: GroupAffine) -> list[Bytes]:
    assert weight.bias is not None
    return [_half(weight.scale), _half(weight.bias), _planes(codes, 16, 4)]


def _q5_0(codes: Bytes, weight: GroupAffine) -> list[Bytes]:
    return [_half(weight.scale), _fifth_bits(codes), _planes(_low(codes), 16, 4)]


def _q5_1(codes: Bytes, weight: GroupAffine) -> list[Bytes]:
    assert weight.bias is not None
    head = [_half(weight.scale), _half(weight.bias)]
    return [*head, _fifth_bits(codes), _planes(_low(codes), 16, 4)]


def _q8_0(codes: Bytes, weight: GroupAffine) -> list[Bytes]:
    return [_half(weight.scale), codes ^ np.uint8(128)]


def _six_bit_scales(scales: Bytes, minimums: Bytes) -> Bytes:
    """8 scales and 8 minimums of 6 bits in 12 bytes: the first four of each whole, topped by the
    high bits of the last four, whose low nibbles share the last 4 bytes."""
    first = [
        part[..., :4] | (part[..., 4:] >> np.uint8(4)) << np.uint8(6) for part in (scales, minimums)
    ]
    last = _low(scales[..., 4:]) | _low(minimums[..., 4:]) << np.uint8(4)
    return np.concatenate([*first, last], axis=-1)


def _affine_head(weight: GroupAffine) -> list[Bytes]:
    scales, scale = _super(weight.scale)
    minimums, minimum = _super(weight.bias)
    return [_half(scale), _half(-minimum), _six_bit_scales(scales, minimums)]


def _q4_k(codes: Bytes, weight: GroupAffine) -> list[Bytes]:
    return [*_affine_head(weight), _planes(codes, 32, 4)]


def _q5_k(codes: Bytes, weight: GroupAffine) -> list[Bytes]:
    fifth = _planes(codes >> np.uint8(4), 32, 1)
    return [*_affine_head(weight), fifth, _planes(_low(codes), 32, 4)]


def _q6_k(codes: Bytes, weight: GroupAffine) -> list[Bytes]:
    scales, scale = _super(weight.scale)
    high = _planes(codes >> np.uint8(4), 32, 2)
    return [_planes(_low(codes), 64, 4), high, scales ^ np.uint8(128), _half(scale)]


_ENCODERS: dict[str, Callable[[Bytes, GroupAffine], list[Bytes]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
