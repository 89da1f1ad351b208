"""The tiny Llama as compressed-tensors stores it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from . import float_codes
from .checkpoints import (
    Array,
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

Quantize = Callable[[Rng, str, Float32], Module | None]
E4M3 = ml_dtypes.float8_e4m3fn


def words(codes: Codes, bits: int, *, straddling: bool = True) -> Array:
    """int32 words of each row's codes: a stream of bits, or as many codes as a word holds whole."""
    if not straddling:
        per_word = 32 // bits
        padded = np.pad(codes.astype(np.uint32), ((0, 0), (0, -codes.shape[1] % per_word)))
        fields = padded.reshape(len(codes), -1, per_word)
        shifted = fields << (np.arange(per_word, dtype=np.uint32) * np.uint32(bits))
        return np.bitwise_or.reduce(shifted, axis=-1).view(np.int32)
    stream = packed(codes, bits)
    return np.pad(stream, ((0, 0), (0, -stream.shape[1] % 4))).view("<i4")


def integers(
    rng: Rng,
    name: str,
    weight: Float32,
    *,
    bits: int,
    group: int = 0,
    symmetric: bool = True,
    straddling: bool = True,
    order: bool = False,
    in_words: bool = True,
    static: bool = False,
    dtype: Any = np.float16,
) -> Module | None:
    """group: 0 for whole rows. in_words: packed, else int8. order: weight_g_idx."""
    if not is_linear(name):
        return None
    columns = weight.shape[1]
    size = group or columns
    inputs = rng.permutation(columns) if order else np.arange(columns)
    index = np.empty(columns, np.int32)
    index[inputs] = np.arange(columns) // size
    sorted_codes, scale, zero = rounded_to_nearest(
        weight[:, inputs], bits, size, symmetric=symmetric, dtype=dtype
    )
    codes, values = np.empty_like(sorted_codes), np.empty_like(weight)
    codes[:, inputs] = sorted_codes
    values[:, inputs] = scaled(sorted_codes, scale, zero, size)
    half = 1 << (bits - 1)
    stored: dict[str, Array] = {"weight_scale": scale}
    if in_words:
        stored["weight_packed"] = words(codes, bits, straddling=straddling)
        stored["weight_shape"] = np.array(weight.shape, np.int64)
        if not symmetric:
            stored["weight_zero_point"] = words(zero.T.copy(), bits, straddling=straddling).T
    else:
        stored["weight"] = (codes.astype(np.int16) - half).astype(np.int8)
        if not symmetric:
            stored["weight_zero_point"] = (zero.astype(np.int16) - half).astype(np.int8)
    if order:
        stored["weight_g_idx"] = index
    if static:
        stored["input_scale"] = np.array([rng.uniform(0.01, 0.02)], np.float32)
        stored["input_zero_point"] = np.zeros(1, np.int8)
    return Module(stored=stored, values=values)


def one_scale(rng: Rng, name: str, weight: Float32) -> Module | None:
    """int8 with one scale and one zero point for the matrix."""
    if not is_linear(name):
        return None
    flat = weight.reshape(1, -1)
    codes, scale, zero = rounded_to_nearest(flat, 8, flat.shape[1], symmetric=False)
    stored = {
        "weight": (codes.astype(np.int16) - 128).astype(np.int8).reshape(weight.shape),
        "weight_scale": scale.reshape(1),
        "weight_zero_point": (zero.astype(np.int16) - 128).astype(np.int8).reshape(1),
    }
    values = scaled(codes, scale, zero, flat.shape[1]).reshape(weight.shape)
    return Module(stored=stored, values=values)


