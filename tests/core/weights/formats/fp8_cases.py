"""The tiny Llama in fp8, as Hugging Face, vLLM and FBGEMM store it."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

from . import float_codes
from .checkpoints import Case, Float32, Module, Rng, is_linear

DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def quantize(
    rng: Rng,
    name: str,
    weight: Float32,
    *,
    block: tuple[int, int],
    type: str = "e4m3",
    scale_name: str = "weight_scale_inv",
    scale_shape: tuple[int, ...] | None = None,
    exponents: bool = False,
    static: bool = False,
) -> Module | None:
    """block: that shares a scale, 0 for all rows or columns. scale_shape: None as blocks are."""
    if not is_linear(name):
        return None
    size = (block[0] or weight.shape[0], block[1] or weight.shape[1])
    codes, scale, values = float_codes.quantized_blocks(weight, size, type)
    stored_scale: Any = scale if scale_shape is None else scale.reshape(scale_shape)
    if exponents:
        stored_scale = float_codes.power_of_two_codes(scale).view(ml_dtypes.float8_e8m0fnu)
        spread = 2.0 ** np.floor(np.log2(float_codes.over_blocks(scale, size, weight.shape)))
        values = float_codes.scaled(codes, type, spread)
    stored = {"weight": codes.view(DTYPES[type]), scale_name: stored_scale}
    if static:
        stored["input_scale"] = np.float32(rng.uniform(0.01, 0.02))
    return Module(stored=stored, values=values)


def config(method: str = "fp8", **further: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **further}}


def blocks(name: str, block: tuple[int, int], **options: Any) -> Case:
    return Case(
        name=name,
        config=config(
            activation_scheme="dynamic", fmt=options.get("type", "e4m3"), weight_block_size=block
        ),
        quantize=functools.partial(quantize, block=block, **options),
        type=f"fp8:{options.get('type', 'e4m3')}",
    )


CASES = [
    blocks("fp8-blocks", (128, 128)),
    blocks("fp8-small-blocks", (48, 32)),
    blocks("fp8-exponents", (16, 64), exponents=True),
    blocks("fp8-e5m2", (64, 48), type="e5m2"),
    Case(
        name="fp8-static",
        config=config(activation_scheme="static", ignored_layers=["lm_head"]),
        quantize=functools.partial(
            quantize, block=(0, 0), scale_name="weight_scale", scale_shape=(), static=True
        ),
        type="fp8:e4m3",
    ),
    Case(
        name="fbgemm-fp8",
        config=config("fbgemm_fp8", activation_scale_ub=1200.0, modules_to_not_convert=["lm_head"]),
        quantize=functools.partial(quantize, block=(1, 0), scale_name="weight_scale"),
        type="fbgemm_fp8:e4m3",
    ),
    Case(
        name="fbgemm-fp8-e5m2",
        config=config("fbgemm_fp8"),
        quantize=functools.partial(quantize, block=(1, 0), type="e5m2", scale_name="weight_scale"),
        type="fbgemm_fp8:e5m2",
    ),
]
