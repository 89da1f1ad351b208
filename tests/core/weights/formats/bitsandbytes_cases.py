"""The tiny Llama as transformers saves it with bitsandbytes."""

from __future__ import annotations

import functools
import json

import numpy as np

from .checkpoints import Case, Float32, Module, Rng, is_linear

# Quantiles of the normal distribution, as the QLoRA paper has them (appendix E).
NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
# A sign and 0, 1/192, 2/3, 1, 1/3, 1/2, 1/6, 1/4.
FP4 = np.array([0, 0.005208333333, 0.66666667, 1, 0.33333333, 0.5, 0.16666667, 0.25], np.float32)
TABLES = {"nf4": NF4, "fp4": np.concatenate([FP4, -FP4])}


def state(kind: str, shape: tuple[int, ...], block: int, **nested: object) -> np.ndarray:
    """The JSON text that says how a parameter is quantised, as bytes."""
    text = json.dumps(
        {
            "quant_type": kind,
            "blocksize": block,
            "dtype": "float16",
            "shape": list(shape),
            **nested,
        }
    )
    return np.frombuffer(text.encode(), np.uint8)


def four_bit(
    rng: Rng, name: str, weight: Float32, *, kind: str, block: int, nested: int
) -> Module | None:
    """nested: scales of a scale of scales, 0 for plain ones."""
    if not is_linear(name):
        return None
    table = TABLES[kind]
    flat = weight.reshape(-1)
    blocks = np.pad(flat, (0, -len(flat) % block)).reshape(-1, block)
    scale = np.abs(blocks).max(1)
    stored: dict[str, np.ndarray] = {}
    if nested:
        # Any table of 256 values will do: the file brings it.
        levels = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        offset = float(np.float32(scale.mean()))
        rest = scale - np.float32(offset)
        groups = np.pad(rest, (0, -len(rest) % nested)).reshape(-1, nested)
        steps = np.maximum(np.abs(groups).max(1), 1e-6).astype(np.float32)
        wide = np.repeat(steps, nested)[: len(rest)]
        codes = np.abs(rest[:, None] / wide[:, None] - levels).argmin(1).astype(np.uint8)
        scale = levels[codes] * wide + np.float32(offset)
        stored = {
            "weight.absmax": codes,
            "weight.nested_absmax": steps,
            "weight.nested_quant_map": levels,
        }
        said = {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": offset}
    else:
        stored, said = {"weight.absmax": scale}, {}
    index = np.abs(blocks[..., None] / scale[:, None, None] - table).argmin(-1)
    values = (table[index] * scale[:, None]).reshape(-1)[: len(flat)].reshape(weight.shape)
    pairs = index.astype(np.uint8).reshape(-1)[: len(flat)].reshape(-1, 2)
    stored |= {
        "weight": (pairs[:, :1] * 16 + pairs[:, 1:]).astype(np.uint8),
        "weight.quant_map": table,
        f"weight.quant_state.bitsandbytes__{kind}": state(kind, weight.shape, block, **said),
    }
    return Module(stored=stored, values=values)


def eight_bit(rng: Rng, name: str, weight: Float32) -> Module | None:
    if not is_linear(name):
        return None
    scale = np.abs(weight).max(1)
    codes = np.round(weight * (127 / scale[:, None])).astype(np.int8)
    return Module(
        stored={"weight": codes, "SCB": scale, "weight_format": np.array(0, np.uint8)},
        values=(codes * scale.astype(np.float64)[:, None] / 127).astype(np.float32),
    )


def four_bit_case(kind: str, block: int, nested: int) -> Case:
    return Case(
        name=f"bitsandbytes-{kind}-{block}{'-nested' * bool(nested)}",
        config={
            "quantization_config": {
                "quant_method": "bitsandbytes",
                "load_in_4bit": True,
                "load_in_8bit": False,
                "bnb_4bit_quant_type": kind,
                "bnb_4bit_use_double_quant": bool(nested),
            }
        },
        quantize=functools.partial(four_bit, kind=kind, block=block, nested=nested),
        type=f"bitsandbytes:{kind}",
    )


CASES = [
    four_bit_case("nf4", 64, 256),
    four_bit_case("nf4", 64, 0),
    four_bit_case("fp4", 32, 16),
    four_bit_case("nf4", 512, 0),
    Case(
        name="bitsandbytes-int8",
        config={"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
        quantize=eight_bit,
        type="bitsandbytes:int8",
        ulps=2,
    ),
]