def fp8(
    rng: Rng,
    name: str,
    weight: Float32,
    *,
    block: tuple[int, int],
    static: bool = False,
    dtype: Any = np.float32,
) -> Module | None:
    """block: that shares a scale, 0 for all rows or columns."""
    if not is_linear(name):
        return None
    size = (block[0] or weight.shape[0], block[1] or weight.shape[1])
    scale = (float_codes.largest_of_blocks(weight, size) / 448).astype(dtype)
    spread = float_codes.over_blocks(scale, size, weight.shape).astype(np.float32)
    codes = float_codes.nearest(weight / spread, "e4m3")
    stored: dict[str, Array] = {
        "weight": codes.view(E4M3),
        "weight_scale": scale.reshape(1) if block == (0, 0) else scale,
    }
    if static:
        stored["input_scale"] = np.array([rng.uniform(0.01, 0.02)], np.float32)
    return Module(stored=stored, values=float_codes.scaled(codes, "e4m3", spread))


def mx(rng: Rng, name: str, weight: Float32, *, format: str) -> Module | None:
    """e4m3 as it is, e2m3 as a stream of 6 bits, e2m1 two a byte; under e8m0 by 32."""
    if not is_linear(name):
        return None
    codes, exponents, values = float_codes.quantized_mx(weight, format)
    stored: dict[str, Array] = {"weight_scale": exponents}
    if format == "e4m3":
        stored["weight"] = codes.view(E4M3)
    else:
        stored["weight_packed"] = packed(codes, 6 if format == "e2m3" else 4)
    return Module(stored=stored, values=values)


def nvfp4(rng: Rng, name: str, weight: Float32) -> Module | None:
    """The scale of all divides; a power of two, so that it does not matter when it is rounded."""
    if not is_linear(name):
        return None
    divisor = np.float32(2.0 ** np.floor(np.log2(448 * 6 / np.abs(weight).max())))
    codes, scale, values = float_codes.quantized_nvfp4(weight, float(1 / divisor))
    stored = {
        "weight_packed": codes,
        "weight_scale": scale.view(E4M3),
        "weight_global_scale": divisor.reshape(1),
        "input_global_scale": np.array([100], np.float32),
    }
    return Module(stored=stored, values=values)


def by_name(choices: Mapping[str, Quantize]) -> Quantize:
    """Quantizes a module by the first expression that matches its name."""

    def quantize(rng: Rng, name: str, weight: Float32) -> Module | None:
        for expression, chosen in choices.items():
            if re.match(expression, name):
                return chosen(rng, name, weight)
        return None

    return quantize


def arguments(bits: int, kind: str, strategy: str, **further: Any) -> dict[str, Any]:
    """The arguments of weights or of activations as the library writes them."""
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "group_size": None,
        "strategy": strategy,
        "block_structure": None,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
        "observer_kwargs": {},
        **further,
    }


def group(
    weights: dict[str, Any],
    inputs: dict[str, Any] | None = None,
    targets: tuple[str, ...] = ("Linear",),
    format: str | None = None,
) -> dict[str, Any]:
    return {
        "targets": list(targets),
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        "format": format,
    }


def config(format: str, *groups: dict[str, Any], **further: Any) -> dict[str, Any]:
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": format,
            "quantization_status": "compressed",
            "config_groups": {f"group_{index}": value for index, value in enumerate(groups)},
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
            "sparsity_config": {},
            "transform_config": {},
            "version": "0.12.2",
            **further,
        }
    }


def words_case(
    bits: int, group_size: int, *, symmetric: bool, name: str = "", **options: Any
) -> Case:
    strategy = "group" if group_size else "channel"
    weights = arguments(
        bits, "int", strategy, group_size=group_size or None, symmetric=symmetric,
        actorder="group" if options.get("order") else None,
    )  # fmt: skip
    return Case(
        name=f"ct-int{bits}-{group_size}{'-sym' * symmetric}{name}",
        config=config("pack-quantized", group(weights)),
        quantize=functools.partial(
            integers, bits=bits, group=group_size, symmetric=symmetric, **options
        ),
        type=f"compressed-tensors:int{bits}",
    )


TOKENS = arguments(8, "int", "token", dynamic=True)
STATIC = arguments(8, "int", "tensor")
FLOAT_TOKENS = arguments(8, "float", "token", dynamic=True)
ROWS = arguments(8, "int", "channel")

