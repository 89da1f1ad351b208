"""Where exactly top_k, typical_p and top_p cut a row's candidates, and the draw from the rest."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from polysilicon_torch.specialisation import Specialisation
from polysilicon_torch.target import Target
from polysilicon_torch.triton.sampling_draw import (
    by_rank,
    is_cut,
    is_drawn,
    min_p_floor,
    moment_of,
    share,
    weight_of,
)
from polysilicon_torch.triton.sampling_noise import noise_of
from polysilicon_torch.tuning import Tuning


@triton.jit
def _candidates(
    ids: tl.tensor,
    d: tl.tensor,
    start: tl.tensor,
    count: tl.tensor,
    cuts: tl.tuple,
    TYPICAL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """A block of a row's candidates: id, d, the bits of how surprising it is, and whether the cuts
    keep it. cuts: key and id of the last that top_k keeps, of the last that typical_p keeps, and
    the mean of d. TYPICAL: whether typical_p's cut counts."""
    rank_key, rank_id, typical_key, typical_id, mean = cuts
    entries = start + tl.arange(0, BLOCK)
    inside = entries < count
    token = tl.load(ids + entries, mask=inside, other=0)
    distance = tl.load(d + entries, mask=inside, other=0.0)
    kept = inside & _precedes(distance.to(tl.int32, bitcast=True), token, rank_key, rank_id)
    # |-log p - entropy|: the logarithm of the total is in both and falls out.
    surprise = tl.abs(distance - mean).to(tl.int32, bitcast=True)
    if TYPICAL:
        kept &= _precedes(surprise, token, typical_key, typical_id)
    return token, distance, surprise, kept


@triton.jit
def _precedes(key: tl.tensor, token: tl.tensor, last_key: tl.tensor, last: tl.tensor) -> tl.tensor:
    """Whether an id comes before the last one kept or is it: by key, then the lower id first."""
    return (key < last_key) | ((key == last_key) & (token <= last))


