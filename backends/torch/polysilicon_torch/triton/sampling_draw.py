"""Drawing with noise: a race among all ids, or among those that top_k, typical_p and top_p leave.

With `d = (max(x) - x) / temperature`, an id weighs `exp(-d)`, as an integer in units of 2^-42, so
that sums of weights are exact: they depend neither on the order of addition nor on block sizes.
Rows that are cut go through three kernels. `weigh_kernel` counts and weighs the ids of each chunk
that lie nearer the best one than each of eight distances; `choose_kernel` gathers those within the
least distance that holds what can be kept; `cut_kernel`, one program a row, finds among them where
exactly each cut falls, bit by bit of the float's order, and draws. Other rows race in
`choose_kernel`.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from polysilicon_torch.specialisation import Specialisation
from polysilicon_torch.target import Target
from polysilicon_torch.triton.sampling_noise import logarithm, noise_from
from polysilicon_torch.triton.sampling_rows import VOCABULARIES, load_row
from polysilicon_torch.tuning import Tuning

LEVELS = tl.constexpr(8)
"""Distances by which candidates are gathered."""


@triton.jit
def level_distance(level: tl.tensor) -> tl.tensor:
    """0.5, 1.5, 3, 5, 7.5, 10.5, 14, infinite."""
    distance = ((level + 1) * (level + 2)).to(tl.float32) * 0.25
    return tl.where(level == 7, float("inf"), distance)


@triton.jit
def weight_of(d: tl.tensor) -> tl.tensor:
    """`exp(-d)` in units of 2^-42: sums of 2^20 of them fit int64."""
    return (tl.exp(-d) * 4398046511104.0).to(tl.int64)


@triton.jit
def moment_of(d: tl.tensor) -> tl.tensor:
    """`exp(-d) * d` in the same units."""
    return (tl.exp(-d) * d * 4398046511104.0).to(tl.int64)


@triton.jit
def share(part: tl.tensor, total: tl.tensor) -> tl.tensor:
    """The least integer weight that is at least `part * total`, and 1 at least."""
    least = tl.ceil(part.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    return tl.maximum(least, 1)


@triton.jit
def is_drawn(row: tl.tensor, draw: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    return (tl.load(draw + row) != 0) & (tl.load(temperature + row) > 0)


@triton.jit
def is_cut(
    row: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    typical_p: tl.tensor,
    vocabulary: tl.tensor,
) -> tl.tensor:
    cut = (tl.load(top_p + row) < 1.0) | (tl.load(typical_p + row) < 1.0)
    return cut | by_rank(tl.load(top_k + row), vocabulary)


@triton.jit
def by_rank(k: tl.tensor, vocabulary: tl.tensor) -> tl.tensor:
    return (k > 0) & (k < vocabulary)


@triton.jit
def largest_of(
    row: tl.tensor, best: tl.tensor, chunks: tl.tensor, CHUNKS: tl.constexpr
) -> tl.tensor:
    """The largest of a row's chunks."""
    chunk = tl.arange(0, CHUNKS)
    return tl.max(tl.load(best + row * chunks + chunk, mask=chunk < chunks, other=-float("inf")), 0)


