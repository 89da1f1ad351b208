"""How quantised matrices lie in safetensors: compressed-tensors, GPTQ, AWQ and MLX.

A layout turns a `GroupAffine` `[N, K]` into the stored tensors of its module, exactly, and says in
`config.json` what was done. Experts are modules of their own, but for MLX, which has stacks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from polysilicon.weights.encodings import Array, GroupAffine, unpack_codes
from polysilicon.weights.rtn import zero_points


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """bits: those it has. groups: sizes of groups that other tools read. grid: `symmetric`,
    `zero_point` or `affine`. tables: whether embeddings and the output projection are quantised
    too. rows: what the number of a matrix's outputs is a multiple of. stacks: whether experts are
    stacks `[E, N, K]`, or each a module of its own.
    pack: the stored tensors of a module, by the end of their names.
    settings: what config.json says, by key, of (bits, group, modules that stayed dense).
    """

    bits: tuple[int, ...]
    groups: tuple[int, ...]
    grid: str
    tables: bool
    rows: int
    stacks: bool
    pack: Callable[[GroupAffine], Mapping[str, Array]]
    settings: Callable[[int, int, Sequence[str]], Mapping[str, Any]]
    metadata: Mapping[str, str]


def _words(codes: Array, bits: int, axis: int) -> Array:
    """Codes packed into int32 along an axis, the first in the lowest bits, padded with zeros."""
    lanes = 32 // bits
    codes = np.moveaxis(codes, axis, -1)
    padding = -codes.shape[-1] % lanes
    codes = np.pad(codes, [*[(0, 0)] * (codes.ndim - 1), (0, padding)])
    lanes_of = codes.reshape(*codes.shape[:-1], -1, lanes).astype(np.uint32)
    shifts = np.arange(lanes, dtype=np.uint32) * np.uint32(bits)
    words = np.bitwise_or.reduce(lanes_of << shifts, axis=-1)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


def _codes(weight: GroupAffine) -> Array:
    return unpack_codes(weight.codes, weight.bits, weight.shape[-1])


def _pack_compressed(weight: GroupAffine) -> dict[str, Array]:
    """compressed-tensors' `pack-quantized`: codes offset by half their range, packed along K."""
    assert isinstance(weight.scale, np.ndarray)
    assert weight.offset == 1 << (weight.bits - 1)
    assert weight.bias is None
    return {
        "weight_packed": _words(_codes(weight), weight.bits, axis=1),
        "weight_scale": weight.scale,
        "weight_shape": np.array(weight.shape, np.int64),
    }


def _compressed_settings(bits: int, group: int, dense: Sequence[str]) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group,
        "dynamic": False,
        "observer": "minmax",
        "observer_kwargs": {},
        "block_structure": None,
        "actorder": None,
    }
    scheme = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": scheme},
            "ignore": list(dense),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }
    }


def _pack_gptq(weight: GroupAffine) -> dict[str, Array]:
    """GPTQ: inputs first, codes packed along K, zeros stored one lower and packed along N."""
    assert isinstance(weight.scale, np.ndarray)
    columns = weight.shape[1]
    zeros = (zero_points(weight).T - np.uint8(1)) & np.uint8((1 << weight.bits) - 1)
    return {
        "qweight": _words(_codes(weight).T, weight.bits, axis=0),
        "qzeros": _words(zeros, weight.bits, axis=1),
        "scales": np.ascontiguousarray(weight.scale.T),
        "g_idx": np.arange(columns, dtype=np.int32) // np.int32(weight.group),
    }


def _gptq_settings(bits: int, group: int, dense: Sequence[str]) -> dict[str, Any]:
    return {
        "quantization_config": {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group,
            "sym": True,
            "desc_act": False,
            "static_groups": True,
            "lm_head": False,
            "true_sequential": True,
            "checkpoint_format": "gptq",
            "pack_dtype": "int32",
            "damp_percent": 0.01,
        }
    }


# Where AWQ's GEMM kernel wants the 8 codes of a word: word position i holds output `_AWQ_ORDER[i]`.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _pack_awq(weight: GroupAffine) -> dict[str, Array]:
    """AWQ's GEMM layout: inputs first, codes and zeros packed along N in an order of their own."""
    assert isinstance(weight.scale, np.ndarray)

    def words(codes: Array) -> Array:
        ordered = codes.reshape(len(codes), -1, 8)[..., _AWQ_ORDER].reshape(codes.shape)
        return _words(ordered, 4, axis=1)

    return {
        "qweight": words(np.ascontiguousarray(_codes(weight).T)),
        "qzeros": words(np.ascontiguousarray(zero_points(weight).T)),
        "scales": np.ascontiguousarray(weight.scale.T),
    }


def _awq_settings(bits: int, group: int, dense: Sequence[str]) -> dict[str, Any]:
    return {
        "quantization_config": {
            "quant_method": "awq",
            "bits": bits,
            "group_size": group,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": list(dense) or None,
        }
    }


def _pack_mlx(weight: GroupAffine) -> dict[str, Array]:
    """MLX: one little-endian stream of bits a row, which is how codes are held here too."""
    assert isinstance(weight.scale, np.ndarray)
    assert isinstance(weight.bias, np.ndarray)
    return {
        "weight": np.ascontiguousarray(weight.codes).view("<u4"),
        "scales": weight.scale,
        "biases": weight.bias,
    }


def _mlx_settings(bits: int, group: int, dense: Sequence[str]) -> dict[str, Any]:
    settings = {"group_size": group, "bits": bits, "mode": "affine"}
    return {"quantization": settings, "quantization_config": settings}


LAYOUTS = {
    "compressed-tensors": Layout(
        bits=(4, 8),
        groups=(128, 64, 32),
        grid="symmetric",
        tables=False,
        rows=1,
        stacks=False,
        pack=_pack_compressed,
        settings=_compressed_settings,
        metadata={"format": "pt"},
    ),
    "gptq": Layout(
        bits=(4, 8),
        groups=(128, 64, 32),
        grid="symmetric",
        tables=False,
        rows=8,
        stacks=False,
        pack=_pack_gptq,
        settings=_gptq_settings,
        metadata={"format": "pt"},
    ),
    "awq": Layout(
        bits=(4,),
        groups=(128, 64, 32),
        grid="zero_point",
        tables=False,
        rows=8,
        stacks=False,
        pack=_pack_awq,
        settings=_awq_settings,
        metadata={"format": "pt"},
    ),
    "mlx": Layout(
        bits=(4, 8, 2, 3, 5, 6),
        groups=(64, 128, 32),
        grid="affine",
        tables=True,
        rows=1,
        stacks=True,
        pack=_pack_mlx,
        settings=_mlx_settings,
        metadata={"format": "mlx"},
    ),
}
"""By the value of `--to`. Groups are tried in their order where none is asked for."""
