"""Which experts a token goes to, and the rows of each expert together, all on the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from polysilicon.backend import Routing
from polysilicon_torch.specialisation import Specialisation
from polysilicon_torch.target import Target
from polysilicon_torch.tuning import Tuning

_TAKEN = tl.constexpr(-(1 << 31))
"""The key of what may not be chosen (any more): below that of -inf, which may."""
_MINUS_INF_KEY = tl.constexpr(-0x7F800001)
_NONE = tl.constexpr(0x7FFFFFFF)
_TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _key(x: tl.tensor) -> tl.tensor:
    """int32 that order as float32 do, equal for equal numbers."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _first_best(key: tl.tensor, index: tl.tensor) -> tl.tensor:
    return tl.min(tl.where(key == tl.max(key, axis=0), index, _NONE), axis=0)


@triton.jit
def _allowed(
    merit: tl.tensor,
    index: tl.tensor,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PAIRS: tl.constexpr,
) -> tl.tensor:
    """Whether each expert stands in one of the best groups: by its two best where PAIRS, or one."""
    SIZE: tl.constexpr = EXPERTS // GROUPS
    own = index // SIZE
    group = tl.arange(0, BLOCK_G)
    merits = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    for number in range(GROUPS):
        inside = tl.where(own == number, merit, float("-inf"))
        best = tl.max(inside, axis=0)
        if PAIRS and SIZE > 1:
            winner = _first_best(_key(inside), index)
            best += tl.max(tl.where(index == winner, float("-inf"), inside), axis=0)
        merits = tl.where(group == number, best, merits)
    keys = tl.where(group < GROUPS, _key(merits), _TAKEN)
    allowed = index < 0
    for _ in range(TOP_GROUPS):
        chosen = _first_best(keys, group)
        keys = tl.where(group == chosen, _TAKEN, keys)
        allowed = allowed | (own == chosen)
    return allowed


@triton.jit
def moe_route_kernel(
    logits: tl.tensor,
    correction: tl.tensor | None,
    experts: tl.tensor,
    weights: tl.tensor,
    stride: tl.tensor,
    scale: tl.tensor,
    SCORING: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
) -> None:
    """One token a program."""
    token = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK_E)
    real = index < EXPERTS
    logit = tl.load(logits + token * stride + index, mask=real, other=float("-inf"))
    logit = logit.to(tl.float32)
    if SCORING == "softmax":
        power = tl.exp(logit - tl.max(logit, axis=0))
        scores = power / tl.sum(power, axis=0)
    elif SCORING == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logit))
    else:
        tl.static_assert(SCORING == "softmax_top_k")
        scores = logit
    merit = scores
    if correction is not None:
        merit += tl.load(correction + index, mask=real, other=0.0)
    merit = tl.where(real, merit, float("-inf"))
    key = _key(merit)
    if GROUPS > 1:
        allowed = _allowed(
            merit, index, EXPERTS, GROUPS, TOP_GROUPS, BLOCK_G, correction is not None
        )
        key = tl.where(allowed, key, _MINUS_INF_KEY)
    key = tl.where(real, key, _TAKEN)
    place = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((BLOCK_K,), tl.int32)
    weight = tl.zeros((BLOCK_K,), tl.float32)
    for number in range(TOP_K):
        best = _first_best(key, index)
        key = tl.where(index == best, _TAKEN, key)
        score = tl.sum(tl.where(index == best, scores, 0.0), axis=0)
        chosen = tl.where(place == number, best, chosen)
        weight = tl.where(place == number, score, weight)
    inside = place < TOP_K
    if SCORING == "softmax_top_k":
        peak = tl.max(tl.where(inside, weight, float("-inf")), axis=0)
        weight = tl.where(inside, tl.exp(weight - peak), 0.0)
        weight = weight / tl.sum(weight, axis=0)
    if RENORMALIZE:
        # The smallest normal number keeps a row of vanished sigmoids from dividing zero by zero.
        weight = weight / tl.maximum(tl.sum(weight, axis=0), _TINY)
    tl.store(experts + token * TOP_K + place, chosen, mask=inside)
    tl.store(weights + token * TOP_K + place, weight * scale, mask=inside)


