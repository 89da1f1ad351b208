"""Sampling as `polysilicon.batch.SamplingBatch` specifies it, without a sort of the vocabulary."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import torch
import triton

from polysilicon_torch.sampling import DeviceSamplingBatch, DeviceSparseRows, SampledTensors
from polysilicon_torch.triton.sampling_cut import cut_kernel
from polysilicon_torch.triton.sampling_draw import LEVELS, choose_kernel, weigh_kernel
from polysilicon_torch.triton.sampling_finish import finish_kernel, top_kernel
from polysilicon_torch.triton.sampling_rows import (
    adjust_kernel,
    bias_kernel,
    penalties_kernel,
    scan_kernel,
)
from polysilicon_torch.tuning import Tuning

_AT_ONCE = 1 << 25
"""Logits whose rows are worked on at once: scratch memory is a few numbers for each."""

_SELECTED = 64
"""Most likely ids that are found one after the other; more of them by a sort."""

_NOTHING = -float("inf")

_Fields = TypeVar("_Fields", DeviceSamplingBatch, SampledTensors)


def sample(logits: torch.Tensor, batch: DeviceSamplingBatch, *, tuning: Tuning) -> SampledTensors:
    """`Kernels.sample`: from float32 `[L, V]`, contiguous. What a row draws depends on that row
    alone: neither on the others nor on their number."""
    rows, vocabulary = logits.shape

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty((rows, *shape), dtype=dtype, device=logits.device)

    n = batch.top_logprobs
    result = SampledTensors(
        tokens=empty(torch.int32),
        logprobs=empty(torch.float32) if batch.logprobs else None,
        target_logprobs=None if batch.targets is None else empty(torch.float32),
        top_ids=empty(torch.int32, n) if n else None,
        top_logprobs=empty(torch.float32, n) if n else None,
    )
    # A multiple of 16 rows, so that the parts of every tensor are as aligned as the whole.
    step = max(_AT_ONCE // vocabulary // 16 * 16, 16)
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        _sample_rows(logits[part], _part(batch, part), _part(result, part), tuning)
    return result


def _part(fields: _Fields, part: slice) -> _Fields:
    """The same of some rows."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(fields):
        value = getattr(fields, field.name)
        if isinstance(value, torch.Tensor):
            changes[field.name] = value[part]
        elif isinstance(value, DeviceSparseRows):
            start = value.start[part.start : part.stop + 1]
            changes[field.name] = dataclasses.replace(value, start=start)
    return dataclasses.replace(fields, **changes)


def _sample_rows(
    logits: torch.Tensor, batch: DeviceSamplingBatch, result: SampledTensors, tuning: Tuning
) -> None:
    rows, vocabulary = logits.shape
    # By the vocabulary alone: the sums of a row then have one order, whatever rows it is among.
    choice = tuning.pick("sampling", vocabulary=vocabulary)
    chunks = triton.cdiv(vocabulary, choice["BLOCK"])
    padded = triton.next_power_of_2(chunks)
    reports = batch.logprobs or batch.targets is not None or batch.top_logprobs > 0

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty((rows, *shape), dtype=dtype, device=logits.device)

    adjusted = _adjusted(logits, batch, tuning)
    best, best_id = empty(torch.float32, chunks), empty(torch.int32, chunks)
    raw_best = empty(torch.float32, chunks) if reports else None
    raw_rest = empty(torch.float32, chunks) if reports else None
    scan_kernel[(rows, chunks)](
        logits, adjusted, best, best_id, raw_best, raw_rest, vocabulary, **choice
    )
    score = score_id = None
    if batch.samples:
        x = logits if adjusted is None else adjusted
        score, score_id = _scores(x, best, batch, tuning)
    peak = empty(torch.float32) if reports else None
    log_total = empty(torch.float32) if reports else None
    finish_kernel[(rows,)](
        logits,
        batch.mask,
        batch.draw,
        batch.temperature,
        best,
        best_id,
        score,
        score_id,
        raw_best,
        raw_rest,
        batch.targets,
        result.tokens,
        result.logprobs,
        result.target_logprobs,
        peak,
        log_total,
        vocabulary,
        0 if batch.mask is None else batch.mask.shape[1],
        chunks,
        CHUNKS=padded,
        **tuning.pick("sampling_row", vocabulary=vocabulary),
    )
    if result.top_ids is None or result.top_logprobs is None:
        return
    if batch.top_logprobs <= _SELECTED:
        top_kernel[(rows,)](
            logits,
            raw_best,
            peak,
            log_total,
            result.top_ids,
            result.top_logprobs,
            vocabulary,
            chunks,
            batch.top_logprobs,
            CHUNKS=padded,
            **choice,
        )
    else:
        assert peak is not None
        assert log_total is not None
        _sort(logits, peak, log_total, result.top_ids, result.top_logprobs)


