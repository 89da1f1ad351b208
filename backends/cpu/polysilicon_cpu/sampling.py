"""Sampling on the device."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from polysilicon.backend import SampledTokens, SamplingBatch, SparseRows
from polysilicon_cpu import library
from polysilicon_cpu.arrays import Array, address
from polysilicon_cpu.calls import Call

if TYPE_CHECKING:
    from polysilicon_cpu.device import CPUDevice
    from polysilicon_cpu.program import PendingStep


class CPUPendingTokens(Call):
    """A step's sampled tokens. tokens: int32 `[L]`, there once the call has ended."""

    def __init__(self, device: CPUDevice, ticket: int, sampled: SampledTokens) -> None:
        super().__init__(device, ticket)
        self.sampled = sampled

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        return self.sampled.tokens

    def result(self) -> SampledTokens:
        self.wait()
        return self.sampled


def sample(device: CPUDevice, pending: PendingStep, batch: SamplingBatch) -> CPUPendingTokens:
    """Submit the sampling of a step's logits."""
    kept: list[Array] = []

    def pointer(array: Array, dtype: type[np.generic]) -> int:
        kept.append(np.ascontiguousarray(array, dtype))
        return address(kept[-1])

    def sparse(rows: SparseRows | None, dtype: type[np.generic]) -> library.SparseView:
        if rows is None:
            return library.SparseView()
        return library.SparseView(
            pointer(rows.start, np.int32), pointer(rows.ids, np.int32), pointer(rows.values, dtype)
        )

    logits = pending.logits
    rows, vocabulary = logits.shape
    if len(batch.draw) != rows:
        raise ValueError(f"a sampling batch of {len(batch.draw)} rows for {rows} rows of logits")
    top = batch.top_logprobs
    if not 0 <= top <= vocabulary:
        raise ValueError(f"top_logprobs is at most the vocabulary's {vocabulary}, got {top}")
    sampled = SampledTokens(
        tokens=np.zeros(rows, np.int32),
        logprobs=np.zeros(rows, np.float32) if batch.logprobs else None,
        target_logprobs=None if batch.targets is None else np.zeros(rows, np.float32),
        top_ids=np.zeros((rows, top), np.int32) if top else None,
        top_logprobs=np.zeros((rows, top), np.float32) if top else None,
    )
    view = library.SamplingView(
        rows=rows,
        vocabulary=vocabulary,
        logits=address(logits),
        draw=pointer(batch.draw, np.bool_),
        temperature=pointer(batch.temperature, np.float32),
        top_k=pointer(batch.top_k, np.int32),
        top_p=pointer(batch.top_p, np.float32),
        min_p=pointer(batch.min_p, np.float32),
        typical_p=pointer(batch.typical_p, np.float32),
        repetition=pointer(batch.repetition, np.float32),
        presence=pointer(batch.presence, np.float32),
        frequency=pointer(batch.frequency, np.float32),
        seed=pointer(batch.seed, np.uint64),
        choice=pointer(batch.choice, np.uint32),
        position=pointer(batch.position, np.uint32),
        bias=sparse(batch.bias, np.float32),
        counts=sparse(batch.counts, np.int32),
        mask=None if batch.mask is None else pointer(batch.mask, np.uint32),
        targets=None if batch.targets is None else pointer(batch.targets, np.int32),
        top_count=top,
        tokens=address(sampled.tokens),
        logprobs=_result(sampled.logprobs),
        target_logprobs=_result(sampled.target_logprobs),
        top_ids=_result(sampled.top_ids),
        top_logprobs=_result(sampled.top_logprobs),
    )
    ticket = library.load().ps_sample(device.pointer, ctypes.byref(view), pending.ticket)
    call = CPUPendingTokens(device, ticket, sampled)
    call.kept = (pending, *kept)
    device.in_flight.add(call)
    return call


def _result(array: Array | None) -> int | None:
    return None if array is None else address(array)