def route(
    logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None, *, tuning: Tuning
) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits `[T, E]` to experts int32 `[T, top_k]`, best first, and float32 weights.

    Whatever the logits, experts are distinct and in range. correction: float32 `[E]`.
    """
    tokens, count = logits.shape
    shape = (tokens, routing.top_k)
    experts = torch.empty(shape, dtype=torch.int32, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    if tokens:
        moe_route_kernel[(tokens,)](
            logits, correction, experts, weights, logits.stride(0), routing.scale,
            **_route_constants(count, routing), **tuning.pick("moe_route", experts=count),
        )  # fmt: skip
    return experts, weights


def _route_constants(count: int, routing: Routing) -> dict[str, int | str | bool]:
    return {
        "SCORING": routing.scoring,
        "EXPERTS": count,
        "TOP_K": routing.top_k,
        "GROUPS": routing.groups,
        "TOP_GROUPS": routing.top_groups,
        "RENORMALIZE": routing.renormalize,
        "BLOCK_E": triton.next_power_of_2(count),
        "BLOCK_K": triton.next_power_of_2(routing.top_k),
        "BLOCK_G": triton.next_power_of_2(routing.groups),
    }


@triton.jit
def moe_sort_kernel(
    experts: tl.tensor,
    sorted_rows: tl.tensor,
    ends: tl.tensor,
    rows: tl.tensor,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The rows of one expert a program, behind those of the experts before it."""
    expert = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    bins = tl.arange(0, BLOCK_E)
    counts = tl.zeros((BLOCK_E,), tl.int32)
    for start in range(0, rows, BLOCK):
        # Lanes past the end count for the last bin, which stands before no expert.
        chosen = tl.load(experts + start + index, mask=start + index < rows, other=BLOCK_E - 1)
        counts += tl.histogram(chosen, BLOCK_E)
    begin = tl.sum(tl.where(bins < expert, tl.cdiv(counts, BLOCK_M) * BLOCK_M, 0), axis=0)
    end = begin
    for start in range(0, rows, BLOCK):
        row = start + index
        own = (tl.load(experts + row, mask=row < rows, other=-1) == expert).to(tl.int32)
        tl.store(sorted_rows + end + tl.cumsum(own, axis=0) - 1, row, mask=own != 0)
        end += tl.sum(own, axis=0)
    padded = begin + tl.cdiv(end - begin, BLOCK_M) * BLOCK_M
    padding = end + tl.arange(0, BLOCK_M)
    tl.store(sorted_rows + padding, tl.zeros((BLOCK_M,), tl.int32) + rows, mask=padding < padded)
    tl.store(ends + expert, padded)


def sort_by_expert(
    experts: torch.Tensor, count: int, *, tuning: Tuning
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Rows grouped by expert, each group padded to whole tiles of a number of rows, which is
    returned too.

    experts: int32 `[R]`, below `count`. Returns int32 `[capacity]`, the rows of expert 0 in
    order, of expert 1 and so on, R itself standing for padding and nothing sensible past the last
    group; and int32 `[count]`, where each group ends, padding included.
    """
    rows = experts.numel()
    choice = tuning.pick("moe_sort", load=triton.cdiv(rows, count), experts=count)
    block = choice["BLOCK_M"]
    tiles = (rows + min(rows, count) * (block - 1)) // block
    sorted_rows = torch.empty(tiles * block, dtype=torch.int32, device=experts.device)
    ends = torch.empty(count, dtype=torch.int32, device=experts.device)
    moe_sort_kernel[(count,)](experts, sorted_rows, ends, rows, BLOCK_E=_sort_bins(count), **choice)
    return sorted_rows, ends, block


def _sort_bins(count: int) -> int:
    return max(2, int(triton.next_power_of_2(count)))


def specialisations(target: Target, tuning: Tuning) -> Iterator[Specialisation]:
    """The routings of Mixtral, Qwen3 and DeepSeek-V3; the sort for few rows and for many."""
    for name, count, routing, corrected in (
        ("mixtral", 8, Routing(top_k=2), False),
        ("qwen3", 128, Routing(top_k=8), False),
        ("gpt-oss", 32, Routing(top_k=4, scoring="softmax_top_k"), False),
        (
            "deepseek-v3",
            256,
            Routing(top_k=8, scoring="sigmoid", groups=8, top_groups=4, scale=2.5),
            True,
        ),
    ):
        constants = _route_constants(count, routing)
        pointers = {"logits": "*fp32", "experts": "*i32", "weights": "*fp32"}
        if corrected:
            pointers["correction"] = "*fp32"
        signature = pointers | {"stride": "i32", "scale": "fp32"}
        yield Specialisation.of(
            f"moe_route {name}",
            moe_route_kernel,
            _in_order(moe_route_kernel, signature),
            constants if corrected else {**constants, "correction": None},
            tuning.pick("moe_route", experts=count),
            divisible=frozenset({"stride"}),
            decode=True,
        )
        for load in (1, 1024):
            yield Specialisation.of(
                f"moe_sort {name} load={load}",
                moe_sort_kernel,
                dict.fromkeys(("experts", "sorted_rows", "ends"), "*i32") | {"rows": "i32"},
                {"BLOCK_E": _sort_bins(count)},
                tuning.pick("moe_sort", load=load, experts=count),
                decode=load == 1,
            )


def _in_order(kernel: triton.JITFunction, signature: dict[str, str]) -> dict[str, str]:
    return {name: signature[name] for name in kernel.arg_names if name in signature}
