"""Paged attention: stores a step's keys and values, then attends through the page tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from polysilicon_torch.specialisation import Specialisation
from polysilicon_torch.target import Target
from polysilicon_torch.triton.attention_kernel import attend_kernel, merge_kernel
from polysilicon_torch.triton.attention_plan import Heads, Launch, plan
from polysilicon_torch.triton.kv_store import codes, prepare
from polysilicon_torch.tuning import Tuning

if TYPE_CHECKING:
    from polysilicon_torch.batches import DeviceBatch
    from polysilicon_torch.kernels import AttentionSettings
    from polysilicon_torch.planes import KVPlanes


def attention(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    batch: DeviceBatch,
    planes: KVPlanes,
    layer: int,
    settings: AttentionSettings,
    *,
    dtype: torch.dtype,
    tuning: Tuning,
) -> torch.Tensor:
    """`Kernels.attention`: q `[T, H * Dh]`, k `[T, Hk * Dh]`, v `[T, Hk * Dv]` of A or float32,
    stride 1 along the last axis, to contiguous `[T, H * Dv]` of A (`dtype`); tokens of padding
    give zeros, and neither they nor the free slots of pages are ever read as context."""
    queries = prepare(
        q,
        k,
        v,
        positions=batch.positions,
        slots=batch.slots[planes.group],
        planes=planes,
        layer=layer,
        settings=settings,
        dtype=dtype,
        tuning=tuning,
    )
    heads = Heads(
        heads=settings.heads,
        key_heads=planes.k.shape[2],
        key_dim=planes.k.shape[4],
        value_dim=planes.v.shape[4],
        page_size=planes.page_size,
        kv=planes.dtype,
        kv_bytes=planes.k.element_size(),
        bytes=dtype.itemsize,
        causal=settings.causal,
    )
    output = torch.empty((len(q), heads.heads * heads.value_dim), dtype=dtype, device=q.device)
    if output.numel():
        for launch in plan(
            heads,
            tokens=len(q),
            sequences=batch.sequences_padded,
            max_query=batch.max_query,
            max_context=batch.max_context,
            tuning=tuning,
        ):
            _attend(launch, queries, output, batch, planes, layer, settings)
    return output


def _attend(
    launch: Launch,
    queries: torch.Tensor,
    output: torch.Tensor,
    batch: DeviceBatch,
    planes: KVPlanes,
    layer: int,
    settings: AttentionSettings,
) -> None:
    tokens, sequences = len(queries), batch.sequences_padded
    partial = statistics = None
    if launch.parts > 1:
        shape = (launch.parts, launch.rows, settings.heads)
        partial = queries.new_empty((*shape, planes.v.shape[4]), dtype=torch.float32)
        statistics = queries.new_empty((2, *shape), dtype=torch.float32)
    tree = batch.tree_mask
    page_table = batch.page_tables[planes.group]
    attend_kernel[(launch.blocks, launch.head_blocks, launch.parts)](
        queries,
        codes(planes.k[layer]),
        codes(planes.v[layer]),
        None if planes.k_scale is None else planes.k_scale[layer],
        None if planes.v_scale is None else planes.v_scale[layer],
        page_table,
        batch.query_start,
        batch.context_len,
        batch.positions,
        None if tree is None else tree.view(torch.uint8),
        settings.sinks,
        output,
        partial,
        statistics,
        settings.scale,
        settings.softcap,
        planes.window,
        queries.stride(0),
        page_table.stride(0),
        0 if tree is None else tree.stride(0),
        tokens,
        sequences,
        **launch.constexprs,
    )
    if partial is not None:
        merge_kernel[(launch.rows, settings.heads)](
            partial,
            statistics,
            batch.query_start,
            settings.sinks,
            output,
            tokens,
            sequences,
            launch.parts,
            **launch.merge_constexprs,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Compiled:
    """A model's heads, and what else of its attention the compilation depends on."""

    model: str
    heads: int
    key_heads: int
    dim: int
    value_dim: int | None = None
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    tree: bool = False
    kv: str = "bf16"


