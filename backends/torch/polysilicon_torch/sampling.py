"""Sampling on the device: a `SamplingBatch` as tensors, and what comes of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from polysilicon.backend import SamplingBatch, SparseRows
from polysilicon_torch.batches import power_of_two
from polysilicon_torch.runtime import Runtime
from polysilicon_torch.staging import upload


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DeviceSparseRows:
    """`polysilicon.batch.SparseRows`: start int32 `[L + 1]`, ids int32 `[n]`, values float32 or
    int32 `[n]`. longest: entries of the longest row, rounded up to a power of two."""

    start: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor
    longest: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DeviceSamplingBatch:
    """`polysilicon.batch.SamplingBatch` on the device, for L rows.

    draw: bool `[L]`. temperature, top_p, min_p, typical_p, repetition, presence, frequency: float32
    `[L]`. top_k: int32 `[L]`. seed int64, choice and position int32 `[L]`, mask int32
    `[L, ceil(V / 32)]`: the bits of the unsigned ones. targets: int32 `[L]` or None.

    What the host knows of all rows, so that a kernel does only what some row needs:
    samples: some drawn row has a temperature above 0. cuts: some such row has top_k, top_p, min_p
    or typical_p on. typical: some such row has typical_p on.
    """

    draw: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    typical_p: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    seed: torch.Tensor
    choice: torch.Tensor
    position: torch.Tensor
    bias: DeviceSparseRows | None
    counts: DeviceSparseRows | None
    mask: torch.Tensor | None
    targets: torch.Tensor | None
    logprobs: bool
    top_logprobs: int
    samples: bool
    cuts: bool
    typical: bool


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SampledTensors:
    """`polysilicon.batch.SampledTokens` on the device, the same shapes and dtypes."""

    tokens: torch.Tensor
    logprobs: torch.Tensor | None = None
    target_logprobs: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None


def upload_sampling(runtime: Runtime, batch: SamplingBatch) -> DeviceSamplingBatch:
    """A sampling batch on the device; its arrays may be reused at once."""
    arrays: dict[str, npt.NDArray[Any]] = {
        name: np.ascontiguousarray(getattr(batch, name), dtype) for name, dtype in _FIELDS.items()
    }
    for name in ("mask", "targets"):
        if getattr(batch, name) is not None:
            arrays[name] = np.ascontiguousarray(getattr(batch, name))
    for name in ("bias", "counts"):
        rows: SparseRows | None = getattr(batch, name)
        if rows is not None:
            arrays |= {
                f"{name}.start": rows.start,
                f"{name}.ids": rows.ids,
                f"{name}.values": rows.values,
            }
    tensors = upload(runtime, arrays)

    def sparse(rows: SparseRows | None, name: str) -> DeviceSparseRows | None:
        if rows is None:
            return None
        return DeviceSparseRows(
            **{field: tensors[f"{name}.{field}"] for field in ("start", "ids", "values")},
            longest=power_of_two(int(np.diff(rows.start).max(initial=1))),
        )

    sampled = batch.draw & (batch.temperature != 0)
    typical = sampled & (batch.typical_p < 1)
    cut = sampled & ((batch.top_k > 0) | (batch.top_p < 1) | (batch.min_p > 0)) | typical
    return DeviceSamplingBatch(
        **{name: tensors[name] for name in _FIELDS},
        bias=sparse(batch.bias, "bias"),
        counts=sparse(batch.counts, "counts"),
        mask=tensors.get("mask"),
        targets=tensors.get("targets"),
        logprobs=batch.logprobs,
        top_logprobs=batch.top_logprobs,
        samples=bool(sampled.any()),
        cuts=bool(cut.any()),
        typical=bool(typical.any()),
    )


def on_host(batch: DeviceSamplingBatch) -> SamplingBatch:
    """The sampling batch again, of tensors in host memory."""

    def sparse(rows: DeviceSparseRows | None) -> SparseRows | None:
        if rows is None:
            return None
        return SparseRows(
            start=rows.start.numpy(), ids=rows.ids.numpy(), values=rows.values.numpy()
        )

    return SamplingBatch(
        **{name: getattr(batch, name).numpy().view(dtype) for name, dtype in _FIELDS.items()},
        bias=sparse(batch.bias),
        counts=sparse(batch.counts),
        mask=None if batch.mask is None else batch.mask.numpy().view(np.uint32),
        targets=None if batch.targets is None else batch.targets.numpy(),
        logprobs=batch.logprobs,
        top_logprobs=batch.top_logprobs,
    )


_FIELDS: dict[str, type[np.generic]] = {
    "draw": np.bool_,
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "typical_p": np.float32,
    "repetition": np.float32,
    "presence": np.float32,
    "frequency": np.float32,
    "seed": np.uint64,
    "choice": np.uint32,
    "position": np.uint32,
}
"""The arrays that every batch has, as the core gives them."""
