"""Calibrated scales of fp8 KV, from the names that the tools give them.

llm-compressor has `self_attn.k_scale` and `v_scale`, one number (`[1]`) or one a head
(`[Hk, 1, 1]`), ModelOpt `k_proj.k_scale` and `v_proj.v_scale`, where the projections are one
`qkv_proj.k_scale` and `qkv_proj.v_scale`, AutoFP8 `k_proj.output_scale` and
`v_proj.output_scale`; and what is oldest, `self_attn.kv_scale` for both. In all of them an element
is `scale * decode(code)`.
"""

from __future__ import annotations

import numpy as np

from polysilicon.backend import KVScales
from polysilicon.errors import ModelError
from polysilicon.weights.checkpoint import Checkpoint, SafetensorsCheckpoint
from polysilicon.weights.encodings import Float32
from polysilicon.weights.files import shown

_MEND = "Calibrate the checkpoint again, or choose another --kv-dtype than fp8_e4m3."


def read_kv_scales(checkpoint: Checkpoint, key: str, value: str, *, heads: int) -> KVScales | None:
    """The scales of one layer; None where the checkpoint has none for it, or not of fp8.

    key, value: the modules that project to keys and values, as the checkpoint names them; the same
    one where they are fused. Raises ModelError for scales that cannot be used.
    """
    if not isinstance(checkpoint, SafetensorsCheckpoint):
        return None
    attention = key.rpartition(".")[0]
    names = {
        "k": [f"{attention}.k_scale", f"{key}.k_scale"],
        "v": [f"{attention}.v_scale", f"{value}.v_scale"],
    }
    if key != value:
        names["k"].append(f"{key}.output_scale")
        names["v"].append(f"{value}.output_scale")
    found = {
        part: next((name for name in spellings if name in checkpoint.tensors), None)
        for part, spellings in names.items()
    }
    if found == {"k": None, "v": None}:
        both = f"{attention}.kv_scale"
        found = dict.fromkeys(found, both if both in checkpoint.tensors else None)
    if found == {"k": None, "v": None} or not checkpoint.has_fp8_kv_scales():
        return None
    scales = {}
    for part, name in found.items():
        if name is None:
            raise ModelError(
                f"{checkpoint.path} has scales of KV for {shown(attention)}, but lacks tensor "
                f"{shown(names[part][0])}. {_MEND}"
            )
        scales[part] = tuple(map(float, _values(checkpoint, name, heads)))
    return KVScales(**scales)


def _values(checkpoint: Checkpoint, name: str, heads: int) -> Float32:
    """One for each head."""
    shape = checkpoint.tensors[name].shape
    sizes = [size for size in shape if size != 1]
    if sizes not in ([], [heads]):
        raise ModelError(
            f"{checkpoint.path}: tensor {shown(name)} has shape {list(shape)}, expected one scale, "
            f"or one for each of {heads} heads of keys. {_MEND}"
        )
    values = checkpoint.weight(name).dequantize().reshape(-1)
    with np.errstate(invalid="ignore"):
        usable = np.isfinite(values) & (values >= np.finfo(np.float32).smallest_normal)
    if not usable.all():
        raise ModelError(
            f"{checkpoint.path}: tensor {shown(name)} holds the scale {values[~usable][0]}, which "
            f"is not a positive number. {_MEND}"
        )
    return np.broadcast_to(values, heads)