_KV_TYPES = {"f32": "fp32", "f16": "fp16", "bf16": "bf16", "int8": "i8", "fp8_e4m3": "u8"}
_LLAMA_8B = _Compiled(model="Llama-3-8B", heads=32, key_heads=8, dim=128)
_SMOLLM2 = _Compiled(model="SmolLM2-135M", heads=9, key_heads=3, dim=64)
_GEMMA3 = _Compiled(model="Gemma-3-270M", heads=4, key_heads=1, dim=256)
_MODELS = (
    _LLAMA_8B,
    *(dataclasses.replace(_LLAMA_8B, kv=kv) for kv in ("f16", "int8", "fp8_e4m3")),
    dataclasses.replace(_LLAMA_8B, tree=True),
    _SMOLLM2,
    dataclasses.replace(_SMOLLM2, kv="int8"),
    _GEMMA3,
    dataclasses.replace(_GEMMA3, window=True),
    dataclasses.replace(_GEMMA3, window=True, kv="fp8_e4m3"),
    dataclasses.replace(_GEMMA3, kv="int8"),
)
_MORE_MODELS = (
    _Compiled(model="Gemma-2-9B", heads=16, key_heads=8, dim=256, softcap=True, window=True),
    _Compiled(model="gpt-oss-20b", heads=64, key_heads=8, dim=64, sinks=True, window=True),
    _Compiled(model="Phi-3-mini", heads=32, key_heads=32, dim=96),
    _Compiled(model="DeepSeek-V3 latent", heads=128, key_heads=1, dim=576, value_dim=512),
)


def specialisations(target: Target, tuning: Tuning) -> Iterator[Specialisation]:
    """Decode of one sequence and of many, prefill beside it and of a cached prefix."""
    for model in _MODELS:
        yield from _specialisations(model, tuning)


def more_specialisations(target: Target, tuning: Tuning) -> Iterator[Specialisation]:
    for model in _MORE_MODELS:
        yield from _specialisations(model, tuning)


def _specialisations(model: _Compiled, tuning: Tuning) -> Iterator[Specialisation]:
    value_dim = model.value_dim or model.dim
    heads = Heads(
        heads=model.heads,
        key_heads=model.key_heads,
        key_dim=model.dim,
        value_dim=value_dim,
        page_size=16,
        kv=model.kv,
        kv_bytes={"fp32": 4, "fp16": 2, "bf16": 2}.get(_KV_TYPES[model.kv], 1),
        bytes=2,
    )
    kinds = [name for name in ("window", "softcap", "sinks", "tree") if getattr(model, name)]
    title = " ".join([model.model, f"kv={model.kv}", *kinds])
    # (step, sequences, tokens of each)
    steps = [("draft", 8, 8)] if model.tree else [("decode", 1, 1), ("prefill", 1, 8192)]
    plain = not kinds and model.kv == "bf16"
    if plain:
        steps += [("decode of many", 1024, 1), ("cached prefill", 1, 128)]
    for step, sequences, count in steps:
        for launch in plan(
            heads,
            tokens=sequences * count,
            sequences=sequences,
            max_query=count,
            max_context=8192,
            tuning=tuning,
        ):
            yield _attend_specialisation(f"{step} {title}", model, launch)
            if launch.parts > 1 and plain and step == "decode":
                yield _merge_specialisation(f"{step} merge {title}", model, launch)


def _attend_specialisation(name: str, model: _Compiled, launch: Launch) -> Specialisation:
    quantised = model.kv in ("int8", "fp8_e4m3")
    plane = f"*{_KV_TYPES[model.kv]}"
    signature: dict[str, str | None] = {
        "q": "*bf16",
        "key_plane": plane,
        "value_plane": plane,
        "key_scale": "*fp32" if quantised else None,
        "value_scale": "*fp32" if quantised else None,
        "page_table": "*i32",
        "query_start": "*i32",
        "context_len": "*i32",
        "positions": "*i32",
        "tree_mask": "*u8" if model.tree else None,
        "sinks": "*fp32" if model.sinks else None,
        "output": "*bf16",
        "partial": "*fp32" if launch.parts > 1 else None,
        "partial_statistics": "*fp32" if launch.parts > 1 else None,
        "scale": "fp32",
        "softcap": "fp32" if model.softcap else None,
        "window": "i32" if model.window else None,
        "q_stride": "i32",
        "page_table_stride": "i32",
        "tree_stride": "i32",
        "tokens": "i32",
        "sequences": "i32",
    }
    return _specialisation(name, attend_kernel, signature, launch.constexprs)


def _merge_specialisation(name: str, model: _Compiled, launch: Launch) -> Specialisation:
    signature: dict[str, str | None] = {
        "partial": "*fp32",
        "partial_statistics": "*fp32",
        "query_start": "*i32",
        "sinks": "*fp32" if model.sinks else None,
        "output": "*bf16",
        "tokens": "i32",
        "sequences": "i32",
        "parts": "i32",
    }
    return _specialisation(name, merge_kernel, signature, launch.merge_constexprs)


def _specialisation(
    name: str, kernel: Any, signature: dict[str, str | None], choice: Any
) -> Specialisation:
    return Specialisation.of(
        name,
        kernel,
        {key: kind for key, kind in signature.items() if kind is not None},
        {key: None for key, kind in signature.items() if kind is None},
        choice,
        divisible=frozenset({"q_stride"} & signature.keys()),
        decode="prefill" not in name,
    )
