"""The tiny Llama in MXFP4 with the parts that gpt-oss has of its experts' stacks."""

from __future__ import annotations

import numpy as np

from . import float_codes
from .checkpoints import Case, Float32, Module, Rng, is_linear


def quantize(rng: Rng, name: str, weight: Float32) -> Module | None:
    """A matrix where gpt-oss has a stack of them."""
    if not is_linear(name):
        return None
    codes, scale, values = float_codes.quantized_mx(weight, "e2m1")
    blocks = float_codes.pairs(codes).reshape(len(weight), -1, 16)
    return Module(stored={"weight_blocks": blocks, "weight_scales": scale}, values=values)


def config() -> dict[str, object]:
    excluded = ["model.embed_tokens", "lm_head"]
    return {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": excluded}}


CASES = [Case(name="mxfp4", config=config(), quantize=quantize, type="mxfp4:e2m1")]


def stack(rng: Rng, experts: int, rows: int, columns: int) -> tuple[dict[str, np.ndarray], Float32]:
    """What gpt-oss stores of one stack, by the end of its name, and the values `[E, N, K]`."""
    weight = rng.normal(size=(experts, rows, columns)).astype(np.float32)
    codes, scale, values = float_codes.quantized_mx(weight.reshape(-1, columns), "e2m1")
    return {
        "_blocks": float_codes.pairs(codes).reshape(experts, rows, columns // 32, 16),
        "_scales": scale.reshape(experts, rows, columns // 32),
    }, values.reshape(experts, rows, columns)