@triton.jit
def distances(x: tl.tensor, peak: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """`(peak - x) / temperature`; 0 at the peak, however small the temperature; inf for -inf."""
    return tl.where(x == peak, 0.0, tl.div_rn(peak - x, temperature))


@triton.jit
def weigh_kernel(
    x: tl.tensor,
    best: tl.tensor,
    draw: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    typical_p: tl.tensor,
    level_count: tl.tensor,
    level_weight: tl.tensor,
    vocabulary: tl.tensor,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The number and the weight of the ids of a chunk within each distance, `[L, chunks, LEVELS]`,
    for rows that are cut."""
    row = tl.program_id(0).to(tl.int64)
    if not is_drawn(row, draw, temperature):
        return
    if not is_cut(row, top_k, top_p, typical_p, vocabulary):
        return
    chunks = tl.num_programs(1)
    peak = largest_of(row, best, chunks, CHUNKS)
    if peak == -float("inf"):
        return
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = distances(load_row(x + row * vocabulary, ids, vocabulary), peak, tl.load(temperature + row))
    weight = weight_of(d)
    slot = (row * chunks + tl.program_id(1)) * LEVELS
    for level in tl.static_range(LEVELS):
        near = d < level_distance(tl.full([], level, tl.int32))
        tl.store(level_count + slot + level, tl.sum(near.to(tl.int32), 0))
        tl.store(level_weight + slot + level, tl.sum(tl.where(near, weight, 0), 0))


@triton.jit
def choose_kernel(
    x: tl.tensor,
    best: tl.tensor,
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
    level_count: tl.tensor,
    level_weight: tl.tensor,
    candidate_count: tl.tensor,
    candidate_share: tl.tensor,
    candidate_id: tl.tensor,
    candidate_d: tl.tensor,
    vocabulary: tl.tensor,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The best score of a chunk and its id, `[L, chunks]`; of rows that are cut, -inf.

    Such rows have their candidates gathered, ids ascending: candidate_id and candidate_d `[L, V]`;
    candidate_count `[L]`, 0 for a row at -inf throughout; and candidate_share `[L]`, the weight
    that top_p keeps of the whole row. level_count and what follows: None where no row is cut.
    """
    row = tl.program_id(0).to(tl.int64)
    if not is_drawn(row, draw, temperature):
        return
    chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    peak = largest_of(row, best, chunks, CHUNKS)
    if peak == -float("inf"):
        if candidate_count is not None:
            tl.store(candidate_count + row, 0)
        return
    slot = row * chunks + chunk
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    d = distances(load_row(x + row * vocabulary, ids, vocabulary), peak, tl.load(temperature + row))
    if level_count is not None:  # noqa: SIM102 (the compiler decides this one)
        if is_cut(row, top_k, top_p, typical_p, vocabulary):
            tl.store(score + slot, -float("inf"))
            k = tl.load(top_k + row)
            levels = tl.arange(0, LEVELS)
            every = tl.arange(0, CHUNKS)
            places = (row * chunks + every[:, None]) * LEVELS + levels[None, :]
            there = every[:, None] < chunks
            counts = tl.load(level_count + places, mask=there, other=0)
            weights = tl.sum(tl.load(level_weight + places, mask=there, other=0), 0)
            kept_share = share(
                tl.load(top_p + row), tl.sum(tl.where(levels == LEVELS - 1, weights, 0), 0)
            )
            enough = weights >= kept_share
            if by_rank(k, vocabulary):
                enough = tl.sum(counts, 0) >= k
            elif tl.load(typical_p + row) < 1.0:
                enough = levels == LEVELS - 1
            level = tl.min(tl.where(enough, levels, LEVELS - 1), 0)
            counts = tl.sum(tl.where(levels[None, :] == level, counts, 0), 1)
            near = d < level_distance(level)
            before = tl.sum(tl.where(every < chunk, counts, 0), 0)
            to = row * vocabulary + before + tl.cumsum(near.to(tl.int32), 0) - 1
            tl.store(candidate_id + to, ids, mask=near)
            tl.store(candidate_d + to, d, mask=near)
            if chunk == 0:
                tl.store(candidate_count + row, tl.sum(counts, 0))
                tl.store(candidate_share + row, kept_share)
            return
    scores = tl.where(d < float("inf"), -d, -float("inf")) + noise_from(
        chunk * BLOCK,
        tl.load(seed + row),
        tl.load(choice + row),
        tl.load(position + row),
        BLOCK,
    )
    scores = tl.where(-d >= min_p_floor(tl.load(min_p + row), 0.0), scores, -float("inf"))
    highest = tl.max(scores, 0)
    tl.store(score + slot, highest)
    tl.store(score_id + slot, tl.min(tl.where(scores == highest, ids, 0x7FFFFFFF), 0))


@triton.jit
def min_p_floor(min_p: tl.tensor, nearest: tl.tensor) -> tl.tensor:
    """The least -d that min_p keeps where the best has -nearest."""
    return tl.where(min_p > 0, logarithm(min_p) - nearest, -float("inf"))


def specialisations(target: Target, tuning: Tuning) -> Iterator[Specialisation]:
    """Races alone, and with rows that are cut."""
    parameters = {"draw": "*i1", "temperature": "*fp32", "top_k": "*i32", "top_p": "*fp32"}
    levels = {"level_count": "*i32", "level_weight": "*i64"}
    candidates = {
        "candidate_count": "*i32",
        "candidate_share": "*i64",
        "candidate_id": "*i32",
        "candidate_d": "*fp32",
    }
    for vocabulary in VOCABULARIES:
        choice = tuning.pick("sampling", vocabulary=vocabulary)
        chunks = triton.next_power_of_2(triton.cdiv(vocabulary, choice["BLOCK"]))
        yield Specialisation.of(
            f"weigh vocabulary={vocabulary}",
            weigh_kernel,
            {"x": "*fp32", "best": "*fp32"}
            | parameters
            | {"typical_p": "*fp32"}
            | levels
            | {"vocabulary": "i32"},
            {"CHUNKS": chunks},
            choice,
            divisible=frozenset({"vocabulary"}),
            decode=True,
        )
        for cuts in (False, True):
            yield Specialisation.of(
                f"choose vocabulary={vocabulary}" + (" cuts" if cuts else ""),
                choose_kernel,
                {"x": "*fp32", "best": "*fp32"}
                | parameters
                | {"min_p": "*fp32", "typical_p": "*fp32"}
                | {"seed": "*i64", "choice": "*i32", "position": "*i32"}
                | {"score": "*fp32", "score_id": "*i32"}
                | (levels | candidates if cuts else {})
                | {"vocabulary": "i32"},
                {"CHUNKS": chunks} | ({} if cuts else dict.fromkeys(levels | candidates)),
                choice,
                divisible=frozenset({"vocabulary"}),
                decode=True,
            )
