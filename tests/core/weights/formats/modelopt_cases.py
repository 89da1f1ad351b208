"""The tiny Llama as NVIDIA's Model Optimizer stores it."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

from . import float_codes
from .checkpoints import Case, Float32, Module, Rng, is_linear


def fp8(
    rng: Rng, name: str, weight: Float32, *, block: tuple[int, int], shape: tuple[int, ...] | None
) -> Module | None:
    """block: as in `fp8_cases`; shape: of the scales, None for `[N / rows, 1, K / columns, 1]`."""
    if not is_linear(name):
        return None
    size = (block[0] or weight.shape[0], block[1] or weight.shape[1])
    codes, scale, values = float_codes.quantized_blocks(weight, size)
    stored = {
        "weight": codes.view(ml_dtypes.float8_e4m3fn),
        "weight_scale": scale[:, None, :, None] if shape is None else scale.reshape(shape),
        "input_scale": np.float32(0.02),
    }
    return Module(stored=stored, values=values)


def nvfp4(rng: Rng, name: str, weight: Float32) -> Module | None:
    if not is_linear(name):
        return None
    factor = np.float32(np.abs(weight).max() / 448 / 6)
    codes, scale, values = float_codes.quantized_nvfp4(weight, float(factor))
    stored = {
        "weight": codes,
        "weight_scale": scale.view(ml_dtypes.float8_e4m3fn),
        "weight_scale_2": factor,
        "input_scale": np.float32(rng.uniform(1e-4, 1e-3)),
    }
    return Module(stored=stored, values=values)


def mxfp8(rng: Rng, name: str, weight: Float32) -> Module | None:
    if not is_linear(name):
        return None
    codes, exponents, values = float_codes.quantized_mx(weight, "e4m3")
    stored = {"weight": codes.view(ml_dtypes.float8_e4m3fn), "weight_scale": exponents}
    return Module(stored=stored, values=values)


def mixed(rng: Rng, name: str, weight: Float32) -> Module | None:
    if ".mlp." in name:
        return nvfp4(rng, name, weight)
    return fp8(rng, name, weight, block=(0, 0), shape=())


def config(algorithm: str, **further: Any) -> dict[str, Any]:
    return {
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": algorithm,
            "producer": {"name": "modelopt", "version": "0.39.0"},
            "ignore": ["lm_head"],
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            **further,
        }
    }


CASES = [
    Case(
        name="modelopt-fp8",
        config=config("FP8"),
        quantize=functools.partial(fp8, block=(0, 0), shape=()),
        type="modelopt:fp8",
    ),
    Case(
        name="modelopt-fp8-rows",
        config=config("FP8_PER_CHANNEL_PER_TOKEN"),
        quantize=functools.partial(fp8, block=(1, 0), shape=(-1,)),
        type="modelopt:fp8",
    ),
    Case(
        name="modelopt-fp8-blocks",
        config=config("fp8_pb_wo"),
        quantize=functools.partial(fp8, block=(128, 128), shape=None),
        type="modelopt:fp8",
    ),
    Case(name="modelopt-nvfp4", config=config("NVFP4"), quantize=nvfp4, type="modelopt:nvfp4"),
    Case(name="modelopt-mxfp8", config=config("MXFP8"), quantize=mxfp8, type="modelopt:mxfp8"),
    Case(
        name="modelopt-mixed",
        config=config("MIXED_PRECISION", quantized_layers={}),
        quantize=mixed,
        type="modelopt:nvfp4",
    ),
]
