"""The tiny Llama as it is, its matrices in each dtype of plain numbers."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

from .checkpoints import Case, Float32, Module, Rng


def rounded(rng: Rng, name: str, weight: Float32, *, dtype: Any) -> Module:
    stored = weight.astype(dtype)
    return Module(stored={"weight": stored}, values=stored.astype(np.float32))


CASES = [
    Case(
        name=f"dense-{type.lower()}",
        config={},
        quantize=functools.partial(rounded, dtype=dtype),
        type=type,
    )
    for type, dtype in {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}.items()
]