CASES = [
    words_case(4, 32, symmetric=True),
    words_case(4, 16, symmetric=False, dtype=ml_dtypes.bfloat16),
    words_case(4, 32, symmetric=False, order=True, name="-order"),
    words_case(2, 16, symmetric=True),
    words_case(3, 32, symmetric=False),
    words_case(3, 32, symmetric=False, straddling=False, name="-whole"),
    words_case(5, 0, symmetric=False),
    words_case(6, 32, symmetric=True, straddling=False, order=True, name="-whole"),
    words_case(7, 0, symmetric=True),
    words_case(8, 0, symmetric=True),
    Case(
        name="ct-w8a8",
        config=config("int-quantized", group(ROWS, TOKENS)),
        quantize=functools.partial(integers, bits=8, in_words=False, dtype=ml_dtypes.bfloat16),
        type="compressed-tensors:int8",
    ),
    Case(
        name="ct-w8a8-static",
        config=config("int-quantized", group(ROWS | {"symmetric": False}, STATIC)),
        quantize=functools.partial(integers, bits=8, symmetric=False, in_words=False, static=True),
        type="compressed-tensors:int8",
    ),
    Case(
        name="ct-w8a8-tensor",
        config=config("int-quantized", group(arguments(8, "int", "tensor", symmetric=False))),
        quantize=one_scale,
        type="compressed-tensors:int8",
    ),
    Case(
        name="ct-fp8-static",
        config=config(
            "float-quantized",
            group(arguments(8, "float", "tensor"), arguments(8, "float", "tensor")),
        ),
        quantize=functools.partial(fp8, block=(0, 0), static=True),
        type="compressed-tensors:fp8",
    ),
    Case(
        name="ct-fp8-rows",
        config=config("float-quantized", group(arguments(8, "float", "channel"), FLOAT_TOKENS)),
        quantize=functools.partial(fp8, block=(1, 0), dtype=ml_dtypes.bfloat16),
        type="compressed-tensors:fp8",
    ),
    Case(
        name="ct-fp8-blocks",
        config=config(
            "float-quantized",
            group(arguments(8, "float", "block", block_structure=[48, 32]), FLOAT_TOKENS),
        ),
        quantize=functools.partial(fp8, block=(48, 32)),
        type="compressed-tensors:fp8",
    ),
    Case(
        name="ct-mxfp8",
        config=config("mxfp8-quantized", group(arguments(8, "float", "group", group_size=32))),
        quantize=functools.partial(mx, format="e4m3"),
        type="compressed-tensors:mxfp8",
    ),
    Case(
        name="ct-mxfp6",
        config=config("mxfp6-pack-quantized", group(arguments(6, "float", "group", group_size=32))),
        quantize=functools.partial(mx, format="e2m3"),
        type="compressed-tensors:mxfp6",
    ),
    Case(
        name="ct-mxfp4",
        config=config("mxfp4-pack-quantized", group(arguments(4, "float", "group", group_size=32))),
        quantize=functools.partial(mx, format="e2m1"),
        type="compressed-tensors:mxfp4",
    ),
    Case(
        name="ct-nvfp4",
        config=config(
            "nvfp4-pack-quantized",
            group(
                arguments(4, "float", "tensor_group", group_size=16),
                arguments(4, "float", "tensor_group", group_size=16, dynamic="local"),
            ),
        ),
        quantize=nvfp4,
        type="compressed-tensors:nvfp4",
    ),
    Case(
        name="ct-mixed",
        config=config(
            "mixed-precision",
            group(
                arguments(8, "float", "channel"),
                FLOAT_TOKENS,
                ("re:.*self_attn.*", "model.layers.1.mlp.down_proj"),
                "float-quantized",
            ),
            group(arguments(4, "int", "group", group_size=32), targets=("Linear",)),
            ignore=["lm_head", "re:.*layers\\.0\\.mlp\\.(up|gate)_proj$"],
        ),
        quantize=by_name(
            {
                r".*layers\.0\.mlp\.(up|gate)": lambda rng, name, weight: None,
                r".*(self_attn|1\.mlp\.down)": functools.partial(fp8, block=(1, 0)),
                "": functools.partial(integers, bits=4, group=32),
            }
        ),
        type="compressed-tensors:int4",
    ),
]
