"""What comes of the passes over a row: its token, and the log-probabilities that are reported."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from polysilicon_torch.specialisation import Specialisation
from polysilicon_torch.target import Target
from polysilicon_torch.triton.sampling_draw import largest_of
from polysilicon_torch.triton.sampling_noise import logarithm
from polysilicon_torch.triton.sampling_rows import VOCABULARIES, cleaned, load_row
from polysilicon_torch.tuning import Tuning


@triton.jit
def finish_kernel(
    logits: tl.tensor,
    mask: tl.tensor,
    draw: tl.tensor,
    temperature: tl.tensor,
    best: tl.tensor,
    best_id: tl.tensor,
    score: tl.tensor,
    score_id: tl.tensor,
    raw_best: tl.tensor,
    raw_rest: tl.tensor,
    targets: tl.tensor,
    tokens: tl.tensor,
    logprobs: tl.tensor,
    target_logprobs: tl.tensor,
    peak: tl.tensor,
    log_total: tl.tensor,
    vocabulary: tl.tensor,
    words: tl.tensor,
    chunks: tl.tensor,
    CHUNKS: tl.constexpr,
) -> None:
    """Puts the findings of a row's chunks together: its token, and its log-probabilities.

    score, score_id: None where no row is drawn with noise. raw_best, raw_rest, peak and log_total
    (`[L]`: what `logprob` needs): None where no log-probability is wanted.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.zeros([], tl.int32)
    if tl.load(draw + row) != 0:
        if largest_of(row, best, chunks, CHUNKS) == -float("inf"):
            if mask is not None:
                token = _first_allowed(mask + row * words, words, vocabulary)
        else:
            token = _winner(row, best, best_id, chunks, CHUNKS)
            if score is not None:  # noqa: SIM102 (the compiler decides this one)
                if tl.load(temperature + row) > 0:
                    token = _winner(row, score, score_id, chunks, CHUNKS)
    tl.store(tokens + row, token)
    if raw_best is not None:
        chunk = tl.arange(0, CHUNKS)
        there = chunk < chunks
        peaks = tl.load(raw_best + row * chunks + chunk, mask=there, other=-float("inf"))
        rests = tl.load(raw_rest + row * chunks + chunk, mask=there, other=0.0)
        highest = tl.max(peaks, 0)
        # The largest weighs 1, to which the others are added last: of a token that is almost
        # certain they are all that its log-probability consists of.
        leading = chunk == tl.min(tl.where(peaks == highest, chunk, CHUNKS), 0)
        weights = tl.where(leading, rests, (1.0 + rests) * tl.exp(peaks - highest))
        rest = tl.sum(tl.where(peaks > -float("inf"), weights, 0.0), 0)
        total = 1.0 + rest
        log = logarithm(total) + (rest - (total - 1.0)) / total
        # A row at -inf throughout has no log-probability that these would enter.
        highest = tl.where(highest > -float("inf"), highest, 0.0)
        tl.store(peak + row, highest)
        tl.store(log_total + row, log)
        x = logits + row * vocabulary
        if logprobs is not None:
            tl.store(logprobs + row, logprob(cleaned(tl.load(x + token)), highest, log))
        if targets is not None:
            target = tl.load(targets + row)
            value = logprob(cleaned(tl.load(x + tl.maximum(target, 0))), highest, log)
            tl.store(target_logprobs + row, tl.where(target >= 0, value, 0.0))


@triton.jit
def logprob(x: tl.tensor, peak: tl.tensor, log_total: tl.tensor) -> tl.tensor:
    """Of a clean logit. The peak is taken away first: beside it the logarithm might be lost."""
    return tl.where(x > -float("inf"), (x - peak) - log_total, -float("inf"))


@triton.jit
def _winner(
    row: tl.tensor,
    value: tl.tensor,
    value_id: tl.tensor,
    chunks: tl.tensor,
    CHUNKS: tl.constexpr,
) -> tl.tensor:
    """The id of a row's largest value, the lowest of equals."""
    chunk = tl.arange(0, CHUNKS)
    there = chunk < chunks
    values = tl.load(value + row * chunks + chunk, mask=there, other=-float("inf"))
    ids = tl.load(value_id + row * chunks + chunk, mask=there, other=0x7FFFFFFF)
    return tl.min(tl.where(values == tl.max(values, 0), ids, 0x7FFFFFFF), 0)


@triton.jit
def _first_allowed(mask: tl.tensor, words: tl.tensor, vocabulary: tl.tensor) -> tl.tensor:
    """The lowest id whose bit of a row's mask is 1, or 0 where there is none."""
    first = tl.full([], 0x7FFFFFFF, tl.int32)
    for start in range(0, words, 1024):
        places = start + tl.arange(0, 1024)
        some = tl.load(mask + places, mask=places < words, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(some, places, 0x7FFFFFFF), 0))
    bits = tl.arange(0, 32)
    word = tl.load(mask + first, mask=first < words, other=0)
    token = first * 32 + tl.min(tl.where(((word >> bits) & 1) != 0, bits, 32), 0)
    return tl.where((first < words) & (token < vocabulary), token, 0)


