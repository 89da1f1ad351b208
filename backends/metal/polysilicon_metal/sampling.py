"""Sampling on the device, in the steps that `SamplingBatch` numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from polysilicon.backend import SampledTokens, SamplingBatch, SparseRows
from polysilicon_metal.arrays import bucket, padded, to_host
from polysilicon_metal.philox import gumbel
from polysilicon_metal.queue import Stage

if TYPE_CHECKING:
    from polysilicon_metal.device import MetalDevice
    from polysilicon_metal.program import PendingStep

_LARGEST = float(np.finfo(np.float32).max)
Inputs = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a batch asks for at all: sampling is compiled for each combination."""

    draws: bool
    top_k: bool
    top_p: bool
    min_p: bool
    typical_p: bool
    bias: bool
    counts: bool
    mask: bool
    targets: bool
    logprobs: bool
    top_logprobs: int

    @classmethod
    def of(cls, batch: SamplingBatch) -> Wishes:
        drawn = batch.draw & (batch.temperature != 0)
        return cls(
            draws=bool(drawn.any()),
            top_k=bool((batch.top_k[drawn] > 0).any()),
            top_p=bool((batch.top_p[drawn] < 1).any()),
            min_p=bool((batch.min_p[drawn] > 0).any()),
            typical_p=bool((batch.typical_p[drawn] < 1).any()),
            bias=batch.bias is not None,
            counts=batch.counts is not None,
            mask=batch.mask is not None,
            targets=batch.targets is not None,
            logprobs=batch.logprobs,
            top_logprobs=batch.top_logprobs,
        )


class MetalPendingTokens:
    """A step's sampled tokens. tokens: int32 `[L]` on the device, L a bucket of `rows`."""

    def __init__(
        self, device: MetalDevice, stage: Stage, outputs: dict[str, mx.array], *, rows: int
    ) -> None:
        self.tokens = outputs["tokens"]
        self.rows = rows
        self._device = device
        self._stage = stage
        self._outputs = outputs

    def result(self) -> SampledTokens:
        self._device.wait(self._stage)
        with self._device.active():
            found = {name: to_host(array)[: self.rows] for name, array in self._outputs.items()}
        return SampledTokens(**found)


class Sampler:
    """Samples for one device."""

    def __init__(self) -> None:
        self._compiled: dict[Wishes, Any] = {}

    def __call__(
        self, device: MetalDevice, pending: PendingStep, batch: SamplingBatch
    ) -> MetalPendingTokens:
        rows, vocabulary = pending.rows, pending.logits.shape[1]
        if len(batch.draw) != rows:
            raise ValueError(f"a sampling batch of {len(batch.draw)} rows for {rows} of logits")
        if not 0 <= batch.top_logprobs <= vocabulary:
            raise ValueError(
                f"top_logprobs is at most the vocabulary's {vocabulary}, got {batch.top_logprobs}"
            )
        wishes = Wishes.of(batch)
        if wishes not in self._compiled:
            self._compiled[wishes] = device.compiled(
                lambda logits, inputs: _sample(logits, inputs, wishes)
            )
        inputs = _inputs(batch, wishes, pending.logits.shape[0], vocabulary)
        outputs = self._compiled[wishes](pending.logits, inputs)
        stage = device.queue.add(Stage(arrays=list(outputs.values()), writes=False))
        return MetalPendingTokens(device, stage, outputs, rows=rows)


def _inputs(batch: SamplingBatch, wishes: Wishes, size: int, vocabulary: int) -> Inputs:
    """The arrays that the wishes need, padded to `size` rows."""

    def rows(values: npt.NDArray[Any], fill: int = 0) -> mx.array:
        return mx.array(padded(values, size, fill))

    inputs: Inputs = {}
    if wishes.draws:
        inputs["temperature"] = rows(batch.temperature)
        inputs["seed"] = (
            rows((batch.seed & np.uint64(0xFFFFFFFF)).astype(np.uint32)),
            rows((batch.seed >> np.uint64(32)).astype(np.uint32)),
        )
        inputs["choice"], inputs["position"] = rows(batch.choice), rows(batch.position)
    for name in ("top_k", "top_p", "min_p", "typical_p"):
        if getattr(wishes, name):
            inputs[name] = rows(getattr(batch, name))
    if batch.bias is not None:
        inputs["bias"] = _sparse(batch.bias, size, vocabulary)
    if batch.counts is not None:
        inputs["counts"] = _sparse(batch.counts, size, vocabulary)
        for name in ("repetition", "presence", "frequency"):
            inputs[name] = rows(getattr(batch, name))
    if batch.mask is not None:
        inputs["mask"] = rows(batch.mask)
    if batch.targets is not None:
        inputs["targets"] = rows(batch.targets, -1)
    return inputs


