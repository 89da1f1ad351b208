"""A step's queries, keys and values before attention: norm, rotary embedding, storing in pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from polysilicon_torch.specialisation import Specialisation
from polysilicon_torch.target import Target
from polysilicon_torch.triton.attention_codes import (
    e4m3_codes,
    int8_codes,
    quotients,
    scales,
    turn,
)
from polysilicon_torch.triton.rope import load_head
from polysilicon_torch.tuning import Tuning

if TYPE_CHECKING:
    from polysilicon_torch.kernels import AttentionSettings
    from polysilicon_torch.planes import KVPlanes


@triton.jit
def store_rows(
    x: tl.tensor,
    plane: tl.tensor,
    plane_scale: tl.tensor,
    calibrated: tl.tensor,
    head: tl.tensor,
    row: tl.tensor,
    present: tl.tensor,
    KV: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write float32 `[tokens, BLOCK]` as rows of a plane `[rows, DIM]`, quantised as KV says.

    calibrated: None, or the scales of fp8 by head, which take the place of each row's own.
    """
    element = tl.arange(0, BLOCK)
    target = plane + row[:, None] * DIM + element[None, :]
    mask = present[:, None] & (element < DIM)[None, :]
    if KV == "int8":
        x = turn(x, DIM=DIM, BLOCK=BLOCK)
        scale = scales(x, LARGEST=127.0)
        tl.store(target, int8_codes(quotients(x, scale)), mask=mask)
        tl.store(plane_scale + row, scale, mask=present)
    elif KV == "fp8_e4m3":
        scale = scales(x, LARGEST=448.0)
        if calibrated is not None:
            scale = tl.where(scale == scale, tl.load(calibrated + head), scale)
        quotient = quotients(x, scale)
        if calibrated is not None:
            quotient = tl.clamp(quotient, -448.0, 448.0)
        tl.store(target, e4m3_codes(quotient), mask=mask)
        tl.store(plane_scale + row, scale, mask=present)
    else:
        tl.store(target, x.to(plane.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def prepare_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    queries: tl.tensor,
    key_plane: tl.tensor,
    value_plane: tl.tensor,
    key_scale: tl.tensor,
    value_scale: tl.tensor,
    key_calibrated: tl.tensor,
    value_calibrated: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    turns: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    q_eps: tl.tensor,
    k_eps: tl.tensor,
    rope_scale: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    tokens: tl.tensor,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Grid (blocks of tokens, HEADS + 2 KEY_HEADS): a program serves one head of q, of k or of v.

    HEADS: 0 where q stays as it is. KEY_HEADS: 0 where nothing is stored. Queries for int8 keys are
    turned as those are.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1)
    present = token < tokens
    if head < HEADS:
        if queries is not None:
            x = load_head(
                q + head * KEY_DIM,
                token,
                present,
                positions,
                turns,
                q_weight,
                q_eps,
                rope_scale,
                q_stride,
                DIM=KEY_DIM,
                BLOCK=BLOCK_K,
                ROPE_DIM=ROPE_DIM,
                INTERLEAVED=INTERLEAVED,
            )
            if KV == "int8":
                x = turn(x, DIM=KEY_DIM, BLOCK=BLOCK_K)
            element = tl.arange(0, BLOCK_K)
            rows = queries + (token.to(tl.int64)[:, None] * HEADS + head) * KEY_DIM
            mask = present[:, None] & (element < KEY_DIM)[None, :]
            tl.store(rows + element[None, :], x.to(queries.dtype.element_ty), mask=mask)
    elif k is not None:
        slot = tl.load(slots + token, mask=present, other=0)
        page = (slot // PAGE_SIZE).to(tl.int64) * KEY_HEADS
        offset = slot % PAGE_SIZE
        key_head = head - HEADS
        if key_head < KEY_HEADS:
            x = load_head(
                k + key_head * KEY_DIM,
                token,
                present,
                positions,
                turns,
                k_weight,
                k_eps,
                rope_scale,
                k_stride,
                DIM=KEY_DIM,
                BLOCK=BLOCK_K,
                ROPE_DIM=ROPE_DIM,
                INTERLEAVED=INTERLEAVED,
            )
            row = (page + key_head) * PAGE_SIZE + offset
            store_rows(
                x,
                key_plane,
                key_scale,
                key_calibrated,
                key_head,
                row,
                present,
                KV=KV,
                DIM=KEY_DIM,
                BLOCK=BLOCK_K,
            )
        else:
            value_head = key_head - KEY_HEADS
            x = load_head(
                v + value_head * VALUE_DIM,
                token,
                present,
                positions,
                None,
                None,
                0.0,
                1.0,
                v_stride,
                DIM=VALUE_DIM,
                BLOCK=BLOCK_V,
                ROPE_DIM=0,
                INTERLEAVED=False,
            )
            row = (page + value_head) * PAGE_SIZE + offset
            store_rows(
                x,
                value_plane,
                value_scale,
                value_calibrated,
                value_head,
                row,
                present,
                KV=KV,
                DIM=VALUE_DIM,
                BLOCK=BLOCK_V,
            )


def prepare(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    *,
    positions: torch.Tensor,
    slots: torch.Tensor,
    planes: KVPlanes,
    layer: int,
    settings: AttentionSettings,
    dtype: torch.dtype,
    tuning: Tuning,
) -> torch.Tensor:
    """Norm and rotary embedding of q and k; k and v stored at their slots, unless they are None.

    Gives the queries `[T, H * Dh]` in A (`dtype`), turned for int8 keys: q itself where nothing is
    to be done.
    """
    tokens = len(q)
    key_heads, page_size, key_dim = planes.k.shape[2:]
    value_dim = planes.v.shape[4]
    rope, q_norm, k_norm = settings.rope, settings.q_norm, settings.k_norm
    as_it_is = rope is None and q_norm is None and planes.dtype != "int8" and q.dtype == dtype
    queries = None if as_it_is else torch.empty(q.shape, dtype=dtype, device=q.device)
    programs = (0 if as_it_is else settings.heads) + (0 if k is None else 2 * key_heads)
    if not tokens or not programs:
        return q if queries is None else queries
    choice = tuning.pick(
        "prepare", tokens=tokens, dim=max(key_dim, value_dim), turned=int(planes.dtype == "int8")
    )
    prepare_kernel[(triton.cdiv(tokens, choice["BLOCK_T"]), programs)](
        q,
        k,
        v,
        queries,
        codes(planes.k[layer]),
        codes(planes.v[layer]),
        None if planes.k_scale is None else planes.k_scale[layer],
        None if planes.v_scale is None else planes.v_scale[layer],
        settings.key_scales,
        settings.value_scales,
        positions,
        slots,
        None if rope is None else rope.turns,
        None if q_norm is None else q_norm.weight,
        None if k_norm is None else k_norm.weight,
        0.0 if q_norm is None else q_norm.eps,
        0.0 if k_norm is None else k_norm.eps,
        1.0 if rope is None else rope.scale,
        q.stride(0),
        0 if k is None else k.stride(0),
        0 if v is None else v.stride(0),
        tokens,
        HEADS=0 if as_it_is else settings.heads,
        KEY_HEADS=key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        ROPE_DIM=0 if rope is None else rope.dim,
        INTERLEAVED=rope is not None and rope.interleaved,
        PAGE_SIZE=page_size,
        KV=planes.dtype,
        BLOCK_K=max(16, triton.next_power_of_2(key_dim)),
        BLOCK_V=max(16, triton.next_power_of_2(value_dim)),
        **choice,
    )
    return q if queries is None else queries


def codes(plane: torch.Tensor) -> torch.Tensor:
    """A plane as the kernels take it: e4m3fn as its bytes, for not every target knows the type."""
    return plane.view(torch.uint8) if plane.dtype == torch.float8_e4m3fn else plane


_MODELS = {
    "Llama-3-8B": (32, 8, 128, False),
    "SmolLM2-135M": (9, 3, 64, False),
    "Gemma-3-270M": (4, 1, 256, True),
}
"""Query heads, key heads, their dim, and whether they have norms."""


def specialisations(target: Target, tuning: Tuning) -> Iterator[Specialisation]:
    """Decode of some models, with KV in bf16 and quantised; prefill, and calibrated scales, of the
    first."""
    for model, (heads, key_heads, dim, norms) in _MODELS.items():
        for kv, plane, calibrated in (
            ("bf16", "*bf16", None),
            ("int8", "*i8", None),
            ("fp8_e4m3", "*u8", None),
            ("fp8_e4m3", "*u8", "*fp32"),
        ):
            for step, tokens in (("decode", 1), ("prefill", 8192)):
                if (step == "prefill" or calibrated is not None) and model != "Llama-3-8B":
                    continue
                weight = "*fp32" if norms else None
                scale = None if kv == "bf16" else "*fp32"
                signature = {
                    **dict.fromkeys(("q", "k", "v", "queries"), "*bf16"),
                    **dict.fromkeys(("key_plane", "value_plane"), plane),
                    **dict.fromkeys(("key_scale", "value_scale"), scale),
                    **dict.fromkeys(("key_calibrated", "value_calibrated"), calibrated),
                    **dict.fromkeys(("positions", "slots"), "*i32"),
                    "turns": "*i64",
                    **dict.fromkeys(("q_weight", "k_weight"), weight),
                    **dict.fromkeys(("q_eps", "k_eps", "rope_scale"), "fp32"),
                    **dict.fromkeys(("q_stride", "k_stride", "v_stride", "tokens"), "i32"),
                }
                yield Specialisation.of(
                    f"prepare {step} {model} kv={kv}" + (" calibrated" if calibrated else ""),
                    prepare_kernel,
                    {name: kind for name, kind in signature.items() if kind is not None},
                    {
                        **{name: None for name, kind in signature.items() if kind is None},
                        "HEADS": heads,
                        "KEY_HEADS": key_heads,
                        "KEY_DIM": dim,
                        "VALUE_DIM": dim,
                        "ROPE_DIM": dim,
                        "INTERLEAVED": False,
                        "PAGE_SIZE": 16,
                        "KV": kv,
                        "BLOCK_K": dim,
                        "BLOCK_V": dim,
                    },
                    tuning.pick("prepare", tokens=tokens, dim=dim, turned=int(kv == "int8")),
                    divisible=frozenset({"q_stride", "k_stride", "v_stride"}),
                    decode=step == "decode",
                )
