"""The tensors of a KV pool, as the kernels read and write them."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class KVPlanes:
    """k and v: `[layers, pages, heads, page_size, dim]` in the pool's dtype (`dtype`, a key of
    `KV_DTYPES`; int8 as torch.int8, fp8_e4m3 as torch.float8_e4m3fn); k_scale and v_scale: float32
    `[layers, pages, heads, page_size]` for a quantised dtype, else None.

    group: index into `DeviceBatch.page_tables` and `slots`. window: as in `KVSpec`.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    dtype: str
    group: int
    window: int | None
    page_size: int