def _sparse(lists: SparseRows, size: int, vocabulary: int) -> tuple[mx.array, mx.array, mx.array]:
    """Rows, places in `[size * V]` and values of sparse lists; padded with a place behind all."""
    count = len(lists.ids)
    row = np.repeat(np.arange(len(lists.start) - 1, dtype=np.int32), np.diff(lists.start))
    place = row.astype(np.int64) * vocabulary + lists.ids
    length = bucket(count)
    return (
        mx.array(padded(row, length)),
        mx.array(padded(place, length, size * vocabulary)),
        mx.array(padded(np.asarray(lists.values, np.float32), length)),
    )


def _sample(logits: mx.array, inputs: Inputs, wishes: Wishes) -> dict[str, mx.array]:
    """Logits `[L, V]` to the arrays of `SampledTokens`."""
    x = _cleaned(logits)
    outputs = {"tokens": _draw(_adjusted(x, inputs, wishes), inputs, wishes).astype(mx.int32)}
    if not (wishes.logprobs or wishes.targets or wishes.top_logprobs):
        return outputs
    peak = x.max(axis=-1, keepdims=True)
    finite_peak = mx.where(peak == -mx.inf, 0.0, peak)
    total = mx.log(mx.exp(x - finite_peak).sum(axis=-1, keepdims=True))

    def logprobs(ids: mx.array) -> mx.array:
        values = mx.take_along_axis(x, ids, axis=-1)
        return mx.where(values == -mx.inf, values, (values - finite_peak) - total)

    if wishes.logprobs:
        outputs["logprobs"] = logprobs(outputs["tokens"][:, None])[:, 0]
    if wishes.targets:
        targets = inputs["targets"]
        values = logprobs(mx.maximum(targets, 0)[:, None])[:, 0]
        outputs["target_logprobs"] = mx.where(targets < 0, 0.0, values)
    if wishes.top_logprobs:
        ids = _descending(x, wishes.top_logprobs).astype(mx.int32)
        outputs["top_ids"] = ids
        outputs["top_logprobs"] = logprobs(ids)
    return outputs


def _cleaned(x: mx.array) -> mx.array:
    """x with NaN as -inf and +inf as the largest finite value."""
    return mx.where(mx.isnan(x), -mx.inf, mx.minimum(x, _LARGEST))


def _adjusted(x: mx.array, inputs: Inputs, wishes: Wishes) -> mx.array:
    """Steps 2 and 3: bias, mask, penalties."""
    if wishes.bias:
        _, places, bias = inputs["bias"]
        x = _changed(x, places, lambda values: _cleaned(values + bias))
    if wishes.mask:
        x = mx.where(_allowed(inputs, x.shape[1]), x, -mx.inf)
    if wishes.counts:
        rows, places, counts = inputs["counts"]

        def penalised(seen: mx.array) -> mx.array:
            repetition = inputs["repetition"][rows]
            seen = mx.where(seen > 0, seen / repetition, seen * repetition)
            seen = seen - inputs["frequency"][rows] * counts
            return _cleaned(seen - mx.where(counts > 0, inputs["presence"][rows], 0.0))

        x = _changed(x, places, penalised)
    return x


def _changed(x: mx.array, places: mx.array, change: Callable[[mx.array], mx.array]) -> mx.array:
    """x with what stands at flat places replaced; a place behind the last is nobody's."""
    flat = mx.concatenate([x.reshape(-1), mx.zeros(1)])
    flat[places] = change(flat[places])
    return flat[: x.size].reshape(x.shape)


