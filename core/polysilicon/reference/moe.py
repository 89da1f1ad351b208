"""Which experts a token goes to, and with what weight."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from polysilicon.backend import Routing
from polysilicon.reference.handles import weights_of

Float32 = npt.NDArray[np.float32]


def route(logits: Float32, routing: Routing) -> tuple[npt.NDArray[np.int64], Float32]:
    """Router logits `[T, E]` to experts int64 `[T, top_k]`, best first, and their weights."""
    if routing.scoring == "softmax":
        scores = _softmax(logits)
    elif routing.scoring == "softmax_top_k":
        scores = logits
    elif routing.scoring == "sigmoid":
        scores = np.exp(-np.logaddexp(np.float32(0), -logits))
    else:
        raise ValueError(f"unknown routing {routing.scoring!r}")
    merit = scores
    if routing.correction is not None:
        merit = scores + weights_of(routing.correction)
    if routing.groups > 1:
        merit = _best_groups_only(merit, routing)
    experts = _best_first(merit)[:, : routing.top_k]
    weights = np.take_along_axis(scores, experts, axis=-1)
    if routing.scoring == "softmax_top_k":
        weights = _softmax(weights)
    if routing.renormalize:
        # The smallest normal number keeps a row of vanished sigmoids from dividing zero by zero.
        weights = weights / np.maximum(weights.sum(-1, keepdims=True), np.finfo(np.float32).tiny)
    return experts, weights * np.float32(routing.scale)


def _best_groups_only(merit: Float32, routing: Routing) -> Float32:
    """-inf for the experts outside the best groups."""
    grouped = merit.reshape(len(merit), routing.groups, -1)
    counted = 1 if routing.correction is None else 2
    group_merit = np.sort(grouped, axis=-1)[..., -counted:].sum(axis=-1)
    chosen = _best_first(group_merit)[:, : routing.top_groups]
    outside = np.ones((len(merit), routing.groups), np.bool_)
    np.put_along_axis(outside, chosen, False, axis=-1)
    return np.where(outside[..., None], np.float32(-np.inf), grouped).reshape(merit.shape)


def _best_first(scores: Float32) -> npt.NDArray[Any]:
    return np.argsort(-scores, axis=-1, kind="stable")


def _softmax(x: Float32) -> Float32:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    result: Float32 = weights / weights.sum(axis=-1, keepdims=True)
    return result
