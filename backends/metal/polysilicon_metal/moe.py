"""Which experts a token goes to, and with what weight."""

from __future__ import annotations

import mlx.core as mx

from polysilicon.backend import Routing
from polysilicon_metal.handles import vector_of

_TINY = 2.0**-126
"""Keeps a row of vanished sigmoids from dividing zero by zero."""


def route(logits: mx.array, routing: Routing) -> tuple[mx.array, mx.array]:
    """Router logits float32 `[T, E]` to experts int32 `[T, top_k]`, best first, and their weights.
    Raises ValueError for an unknown scoring."""
    if routing.scoring == "softmax":
        scores = mx.softmax(logits, axis=-1, precise=True)
    elif routing.scoring == "softmax_top_k":
        scores = logits
    elif routing.scoring == "sigmoid":
        scores = mx.sigmoid(logits)
    else:
        raise ValueError(f"unknown routing {routing.scoring!r}")
    merit = scores
    if routing.correction is not None:
        merit = scores + vector_of(routing.correction, "the correction", logits.shape[-1])
    if routing.groups > 1:
        merit = _best_groups_only(merit, routing)
    experts = best_first(merit, routing.top_k)
    weights = mx.take_along_axis(scores, experts, axis=-1)
    if routing.scoring == "softmax_top_k":
        weights = mx.softmax(weights, axis=-1, precise=True)
    if routing.renormalize:
        weights = weights / mx.maximum(weights.sum(axis=-1, keepdims=True), _TINY)
    return experts, weights * routing.scale


def best_first(scores: mx.array, count: int) -> mx.array:
    """The places of the `count` largest of each row, the lower place first among equals: int32
    `[T, count]`. A largest one at a time, since MLX does not say that its sort keeps the order of
    equals, and `argmax` takes the first."""
    chosen = []
    places = mx.arange(scores.shape[-1])[None]
    for _ in range(count):
        best = mx.argmax(scores, axis=-1, keepdims=True)
        scores = mx.where(places == best, -mx.inf, scores)
        chosen.append(best)
    return mx.concatenate(chosen, axis=-1).astype(mx.int32)


def _best_groups_only(merit: mx.array, routing: Routing) -> mx.array:
    """-inf for the experts outside the best groups."""
    grouped = merit.reshape(merit.shape[0], routing.groups, -1)
    counted = 1 if routing.correction is None else 2
    totals = mx.sort(grouped, axis=-1)[..., -counted:].sum(axis=-1)
    chosen = best_first(totals, routing.top_groups)
    groups = mx.arange(routing.groups)[None, :, None]
    inside = (chosen[:, None, :] == groups).any(axis=-1)
    return mx.where(inside[..., None], grouped, -mx.inf).reshape(merit.shape)
