"""Sampling on the host: the executable form of `SamplingBatch`'s docstring.

Rows are handled one by one, so that scratch memory stays at a few arrays of one vocabulary row, and
nothing is fully sorted. Only the noise is drawn for many rows at once, because the ids that a cut
leaves are few and Philox has a fixed cost a call.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from polysilicon.batch import Float32, Int32, SampledTokens, SamplingBatch, UInt32
from polysilicon.sampling.philox import (
    GUMBEL_RANGE,
    gumbel,
    keys,
    philox4x32,
    to_gumbel,
    to_uniform,
)

Ids = npt.NDArray[np.int64]

_LARGEST = float(np.finfo(np.float32).max)
_HOPELESS = GUMBEL_RANGE[0] - GUMBEL_RANGE[1] - 0.5
"""An id whose logit lies this far from the best one's cannot win, whatever the noise; the half is
room for rounding."""

_FEW = 512
"""Ids that are sorted rather than halved once more."""

_MANY = 4096
"""Ids whose noise is worth a call of its own."""

_GROUP = 1 << 16
"""Candidates whose noise is drawn in one call."""


def sample_on_host(logits: Float32, batch: SamplingBatch) -> SampledTokens:
    """Sample from float32 `[L, V]` as `SamplingBatch` specifies. Changes none of its arguments."""
    rows, vocabulary = logits.shape
    assert batch.top_logprobs <= vocabulary
    tokens = np.zeros(rows, np.int32)
    peaks, log_totals = np.zeros((2, rows), np.float64)
    top_ids = np.zeros((rows, batch.top_logprobs), np.int32)
    race = _Race(batch, vocabulary, tokens)
    reports = batch.logprobs or batch.targets is not None or batch.top_logprobs > 0
    with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
        for row in range(rows):
            x = _cleaned(logits[row])
            if reports:
                peaks[row], log_totals[row] = _log_sum_exp(x)
            if batch.top_logprobs:
                top_ids[row] = _descending(x, _largest(x, batch.top_logprobs))
            if batch.draw[row]:
                _sample_row(_adjusted(x, batch, row), batch, row, tokens, race)
        race.finish()

        def logprobs(ids: npt.NDArray[np.integer]) -> Float32:
            """Of ids int `[L]` or `[L, n]`, by row."""
            columns = ids if ids.ndim == 2 else ids[:, None]
            x = _cleaned(np.take_along_axis(logits, columns.astype(np.int64), axis=1))
            values = np.where(x == -np.inf, x, (x - peaks[:, None]) - log_totals[:, None])
            return values.astype(np.float32).reshape(ids.shape)

        target_logprobs = None
        if batch.targets is not None:
            wanted = batch.targets >= 0
            target_logprobs = np.where(
                wanted, logprobs(np.where(wanted, batch.targets, 0)), np.float32(0)
            )
        return SampledTokens(
            tokens=tokens,
            logprobs=logprobs(tokens) if batch.logprobs else None,
            target_logprobs=target_logprobs,
            top_ids=top_ids if batch.top_logprobs else None,
            top_logprobs=logprobs(top_ids) if batch.top_logprobs else None,
        )


def _sample_row(x: Float32, batch: SamplingBatch, row: int, tokens: Int32, race: _Race) -> None:
    """Steps 4 to 6 for one row; its token goes into `tokens`, at once or by way of the race."""
    best = int(x.argmax())
    if x[best] == -np.inf:
        best = 0 if batch.mask is None else _first_allowed(batch.mask[row], len(x))
        tokens[row] = best
    elif batch.temperature[row] == 0:
        tokens[row] = best
    else:
        ids, scores = _cut((x - x[best]) / batch.temperature[row], batch, row)
        race.add(row, ids, scores)


def _cleaned(x: Float32) -> Float32:
    """x with NaN as -inf and +inf as the largest finite value; x itself where it has neither."""
    if x.size == 0 or np.isfinite(x.max()):  # max is NaN where any is
        return x
    cleaned: Float32 = np.nan_to_num(x, nan=-np.inf, posinf=_LARGEST, neginf=-np.inf)
    return cleaned


def _log_sum_exp(x: Float32) -> tuple[float, float]:
    """The largest of x, and the logarithm of the sum of `exp(x - largest)`. They are kept apart, as
    their sum would round the second away beside a large first. Zeros for a row at -inf."""
    peak = x.max()
    if peak == -np.inf:
        return 0.0, 0.0
    return float(peak), float(np.log(np.exp(x - peak).sum(dtype=np.float64)))


def _adjusted(x: Float32, batch: SamplingBatch, row: int) -> Float32:
    """Steps 2 and 3: bias, mask, penalties. x itself, unchanged, where the row has none."""
    if batch.bias is None and batch.counts is None and batch.mask is None:
        return x
    x = x.copy()
    if batch.bias is not None:
        ids, bias = batch.bias.row(row)
        x[ids] = _cleaned(x[ids] + bias)
    if batch.mask is not None:
        x[~_unpacked(batch.mask[row], len(x))] = -np.inf
    if batch.counts is not None:
        ids, counts = batch.counts.row(row)
        seen = x[ids]
        repetition = batch.repetition[row]
        seen = np.where(seen > 0, seen / repetition, seen * repetition)
        seen -= batch.frequency[row] * counts.astype(np.float32)
        seen -= batch.presence[row] * (counts > 0)
        x[ids] = _cleaned(seen)
    return x


def _unpacked(mask: UInt32, vocabulary: int) -> npt.NDArray[np.bool_]:
    """One row of the packed mask as bool `[V]`."""
    packed = mask.astype("<u4").view(np.uint8)
    return np.unpackbits(packed, count=vocabulary, bitorder="little").view(np.bool_)


def _first_allowed(mask: UInt32, vocabulary: int) -> int:
    return int(_unpacked(mask, vocabulary).argmax())


def _cut(x: Float32, batch: SamplingBatch, row: int) -> tuple[Ids, Float32]:
    """Step 5: the ids that are left, ascending, and their x, less those that cannot win."""
    top_k, top_p = int(batch.top_k[row]), float(batch.top_p[row])
    min_p, typical_p = float(batch.min_p[row]), float(batch.typical_p[row])
    if 0 < top_k < len(x):
        ids = _largest(x, top_k)
        ids = ids[x[ids] > -np.inf]
    elif top_p < 1 or typical_p < 1:
        ids = np.flatnonzero(x > -np.inf)
    else:
        ids = np.flatnonzero(x >= _HOPELESS)
    x = x[ids]
    if typical_p < 1:
        shifted = x - x.max()
        weight = np.exp(shifted)
        total = weight.sum(dtype=np.float64)
        mean = (weight * shifted).sum(dtype=np.float64) / total
        # |-log p - entropy|: the logarithm of the total is in both and falls out.
        surprise = np.abs(shifted - np.float32(mean))
        kept = _shortest_prefix(surprise, weight, typical_p * total)
        ids, x = ids[kept], x[kept]
    if top_p < 1:
        weight = np.exp(x - x.max())
        kept = _shortest_prefix(-x, weight, top_p * weight.sum(dtype=np.float64))
        ids, x = ids[kept], x[kept]
    floor = x.max() + _HOPELESS
    if min_p > 0:
        floor = max(floor, x.max() + np.log(np.float32(min_p)))
    kept = np.flatnonzero(x >= floor)
    return ids[kept], x[kept]


def _largest(x: Float32, count: int) -> Ids:
    """Indices, ascending, of the `count` largest of x, the lower index first among equals."""
    if count >= len(x):
        return np.arange(len(x))
    bound = np.partition(x, len(x) - count)[len(x) - count]
    kept = np.flatnonzero(x >= bound)
    surplus = len(kept) - count
    if surplus:
        ties = np.flatnonzero(x[kept] == bound)
        kept = np.delete(kept, ties[len(ties) - surplus :])
    return kept


def _descending(x: Float32, ids: Ids) -> Ids:
    """Ascending ids by falling x, the lower id first among equals."""
    return ids[np.argsort(-x[ids], kind="stable")]


def _shortest_prefix(key: Float32, weight: Float32, mass: float) -> Ids:
    """Indices, ascending, of the shortest prefix that weighs at least `mass`, in the order of
    rising key with the lower index first among equals. Never empty."""
    settled: list[Ids] = []
    active = np.arange(len(key))
    while len(active) > _FEW:  # quickselect: halve the ids among which the prefix ends
        keys_left = key[active]
        lower = keys_left < np.partition(keys_left, len(active) // 2)[len(active) // 2]
        if not lower.any():
            break
        below = active[lower]
        mass_below = weight[below].sum(dtype=np.float64)
        if mass_below >= mass:
            active = below
        else:
            settled.append(below)
            mass -= mass_below
            active = active[~lower]
    order = active[np.argsort(key[active], kind="stable")]
    reached = np.cumsum(weight[order], dtype=np.float64)
    length = int(np.searchsorted(reached, mass, side="left")) + 1
    return np.sort(np.concatenate([*settled, order[:length]]))


class _Race:
    """Step 6 for the rows of a batch. Where many ids are left a row is decided at once; rows of few
    are collected and their noise is drawn in one call. Winners go into `tokens`."""

    def __init__(self, batch: SamplingBatch, vocabulary: int, tokens: Int32) -> None:
        self._batch = batch
        self._vocabulary = vocabulary
        self._tokens = tokens
        self._entries: list[tuple[int, Ids, Float32]] = []
        self._size = 0

    def add(self, row: int, ids: Ids, scores: Float32) -> None:
        """ids: ascending, at least one; scores: their x."""
        if len(ids) > max(_MANY, self._vocabulary // 4):  # fewer blocks of noise than ids
            batch = self._batch
            noise = gumbel(
                int(batch.seed[row]),
                int(batch.choice[row]),
                int(batch.position[row]),
                self._vocabulary,
            )
            self._tokens[row] = ids[(scores + noise[ids]).argmax()]
            return
        if self._size + len(ids) > _GROUP:
            self.finish()
        self._entries.append((row, ids, scores))
        self._size += len(ids)

    def finish(self) -> None:
        """Decide all rows that were collected."""
        if not self._entries:
            return
        lengths = np.array([len(ids) for _, ids, _ in self._entries])
        rows = np.repeat(np.array([row for row, _, _ in self._entries]), lengths)
        ids = np.concatenate([ids for _, ids, _ in self._entries])
        counter = np.zeros((len(ids), 4), np.uint32)
        counter[:, 0] = ids >> 2
        counter[:, 1] = self._batch.choice[rows]
        counter[:, 2] = self._batch.position[rows]
        words = philox4x32(counter, keys(self._batch.seed)[rows])
        noise = to_gumbel(to_uniform(words[np.arange(len(ids)), ids & 3]))
        start = 0
        for (row, ids, scores), length in zip(self._entries, lengths, strict=True):
            end = start + length
            self._tokens[row] = ids[(scores + noise[start:end]).argmax()]
            start = end
        self._entries, self._size = [], 0