def _allowed(inputs: Inputs, vocabulary: int) -> mx.array:
    """The packed mask as bool `[L, V]`."""
    words: mx.array = inputs["mask"]
    bits = (words[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & mx.array(1, dtype=mx.uint32)
    return bits.reshape(words.shape[0], -1)[:, :vocabulary].astype(mx.bool_)


def _draw(x: mx.array, inputs: Inputs, wishes: Wishes) -> mx.array:
    """Steps 4 to 6, and the rows that are -inf throughout: tokens `[L]`."""
    best = mx.argmax(x, axis=-1)
    peak = x.max(axis=-1, keepdims=True)
    empty = peak[:, 0] == -mx.inf
    tokens = best
    if wishes.draws:
        hot = inputs["temperature"] != 0
        temperature = mx.where(hot, inputs["temperature"], 1.0)[:, None]
        scaled = (x - mx.where(peak == -mx.inf, 0.0, peak)) / temperature
        noise = gumbel(inputs["seed"], inputs["choice"], inputs["position"], x.shape[1])
        kept = _cut(scaled, inputs, wishes)
        tokens = mx.where(hot, mx.argmax(kept + noise, axis=-1), best)
    fallback = mx.zeros_like(tokens)
    if wishes.mask:
        fallback = mx.argmax(_allowed(inputs, x.shape[1]).astype(mx.uint8), axis=-1)
    return mx.where(empty, fallback, tokens)


def _cut(x: mx.array, inputs: Inputs, wishes: Wishes) -> mx.array:
    """Step 5: x with -inf for the ids that are cut."""
    vocabulary = x.shape[1]
    if wishes.top_k or wishes.top_p:
        order = _descending(x, vocabulary)
    if wishes.top_k:
        top_k = inputs["top_k"][:, None]
        kept = _by_id((mx.arange(vocabulary) < top_k) | (top_k <= 0), order)
        x = mx.where(kept, x, -mx.inf)
    if wishes.typical_p:
        shifted = x - x.max(axis=-1, keepdims=True)
        weight = mx.exp(shifted)
        total = weight.sum(axis=-1, keepdims=True)
        mean = mx.where(weight > 0, weight * shifted, 0.0).sum(axis=-1, keepdims=True) / total
        # |-log p - entropy|: the logarithm of the total is in both and falls out.
        surprise = mx.where(x > -mx.inf, mx.abs(shifted - mean), mx.inf)
        by_surprise = _descending(-surprise, vocabulary)
        x = mx.where(_shortest_prefix(by_surprise, weight, inputs["typical_p"]), x, -mx.inf)
    if wishes.top_p:
        weight = mx.exp(x - x.max(axis=-1, keepdims=True))
        x = mx.where(_shortest_prefix(order, weight, inputs["top_p"]), x, -mx.inf)
    if wishes.min_p:
        min_p = inputs["min_p"][:, None]
        floor = x.max(axis=-1, keepdims=True) + mx.log(min_p)
        x = mx.where((x >= floor) | (min_p <= 0), x, -mx.inf)
    return x


def _shortest_prefix(order: mx.array, weight: mx.array, share: mx.array) -> mx.array:
    """bool `[L, V]`: the ids of the shortest prefix, in this order, that weighs at least `share`
    of all, at least one; every id where the share is 1."""
    reached = mx.cumsum(mx.take_along_axis(weight, order, axis=-1), axis=-1)
    before = mx.concatenate([mx.zeros((weight.shape[0], 1)), reached[:, :-1]], axis=-1)
    own = share[:, None]
    kept = (before < own * reached[:, -1:]) | (own >= 1) | (mx.arange(weight.shape[1]) == 0)
    return _by_id(kept, order)


def _by_id(kept: mx.array, order: mx.array) -> mx.array:
    """What stands by rank, by id."""
    return mx.put_along_axis(mx.zeros_like(kept), order, kept, axis=-1)


def _descending(x: mx.array, count: int) -> mx.array:
    """The `count` first ids of each row by falling x, the lower id first among equals: uint32.

    Sorted are whole numbers of 64 bits, x in the high half and the id in the low: no two are equal.
    """
    bits = mx.where(x == 0, 0.0, x).view(mx.uint32)
    top = mx.array(0x80000000, dtype=mx.uint32)
    rising = mx.where(bits >= top, ~bits, bits | top)
    ids = mx.arange(x.shape[1], dtype=mx.uint32).astype(mx.uint64)
    keys = ((~rising).astype(mx.uint64) << mx.array(32, dtype=mx.uint64)) | ids
    if count < x.shape[1]:
        keys = mx.partition(keys, count - 1, axis=-1)[:, :count]
    return (mx.sort(keys, axis=-1) & mx.array(0xFFFFFFFF, dtype=mx.uint64)).astype(mx.uint32)
