"""The tiny Llama as AutoGPTQ, GPTQModel and AutoRound store it."""

from __future__ import annotations

import dataclasses
import functools

import ml_dtypes
import numpy as np

from .checkpoints import (
    Case,
    Codes,
    Float32,
    Module,
    Rng,
    is_linear,
    packed,
    rounded_to_nearest,
    scaled,
)


def words(codes: Codes, bits: int) -> np.ndarray:
    """int32 words of streams of codes along the last axis."""
    return packed(codes, bits).view("<i4")


def store(
    codes: Codes, scale: np.ndarray, zero: np.ndarray, index: np.ndarray, bits: int, *, less: int
) -> dict[str, np.ndarray]:
    """The four tensors: codes and zero points `[N, K]`, `[N, G]`, less 1 modulo whole words."""
    zeros = words(zero.T.copy(), bits)
    if less:
        ones = np.packbits(
            np.tile([1] + [0] * (bits - 1), 32 // bits + 1)[:32], bitorder="little"
        ).view("<u4")
        assert 32 % bits == 0 or (zero > 0).all()
        zeros = (
            (zeros.view("<u4") - ones).view("<i4")
            if 32 % bits == 0
            else words(zero.T.copy() - 1, bits)
        )
    return {
        "qweight": words(codes, bits).T,
        "qzeros": zeros,
        "scales": scale.T,
        "g_idx": index.astype(np.int32),
    }


def quantize(
    rng: Rng,
    name: str,
    weight: Float32,
    *,
    bits: int,
    group: int,
    symmetric: bool,
    order: bool,
    less: int,
    dtype: type = np.float16,
) -> Module | None:
    if not is_linear(name):
        return None
    size = weight.shape[1] if group == -1 else group
    inputs = rng.permutation(weight.shape[1]) if order else np.arange(weight.shape[1])
    index = np.empty(weight.shape[1], np.int64)
    index[inputs] = np.arange(weight.shape[1]) // size
    sorted_codes, scale, zero = rounded_to_nearest(
        weight[:, inputs], bits, size, symmetric=symmetric, dtype=dtype
    )
    if less and bits == 3:
        zero = zero.clip(min=1)
    codes, values = np.empty_like(sorted_codes), np.empty_like(weight)
    codes[:, inputs] = sorted_codes
    values[:, inputs] = scaled(sorted_codes, scale, zero, size)
    return Module(stored=store(codes, scale, zero, index, bits, less=less), values=values)


def config(bits: int, group: int, *, symmetric: bool, order: bool, format: str) -> dict:
    return {
        "quantization_config": {
            "bits": bits,
            "group_size": group,
            "desc_act": order,
            "sym": symmetric,
            "lm_head": False,
            "quant_method": "gptq",
            "checkpoint_format": format,
            "pack_dtype": "int32",
            "dynamic": None,
            "modules_in_block_to_quantize": None,
        }
    }


def case(
    bits: int, group: int, *, symmetric: bool, order: bool, format: str, dtype: type = np.float16
) -> Case:
    return Case(
        name=f"{format}-{bits}-{group}{'-sym' * symmetric}{'-order' * order}",
        config=config(bits, group, symmetric=symmetric, order=order, format=format),
        quantize=functools.partial(
            quantize,
            bits=bits,
            group=group,
            symmetric=symmetric,
            order=order,
            less=format == "gptq",
            dtype=dtype,
        ),
        type=f"{format}:{bits}",
    )


CASES = [
    case(4, 32, symmetric=True, order=False, format="gptq"),
    case(4, 32, symmetric=False, order=True, format="gptq"),
    case(4, -1, symmetric=True, order=False, format="gptq_v2"),
    case(4, 16, symmetric=False, order=True, format="gptq_v2", dtype=ml_dtypes.bfloat16),
    case(2, 16, symmetric=False, order=False, format="gptq"),
    case(2, 32, symmetric=True, order=False, format="gptq_v2"),
    case(3, 32, symmetric=False, order=True, format="gptq"),
    case(3, 32, symmetric=False, order=False, format="gptq_v2"),
    case(8, 32, symmetric=False, order=True, format="gptq"),
    case(8, -1, symmetric=True, order=False, format="gptq_v2"),
]


def auto_round(packing: str, like: Case) -> Case:
    """A case as AutoRound says it."""
    said = like.config["quantization_config"]
    kept = {name: said[name] for name in ("bits", "group_size", "sym")}
    further = {"quant_method": "auto-round", "packing_format": packing, "autoround_version": "0.9"}
    return dataclasses.replace(
        like, name=f"{packing}-{like.name}", config={"quantization_config": {**kept, **further}}
    )


CASES += [
    auto_round("auto_round:auto_gptq", CASES[0]),
    auto_round("auto_round", CASES[3]),
]
