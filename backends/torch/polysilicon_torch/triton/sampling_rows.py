"""Rows of logits: what is done to them before a draw, and the first pass over them."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from polysilicon_torch.specialisation import Specialisation
from polysilicon_torch.target import Target
from polysilicon_torch.tuning import Tuning

VOCABULARIES = (49152, 128256, 262144)
"""Sizes that are compiled ahead of time: SmolLM2, Llama 3, Gemma 3."""


@triton.jit
def cleaned(x: tl.tensor) -> tl.tensor:
    """NaN as -inf, +inf as the largest finite value."""
    return tl.minimum(tl.where(x == x, x, -float("inf")), 3.4028234663852886e38)


@triton.jit
def load_row(row: tl.tensor, ids: tl.tensor, vocabulary: tl.tensor) -> tl.tensor:
    """Logits of a row, cleaned; -inf past the vocabulary. row: pointer to its first."""
    return cleaned(tl.load(row + ids, mask=ids < vocabulary, other=-float("inf")))


@triton.jit
def adjust_kernel(
    logits: tl.tensor,
    mask: tl.tensor,
    draw: tl.tensor,
    adjusted: tl.tensor,
    vocabulary: tl.tensor,
    words: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Copies rows that are drawn from, with -inf where their packed mask has a 0. mask: or None."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(draw + row) == 0:
        return
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocabulary
    x = load_row(logits + row * vocabulary, ids, vocabulary)
    if mask is not None:
        word = tl.load(mask + row * words + (ids >> 5), mask=inside, other=0)
        x = tl.where(((word >> (ids & 31)) & 1) != 0, x, -float("inf"))
    tl.store(adjusted + row * vocabulary + ids, x, mask=inside)


@triton.jit
def bias_kernel(
    adjusted: tl.tensor,
    draw: tl.tensor,
    start: tl.tensor,
    ids: tl.tensor,
    values: tl.tensor,
    vocabulary: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Adds a row's bias, in place."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(draw + row) == 0:
        return
    entries = tl.load(start + row) + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    listed = entries < tl.load(start + row + 1)
    places = adjusted + row * vocabulary + tl.load(ids + entries, mask=listed, other=0)
    x = tl.load(places, mask=listed, other=0.0)
    x += tl.load(values + entries, mask=listed, other=0.0)
    tl.store(places, cleaned(x), mask=listed)


@triton.jit
def penalties_kernel(
    adjusted: tl.tensor,
    draw: tl.tensor,
    start: tl.tensor,
    ids: tl.tensor,
    counts: tl.tensor,
    repetition: tl.tensor,
    presence: tl.tensor,
    frequency: tl.tensor,
    vocabulary: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Repetition, frequency and presence penalties of a row, in place."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(draw + row) == 0:
        return
    entries = tl.load(start + row) + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    listed = entries < tl.load(start + row + 1)
    places = adjusted + row * vocabulary + tl.load(ids + entries, mask=listed, other=0)
    x = tl.load(places, mask=listed, other=0.0)
    count = tl.load(counts + entries, mask=listed, other=0)
    factor = tl.load(repetition + row)
    x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
    x -= tl.load(frequency + row) * count.to(tl.float32)
    x -= tl.load(presence + row) * (count > 0).to(tl.float32)
    tl.store(places, cleaned(x), mask=listed)


@triton.jit
def scan_kernel(
    logits: tl.tensor,
    adjusted: tl.tensor,
    best: tl.tensor,
    best_id: tl.tensor,
    raw_best: tl.tensor,
    raw_rest: tl.tensor,
    vocabulary: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """The largest of each chunk of BLOCK ids and the lowest id that has it, after adjustment;
    and of the logits as they came the largest, and the sum of `exp(x - largest)` over all but that
    one, where raw_best is not None. adjusted: or None, where nothing was. Results `[L, chunks]`."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    slot = row * tl.num_programs(1) + chunk
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    raw = load_row(logits + row * vocabulary, ids, vocabulary)
    x = raw
    if adjusted is not None:
        x = load_row(adjusted + row * vocabulary, ids, vocabulary)
    largest = tl.max(x, 0)
    tl.store(best + slot, largest)
    tl.store(best_id + slot, tl.min(tl.where(x == largest, ids, 0x7FFFFFFF), 0))
    if raw_best is not None:
        peak = tl.max(raw, 0)
        tl.store(raw_best + slot, peak)
        first = tl.min(tl.where(raw == peak, ids, 0x7FFFFFFF), 0)
        others = (raw > -float("inf")) & (ids != first)
        tl.store(raw_rest + slot, tl.sum(tl.where(others, tl.exp(raw - peak), 0.0), 0))


def specialisations(target: Target, tuning: Tuning) -> Iterator[Specialisation]:
    """With and without a mask, an adjusted copy, reports."""
    for vocabulary in VOCABULARIES:
        choice = tuning.pick("sampling", vocabulary=vocabulary)
        for masked in (False, True):
            yield Specialisation.of(
                f"adjust vocabulary={vocabulary}" + (" mask" if masked else ""),
                adjust_kernel,
                {"logits": "*fp32"}
                | ({"mask": "*i32"} if masked else {})
                | {"draw": "*i1", "adjusted": "*fp32", "vocabulary": "i32", "words": "i32"},
                {} if masked else {"mask": None},
                choice,
                divisible=frozenset({"vocabulary"}),
                decode=True,
            )
        for adjusted in (False, True):
            for reports in (False, True):
                optional = {"adjusted": adjusted, "raw_best": reports, "raw_rest": reports}
                types = {
                    "logits": "*fp32",
                    "adjusted": "*fp32",
                    "best": "*fp32",
                    "best_id": "*i32",
                    "raw_best": "*fp32",
                    "raw_rest": "*fp32",
                    "vocabulary": "i32",
                }
                yield Specialisation.of(
                    f"scan vocabulary={vocabulary}"
                    + (" adjusted" if adjusted else "")
                    + (" reports" if reports else ""),
                    scan_kernel,
                    {name: kind for name, kind in types.items() if optional.get(name, True)},
                    {name: None for name, there in optional.items() if not there},
                    choice,
                    divisible=frozenset({"vocabulary"}),
                    decode=True,
                )
    lists = {"adjusted": "*fp32", "draw": "*i1", "start": "*i32", "ids": "*i32"}
    choice = tuning.pick("sampling_lists")
    yield Specialisation.of(
        "bias",
        bias_kernel,
        lists | {"values": "*fp32", "vocabulary": "i32"},
        {},
        choice,
        divisible=frozenset({"vocabulary"}),
        decode=True,
    )
    yield Specialisation.of(
        "penalties",
        penalties_kernel,
        lists
        | {"counts": "*i32"}
        | dict.fromkeys(("repetition", "presence", "frequency"), "*fp32")
        | {"vocabulary": "i32"},
        {},
        choice,
        divisible=frozenset({"vocabulary"}),
        decode=True,
    )
