"""The tiny Llama as transformers saves it with torchao."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from .checkpoints import Array, Case, Float32, Module, Rng, is_linear, packed

PREFIX = "_weight_"


def described(kind: str, block: Sequence[int], parts: Sequence[str], **data: Any) -> str:
    """One parameter's entry of a file's metadata."""
    data = {"block_size": list(block), **data}
    return json.dumps({"_type": kind, "_data": data, "_tensor_data_names": list(parts)})


def metadata(stored: Mapping[str, Array], *, kind: str, data: Any) -> dict[str, str]:
    """The file's metadata: of quantised parameters, and of plain ones."""
    made: dict[str, str] = {}
    for name, array in stored.items():
        module, _, part = name.rpartition(".")
        if not part.startswith(PREFIX):
            made[name] = '{"_type": "Tensor"}'
        elif part.endswith("qdata"):
            parts = [n for n in stored if n.startswith(f"{module}.{PREFIX}")]
            names = [n.removeprefix(f"{module}.{PREFIX}") for n in parts]
            scale = stored[f"{module}.{PREFIX}scale"].shape
            shape = array.shape
            if kind == "Int4Tensor":
                shape, scale = (shape[0], 2 * shape[1]), (scale[1], scale[0])
            block = [size // count for size, count in zip(shape, scale, strict=True)]
            made[f"{module}.weight"] = described(kind, block, names, **data)
    return {"format": "pt", "tensor_names": json.dumps(list(made)), **made}


def module(stored: Mapping[str, Array], values: Array) -> Module:
    return Module(
        stored={PREFIX + name: array for name, array in stored.items()},
        values=values.astype(np.float32),
    )


def blocks_of(weight: Float32, rows: int, group: int) -> Array:
    """float64 `[N / rows, K / group, rows, group]`."""
    high, wide = weight.shape
    cut = weight.astype(np.float64).reshape(high // rows, rows, wide // group, group)
    return cut.swapaxes(1, 2)


def whole(blocks: Array) -> Array:
    """The matrix again."""
    high, wide, rows, group = blocks.shape
    return blocks.swapaxes(1, 2).reshape(high * rows, wide * group)


def integers(
    rng: Rng, name: str, weight: Float32, *, bits: int, group: int, rows: int, zeros: Any
) -> Module | None:
    """group, rows: elements of a block along each axis, 0 for all. zeros: dtype of zero points,
    None for none."""
    if not is_linear(name):
        return None
    blocks = blocks_of(weight, rows or weight.shape[0], group or weight.shape[1])
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    if zeros is None:
        scale = np.abs(blocks).max((2, 3)) / -low
        middle = np.zeros(scale.shape)
    else:
        least, most = blocks.min((2, 3)), blocks.max((2, 3))
        scale = (most - least) / (high - low)
        middle = np.round(low - least / scale).clip(low, high)
    # Numbers of few bits, so that all of it is exact in float32.
    scale = scale.astype(ml_dtypes.bfloat16).astype(np.float32)
    step, shift = scale[..., None, None].astype(np.float64), middle[..., None, None]
    codes = np.round(blocks / step + shift).clip(low, high)
    stored: dict[str, Array] = {"qdata": whole(codes).astype(np.int8), "scale": scale}
    if zeros is not None:
        stored["zero_point"] = middle.astype(zeros)
    return module(stored, whole((codes - shift) * step))


def int4(rng: Rng, name: str, weight: Float32, *, group: int, symmetric: bool) -> Module | None:
    if not is_linear(name):
        return None
    blocks = blocks_of(weight, 1, group)[:, :, 0]
    least, most = blocks.min(-1), blocks.max(-1)
    if symmetric:
        most = np.maximum(np.abs(least), most)
        least = -most
    scale = ((most - least) / 15).astype(ml_dtypes.bfloat16)
    step = scale.astype(np.float64)
    zero = np.where(symmetric, 0, least + 8 * step).astype(ml_dtypes.bfloat16)
    shift = zero.astype(np.float64)
    codes = np.round((blocks - shift[..., None]) / step[..., None]).clip(-8, 7).astype(np.int8)
    values = (codes * step[..., None] + shift[..., None]).reshape(weight.shape)
    stored = {
        "qdata": packed(codes.reshape(weight.shape).view(np.uint8) & 15, 4).view(np.int8),
        "scale": scale.T,
        "zero_point": zero.T,
    }
    return module(stored, values)


def float8(rng: Rng, name: str, weight: Float32, *, rows: int) -> Module | None:
    if not is_linear(name):
        return None
    blocks = blocks_of(weight, rows or weight.shape[0], weight.shape[1] if rows < 2 else 32)
    scale = (np.abs(blocks).max((2, 3)) / 448).astype(np.float32)
    codes = (blocks / scale[..., None, None]).astype(ml_dtypes.float8_e4m3fn)
    values = codes.astype(np.float64) * scale[..., None, None]
    return module({"qdata": whole(codes), "scale": scale}, whole(values))


def case(name: str, kind: str, type: str, quantize: Any, ulps: int = 0, **data: Any) -> Case:
    return Case(
        name=f"torchao-{name}",
        config={
            "quantization_config": {
                "quant_method": "torchao",
                "quant_type": {"default": {"_type": "Config", "_data": {}}},
            }
        },
        quantize=quantize,
        type=f"torchao:{type}",
        ulps=ulps,
        metadata=functools.partial(metadata, kind=kind, data=data),
    )


def unpacked(bits: int, zeros: Any, ulps: int = 0) -> Case:
    target = {"target_dtype": {"_type": "torch.dtype", "_data": f"int{bits}"}}
    quantize = functools.partial(integers, bits=bits, group=32, rows=1, zeros=zeros)
    name = f"intx{bits}{'' if zeros is None else '-zeros'}"
    return case(name, "IntxUnpackedToInt8Tensor", f"int{bits}", quantize, ulps, **target)


ROWS = functools.partial(integers, bits=8, group=0, rows=1)
CASES = [
    case("int8-rows", "Int8Tensor", "int8", functools.partial(ROWS, zeros=None)),
    case("int8-rows-zeros", "Int8Tensor", "int8", functools.partial(ROWS, zeros=np.int8)),
    case(
        "int8-whole",
        "Int8Tensor",
        "int8",
        functools.partial(integers, bits=8, group=0, rows=0, zeros=None),
    ),
    unpacked(1, None),
    unpacked(2, np.int8),
    unpacked(3, None),
    unpacked(4, np.int8),
    unpacked(5, None),
    unpacked(6, np.float16),
    unpacked(7, None),
    case("int4", "Int4Tensor", "int4", functools.partial(int4, group=32, symmetric=False), 2),
    case("int4-symmetric", "Int4Tensor", "int4", functools.partial(int4, group=16, symmetric=True)),
    case("float8-rows", "Float8Tensor", "float8", functools.partial(float8, rows=1)),
    case("float8-whole", "Float8Tensor", "float8", functools.partial(float8, rows=0)),
    case("float8-blocks", "Float8Tensor", "float8", functools.partial(float8, rows=32)),
]
