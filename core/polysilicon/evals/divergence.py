"""How one distribution over tokens differs from another."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from polysilicon.batch import Float32

Float64 = npt.NDArray[np.float64]

_LARGEST = float(np.finfo(np.float32).max)
_BLOCK = 1 << 20
"""Logits whose float64 is worked on at a time, so that it stays in the caches."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """By token, `[n]`. logprob, reference: of the token that is there. divergence: Kullback-Leibler
    divergence of the model's distribution from the reference's, `sum p_ref (log p_ref - log p)`, in
    nats, as llama.cpp's. same_top: whether both hold the same token for the likeliest, the lowest
    id of equals; rows without any probability hold none."""

    logprob: Float64
    reference: Float64
    divergence: Float64
    same_top: npt.NDArray[np.bool_]


def compare(logits: Float32, reference: Float32, targets: npt.NDArray[np.int64]) -> Comparison:
    """Compare rows of logits, `[n, V]` each; targets `[n]`: the tokens that are there.

    As in `SamplingBatch` NaN counts as -inf, and +inf as the largest finite float32. A row without
    any probability, all -inf, diverges by infinity.
    """
    rows = max(1, _BLOCK // max(1, logits.shape[1]))
    parts = [
        _compare(
            log_softmax(logits[start : start + rows]),
            log_softmax(reference[start : start + rows]),
            targets[start : start + rows],
        )
        for start in range(0, len(logits), rows)
    ]
    return joined(parts)


def joined(parts: list[Comparison]) -> Comparison:
    """Comparisons one behind the other; at least one."""
    return Comparison(
        **{
            field.name: np.concatenate([getattr(part, field.name) for part in parts])
            for field in dataclasses.fields(Comparison)
        }
    )


def log_softmax(logits: Float32) -> Float64:
    """Log-probabilities of rows of logits, in float64; -inf throughout where every logit is."""
    x: Float64 = logits.astype(np.float64)
    np.nan_to_num(x, copy=False, nan=-np.inf, posinf=_LARGEST, neginf=-np.inf)
    peak = x.max(axis=1, keepdims=True)
    x -= np.where(peak == -np.inf, 0, peak)
    with np.errstate(divide="ignore", under="ignore"):
        total = np.log(np.exp(x).sum(axis=1, keepdims=True))
    x -= np.where(peak == -np.inf, 0, total)
    return x


def _compare(logprobs: Float64, reference: Float64, targets: npt.NDArray[np.int64]) -> Comparison:
    at = np.arange(len(targets))
    with np.errstate(invalid="ignore", under="ignore"):
        p = np.exp(reference)
        terms = p * (reference - logprobs)
    # 0 log 0 is 0.
    terms[p == 0] = 0
    divergence = terms.sum(axis=1)
    divergence[(p == 0).all(axis=1)] = np.inf
    both_have = np.isfinite(logprobs.max(axis=1)) & np.isfinite(reference.max(axis=1))
    return Comparison(
        logprob=logprobs[at, targets],
        reference=reference[at, targets],
        divergence=divergence,
        same_top=both_have & (logprobs.argmax(axis=1) == reference.argmax(axis=1)),
    )


def aligned(
    pieces: Iterator[Float32], reference: Iterator[Float32]
) -> Iterator[tuple[Float32, Float32]]:
    """Pairs of equally many rows from two runs of rows that are equally long in all."""
    ours = theirs = np.empty((0, 0), np.float32)
    while True:
        ours = ours if len(ours) else next(pieces, ours)
        theirs = theirs if len(theirs) else next(reference, theirs)
        count = min(len(ours), len(theirs))
        if not count:
            assert len(ours) == len(theirs)
            return
        yield ours[:count], theirs[:count]
        ours, theirs = ours[count:], theirs[count:]
