"""Routing to experts in plain torch operations."""

from __future__ import annotations

import torch
from torch.nn import functional

from polysilicon.backend import Routing


def route(
    logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits float32 `[T, E]` to experts int64 `[T, top_k]`, best first, and their weights
    float32, as `Routing` says."""
    if routing.scoring == "softmax":
        scores = logits.softmax(dim=-1)
    elif routing.scoring == "sigmoid":
        scores = functional.logsigmoid(logits).exp()
    else:
        scores = logits
    merit = scores if correction is None else scores + correction
    if routing.groups > 1:
        merit = _best_groups_only(merit, routing, counted=1 if correction is None else 2)
    experts = _best_first(merit)[:, : routing.top_k]
    weights = scores.gather(-1, experts)
    if routing.scoring == "softmax_top_k":
        weights = weights.softmax(dim=-1)
    if routing.renormalize:
        # The smallest normal number keeps a row of vanished sigmoids from dividing zero by zero.
        total = weights.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        weights = weights / total
    return experts, weights * routing.scale


def _best_groups_only(merit: torch.Tensor, routing: Routing, *, counted: int) -> torch.Tensor:
    """-inf for the experts outside the best groups, which are judged by their `counted` best."""
    grouped = merit.unflatten(-1, (routing.groups, -1))
    group_merit = grouped.topk(min(counted, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
    chosen = _best_first(group_merit)[:, : routing.top_groups]
    inside = torch.zeros_like(group_merit, dtype=torch.bool).scatter(-1, chosen, True)
    return grouped.masked_fill(~inside[..., None], -torch.inf).flatten(1)


def _best_first(scores: torch.Tensor) -> torch.Tensor:
    """Indices by falling score, the lower first among equals."""
    return torch.argsort(scores, dim=-1, descending=True, stable=True)