def _adjusted(
    logits: torch.Tensor, batch: DeviceSamplingBatch, tuning: Tuning
) -> torch.Tensor | None:
    """Logits with bias, mask and penalties; None where the batch has none of them."""
    if batch.bias is None and batch.mask is None and batch.counts is None:
        return None
    rows, vocabulary = logits.shape
    adjusted = torch.empty_like(logits)
    choice = tuning.pick("sampling", vocabulary=vocabulary)
    # The mask may come before the bias: nothing that is added to -inf changes it.
    adjust_kernel[(rows, triton.cdiv(vocabulary, choice["BLOCK"]))](
        logits,
        batch.mask,
        batch.draw,
        adjusted,
        vocabulary,
        0 if batch.mask is None else batch.mask.shape[1],
        **choice,
    )
    choice = tuning.pick("sampling_lists")
    for listed, kernel, parameters in (
        (batch.bias, bias_kernel, ()),
        (batch.counts, penalties_kernel, (batch.repetition, batch.presence, batch.frequency)),
    ):
        if listed is not None and listed.longest:
            kernel[(rows, triton.cdiv(listed.longest, choice["BLOCK"]))](
                adjusted,
                batch.draw,
                listed.start,
                listed.ids,
                listed.values,
                *parameters,
                vocabulary,
                **choice,
            )
    return adjusted


def _scores(
    x: torch.Tensor, best: torch.Tensor, batch: DeviceSamplingBatch, tuning: Tuning
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best score of each chunk of a row, and its id: `[L, chunks]`, of rows that are drawn with
    noise."""
    rows, vocabulary = x.shape
    chunks = best.shape[1]
    padded = triton.next_power_of_2(chunks)
    choice = tuning.pick("sampling", vocabulary=vocabulary)

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty((rows, *shape), dtype=dtype, device=x.device)

    levels: tuple[torch.Tensor | None, ...] = (None, None)
    candidates: tuple[torch.Tensor | None, ...] = (None, None, None, None)
    if batch.cuts:
        levels = (
            empty(torch.int32, chunks, LEVELS.value),
            empty(torch.int64, chunks, LEVELS.value),
        )
        candidates = (
            empty(torch.int32),
            empty(torch.int64),
            empty(torch.int32, vocabulary),
            empty(torch.float32, vocabulary),
        )
        weigh_kernel[(rows, chunks)](
            x,
            best,
            batch.draw,
            batch.temperature,
            batch.top_k,
            batch.top_p,
            batch.typical_p,
            *levels,
            vocabulary,
            CHUNKS=padded,
            **choice,
        )
    score, score_id = empty(torch.float32, chunks), empty(torch.int32, chunks)
    numbers = (batch.top_k, batch.top_p, batch.min_p, batch.typical_p)
    keys = (batch.seed, batch.choice, batch.position)
    choose_kernel[(rows, chunks)](
        x,
        best,
        batch.draw,
        batch.temperature,
        *numbers,
        *keys,
        score,
        score_id,
        *levels,
        *candidates,
        vocabulary,
        CHUNKS=padded,
        **choice,
    )
    if batch.cuts:
        cut_kernel[(rows,)](
            batch.draw,
            batch.temperature,
            *numbers,
            *keys,
            score,
            score_id,
            *candidates,
            vocabulary,
            chunks,
            TYPICAL=batch.typical,
            **tuning.pick("sampling_cut"),
        )
    return score, score_id


def _sort(
    logits: torch.Tensor,
    peak: torch.Tensor,
    log_total: torch.Tensor,
    top_ids: torch.Tensor,
    top_logprobs: torch.Tensor,
) -> None:
    """The most likely ids of every row by a stable sort."""
    largest = torch.finfo(torch.float32).max
    # Adding 0 makes -0 a plain 0.
    x = torch.nan_to_num(logits, nan=_NOTHING, posinf=largest, neginf=_NOTHING).add_(0.0)
    values, order = torch.sort(x, dim=1, descending=True, stable=True)
    count = top_ids.shape[1]
    values = values[:, :count]
    top_ids.copy_(order[:, :count])
    finite = values - peak[:, None] - log_total[:, None]
    top_logprobs.copy_(torch.where(values == _NOTHING, values, finite))