@triton.jit
def top_kernel(
    logits: tl.tensor,
    raw_best: tl.tensor,
    peak: tl.tensor,
    log_total: tl.tensor,
    top_ids: tl.tensor,
    top_logprobs: tl.tensor,
    vocabulary: tl.tensor,
    chunks: tl.tensor,
    count: tl.tensor,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The `count` most likely ids of a row and their log-probabilities, one after the other: each
    costs one look at the chunk that it lies in. What of a chunk was taken are those before the last
    one taken, in the order of falling x and rising id."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    best = _order(
        tl.load(raw_best + row * chunks + chunk, mask=chunk < chunks, other=-float("inf"))
    )
    best = tl.where(chunk < chunks, best, -0x80000000)
    last = tl.full([CHUNKS], 0x7FFFFFFF, tl.int32)
    last_id = tl.full([CHUNKS], -1, tl.int32)
    row_peak = tl.load(peak + row)
    row_total = tl.load(log_total + row)
    for place in range(count):
        highest = tl.max(best, 0)
        at = tl.min(tl.where(best == highest, chunk, CHUNKS), 0)
        here = chunk == at
        ids = at * BLOCK + tl.arange(0, BLOCK)
        key = _order(load_row(logits + row * vocabulary, ids, vocabulary))
        own_last = tl.max(tl.where(here, last, -0x80000000), 0)
        own_last_id = tl.max(tl.where(here, last_id, -1), 0)
        left = (key < own_last) | ((key == own_last) & (ids > own_last_id))
        left &= ids < vocabulary
        token = tl.min(tl.where(left & (key == highest), ids, 0x7FFFFFFF), 0)
        following = tl.max(tl.where(left & (ids != token), key, -0x80000000), 0)
        best = tl.where(here, following, best)
        last = tl.where(here, highest, last)
        last_id = tl.where(here, token, last_id)
        x = cleaned(tl.load(logits + row * vocabulary + token))
        tl.store(top_ids + row * count + place, token)
        tl.store(top_logprobs + row * count + place, logprob(x, row_peak, row_total))


@triton.jit
def _order(x: tl.tensor) -> tl.tensor:
    """Integers in the order of floats, above the least one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def specialisations(target: Target, tuning: Tuning) -> Iterator[Specialisation]:
    """Greedy rows alone, drawn rows, and reports; a mask where it matters."""
    for vocabulary in VOCABULARIES:
        block = tuning.pick("sampling", vocabulary=vocabulary)["BLOCK"]
        chunks = triton.next_power_of_2(triton.cdiv(vocabulary, block))
        types = {
            "logits": "*fp32",
            "mask": "*i32",
            "draw": "*i1",
            "temperature": "*fp32",
            "best": "*fp32",
            "best_id": "*i32",
            "score": "*fp32",
            "score_id": "*i32",
            "raw_best": "*fp32",
            "raw_rest": "*fp32",
            "targets": "*i32",
            "tokens": "*i32",
            "logprobs": "*fp32",
            "target_logprobs": "*fp32",
            "peak": "*fp32",
            "log_total": "*fp32",
            "vocabulary": "i32",
            "words": "i32",
            "chunks": "i32",
        }
        reports = ("raw_best", "raw_rest", "logprobs", "peak", "log_total")
        prompt = ("targets", "target_logprobs")
        scores = ("score", "score_id")
        for what, absent in (
            ("greedy", ("mask", *scores, *reports, *prompt)),
            ("drawn", ("mask", *reports, *prompt)),
            ("drawn mask logprobs", prompt),
            ("targets", ("mask", *scores, "logprobs")),
        ):
            yield Specialisation.of(
                f"finish vocabulary={vocabulary} {what}",
                finish_kernel,
                {name: kind for name, kind in types.items() if name not in absent},
                {"CHUNKS": chunks, **dict.fromkeys(absent)},
                tuning.pick("sampling_row", vocabulary=vocabulary),
                divisible=frozenset({"vocabulary"}),
                decode=True,
            )
        yield Specialisation.of(
            f"top vocabulary={vocabulary}",
            top_kernel,
            dict.fromkeys(("logits", "raw_best", "peak", "log_total"), "*fp32")
            | {"top_ids": "*i32", "top_logprobs": "*fp32"}
            | dict.fromkeys(("vocabulary", "chunks", "count"), "i32"),
            {"CHUNKS": chunks},
            tuning.pick("sampling", vocabulary=vocabulary),
            divisible=frozenset({"vocabulary"}),
            decode=True,
        )