@triton.jit
def _last_kept(
    ids: tl.tensor,
    d: tl.tensor,
    count: tl.tensor,
    target: tl.tensor,
    nearest: tl.tensor,
    cuts: tl.tuple,
    BY: tl.constexpr,
    TYPICAL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Key and id of the last of the shortest prefix that weighs at least `target`; a key that no
    float has where all together do not.

    BY: `rank`, every id weighs 1, in order of d; `surprise`; or `d`. The key is the bits of that
    float, which no sign is set in: their order is its own. nearest: the d that weighs 1.
    """
    key = tl.zeros([], tl.int32)
    below = tl.zeros([], tl.int64)
    digits = tl.arange(0, 8)
    # The largest key under which less than the target weighs, three bits after three.
    for step in range(11):
        shift = 30 - 3 * step
        sums = tl.zeros([8], tl.int64)
        for start in range(0, count, BLOCK):
            _, distance, surprise, kept = _candidates(ids, d, start, count, cuts, TYPICAL, BLOCK)
            own, weight = _key_and_weight(distance, surprise, nearest, BY)
            digit = (own >> shift) - (key >> shift)
            counted = kept[:, None] & (digit[:, None] == digits[None, :])
            sums += tl.sum(tl.where(counted, weight[:, None], 0), 0)
        before = below + tl.cumsum(sums, 0) - sums
        highest = tl.max(tl.where(before < target, digits, 0), 0)
        highest = tl.minimum(highest, (0x7FFFFFFF >> shift) - (key >> shift))
        key |= highest << shift
        below = tl.sum(tl.where(digits == highest, before, 0), 0)
    # Among those of that very key the lower ids come first.
    last = tl.full([], -1, tl.int32)
    for start in range(0, count, BLOCK):
        token, distance, surprise, kept = _candidates(ids, d, start, count, cuts, TYPICAL, BLOCK)
        own, weight = _key_and_weight(distance, surprise, nearest, BY)
        equal = kept & (own == key)
        weight = tl.where(equal, weight, 0)
        before = below + tl.cumsum(weight, 0) - weight
        last = tl.maximum(last, tl.max(tl.where(equal & (before < target), token, -1), 0))
        below += tl.sum(weight, 0)
    return key, last


@triton.jit
def _key_and_weight(
    distance: tl.tensor, surprise: tl.tensor, nearest: tl.tensor, BY: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    key = surprise if BY == "surprise" else distance.to(tl.int32, bitcast=True)
    if BY == "rank":  # noqa: SIM108
        weight = tl.full(distance.shape, 1, tl.int64)
    else:
        weight = weight_of(distance - nearest)
    return key, weight


@triton.jit
def cut_kernel(
    draw: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    typical_p: tl.tensor,
    seed: tl.tensor,
    choice: tl.tensor,
    position: tl.tensor,
    score: tl.tensor,
    score_id: tl.tensor,
    candidate_count: tl.tensor,
    candidate_share: tl.tensor,
    candidate_id: tl.tensor,
    candidate_d: tl.tensor,
    vocabulary: tl.tensor,
    chunks: tl.tensor,
    TYPICAL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Cuts a row's candidates and draws among what is left; the winner goes into the row's first
    `score`. TYPICAL: whether any row has typical_p on."""
    row = tl.program_id(0).to(tl.int64)
    if not is_drawn(row, draw, temperature):
        return
    if not is_cut(row, top_k, top_p, typical_p, vocabulary):
        return
    count = tl.load(candidate_count + row)
    if count == 0:
        return
    ids = candidate_id + row * vocabulary
    d = candidate_d + row * vocabulary
    k = tl.load(top_k + row)
    by_typical = tl.load(typical_p + row) < 1.0
    # A key that no float has cuts nothing.
    rank_key = tl.full([], 0x7FFFFFFF, tl.int32)
    rank_id = tl.zeros([], tl.int32)
    typical_key, typical_id = rank_key, rank_id
    last_key, last_id = rank_key, rank_id
    mean = tl.zeros([], tl.float32)
    nearest = mean
    if by_rank(k, vocabulary):
        cuts = (rank_key, rank_id, typical_key, typical_id, mean)
        rank_key, rank_id = _last_kept(
            ids, d, count, k.to(tl.int64), nearest, cuts, "rank", False, BLOCK
        )
    if TYPICAL:  # noqa: SIM102 (the compiler decides this one)
        if by_typical:
            weights = tl.zeros([BLOCK], tl.int64)
            moments = tl.zeros([BLOCK], tl.int64)
            cuts = (rank_key, rank_id, typical_key, typical_id, mean)
            for start in range(0, count, BLOCK):
                _, distance, _, kept = _candidates(ids, d, start, count, cuts, False, BLOCK)
                weights += tl.where(kept, weight_of(distance), 0)
                moments += tl.where(kept, moment_of(distance), 0)
            total = tl.sum(weights, 0)
            mean = (tl.sum(moments, 0).to(tl.float64) / total.to(tl.float64)).to(tl.float32)
            cuts = (rank_key, rank_id, typical_key, typical_id, mean)
            target = share(tl.load(typical_p + row), total)
            typical_key, typical_id = _last_kept(
                ids, d, count, target, nearest, cuts, "surprise", False, BLOCK
            )
            cuts = (rank_key, rank_id, typical_key, typical_id, mean)
            least = tl.full([BLOCK], float("inf"), tl.float32)
            for start in range(0, count, BLOCK):
                _, distance, _, kept = _candidates(ids, d, start, count, cuts, True, BLOCK)
                least = tl.minimum(least, tl.where(kept, distance, float("inf")))
            nearest = tl.min(least, 0)
    part = tl.load(top_p + row)
    cuts = (rank_key, rank_id, typical_key, typical_id, mean)
    if part < 1.0:
        target = tl.load(candidate_share + row)
        if by_rank(k, vocabulary) | by_typical:
            weights = tl.zeros([BLOCK], tl.int64)
            for start in range(0, count, BLOCK):
                _, distance, _, kept = _candidates(ids, d, start, count, cuts, TYPICAL, BLOCK)
                weights += tl.where(kept, weight_of(distance - nearest), 0)
            target = share(part, tl.sum(weights, 0))
        last_key, last_id = _last_kept(ids, d, count, target, nearest, cuts, "d", TYPICAL, BLOCK)
    floor = min_p_floor(tl.load(min_p + row), nearest)
    row_seed = tl.load(seed + row)
    row_choice = tl.load(choice + row)
    row_position = tl.load(position + row)
    highest = tl.full([], -float("inf"), tl.float32)
    winner = tl.zeros([], tl.int32)
    for start in range(0, count, BLOCK):
        token, distance, _, kept = _candidates(ids, d, start, count, cuts, TYPICAL, BLOCK)
        kept &= _precedes(distance.to(tl.int32, bitcast=True), token, last_key, last_id)
        kept &= -distance >= floor
        scores = -distance + noise_of(token, row_seed, row_choice, row_position)
        scores = tl.where(kept, scores, -float("inf"))
        own = tl.max(scores, 0)
        if own > highest:
            highest = own
            winner = tl.min(tl.where(scores == own, token, 0x7FFFFFFF), 0)
    tl.store(score + row * chunks, highest)
    tl.store(score_id + row * chunks, winner)


def specialisations(target: Target, tuning: Tuning) -> Iterator[Specialisation]:
    """With and without typical_p."""
    for typical in (False, True):
        yield Specialisation.of(
            "cut" + (" typical" if typical else ""),
            cut_kernel,
            {"draw": "*i1", "temperature": "*fp32", "top_k": "*i32"}
            | dict.fromkeys(("top_p", "min_p", "typical_p"), "*fp32")
            | {"seed": "*i64", "choice": "*i32", "position": "*i32"}
            | {"score": "*fp32", "score_id": "*i32"}
            | {"candidate_count": "*i32", "candidate_share": "*i64"}
            | {"candidate_id": "*i32", "candidate_d": "*fp32"}
            | {"vocabulary": "i32", "chunks": "i32"},
            {"TYPICAL": typical},
            tuning.pick("sampling_cut"),
            divisible=frozenset({"vocabulary"}),
            decode=True,
        )
