"""What one step asks of a device: flat host arrays, built by the core, read by the backend.

Symbols: T tokens of the step, S sequences, L rows whose logits are wanted, V vocabulary, P
page-table width. All arrays are C-contiguous numpy arrays that belong to the device from the call
they are passed to until that call's `.result()` returned.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
UInt32 = npt.NDArray[np.uint32]
UInt64 = npt.NDArray[np.uint64]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One mixed batch of prefill chunks and decodes. Sequence s owns the tokens
    `query_start[s]:query_start[s + 1]`; they are the last ones of its `context_len[s]` tokens.

    A model's `forward` receives this class too, but there its fields are the device's own values
    (numpy arrays, traced symbols, graph inputs): it hands them to ops and looks into none.

    tokens: int32 `[T]`, in the vocabulary; ignored where `token_source` names a row.
    token_source: int32 `[T]`, -1, or the row of `previous` whose sampled token is the input.
    positions: int32 `[T]`, for rotary embedding, windows and causality.
    query_start: int32 `[S + 1]`, non-decreasing, `query_start[0] == 0`, `query_start[S] == T`.
    context_len: int32 `[S]`, tokens whose KV a sequence has once this step has written its own.
    page_tables: per KV group int32 `[S, P]`: page of context tokens `[j * page_size, ...)`; 0 where
        no query of the step may look (behind a window, past the context).
    slots: per KV group int32 `[T]`: where a token's K and V go, `page * page_size + offset`.
    logit_rows: int32 `[L]`, indices into T.
    sequence_slot: int32 `[S]`, below the executor's max_sequences, stable while a sequence runs.
    adapter_slot: int32 `[S]`, slot in the adapter pool; 0 is none.
    tree_mask: bool `[T, M]` or None. Entry (t, j): may token t see the j-th token that its own
        sequence has in this step? M is at least the most tokens a sequence has in the step.
        The context before the step is always visible. None means causal.
    """

    tokens: Int32
    token_source: Int32
    positions: Int32
    query_start: Int32
    context_len: Int32
    page_tables: tuple[Int32, ...]
    slots: tuple[Int32, ...]
    logit_rows: Int32
    sequence_slot: Int32
    adapter_slot: Int32
    tree_mask: Bool | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SparseRows:
    """Per-row lists of (token id, value): row r has `ids[start[r]:start[r + 1]]`.

    start: int32 `[L + 1]`; ids: int32 `[n]`, unique within a row; values: float32 or int32 `[n]`.
    """

    start: Int32
    ids: Int32
    values: npt.NDArray[Any]

    def row(self, index: int) -> tuple[Int32, npt.NDArray[Any]]:
        part = slice(int(self.start[index]), int(self.start[index + 1]))
        return self.ids[part], self.values[part]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SamplingBatch:
    """How the L rows of a step's logits become tokens and log-probabilities.

    The order of operations for a row x, all in float32 or better (`polysilicon.sampling.sampler` is
    the executable form). After each step NaN counts as -inf, and +inf as the largest finite
    float32. Among equals the lower id always comes first.

    1. log-probabilities that are reported are `log_softmax` of the logits as the model gave them,
       -inf throughout where every logit is;
    2. `bias` is added; `mask` bits that are 0 become -inf;
    3. repetition penalty r, for ids in `counts`: `x / r` where x > 0, else `x * r` (CTRL, arXiv
       1909.05858); then `x -= frequency * count`; then `x -= presence` where count > 0. A row that
       is now -inf throughout gives the lowest id whose `mask` bit is 1, or 0 where there is none;
    4. temperature 0: the largest. Otherwise x becomes `(x - max(x)) / temperature`;
    5. top_k keeps the k largest, never an id at -inf. Then typical_p (arXiv 2202.00666), top_p
       (arXiv 1904.09751) and min_p (arXiv 2407.01082) each cut by the softmax p of what is left, in
       that order: typical_p orders ids by rising `|-log p - H|`, H the entropy of p, and keeps the
       shortest prefix whose p sum to at least typical_p; top_p does the same in the order of
       falling p; min_p keeps ids with `p >= min_p * max(p)`. At least one is always kept;
    6. the largest of `x + gumbel` among the ids kept, with Gumbel noise from Philox4x32-10 keyed by
       (seed, choice, position), as `polysilicon.sampling.philox` specifies to the bit.

    draw: bool `[L]`, False where only log-probabilities are wanted (the token is then undefined).
    temperature, top_p, min_p, typical_p, repetition, presence, frequency: float32 `[L]`;
        off at top_p 1, min_p 0, typical_p 1, repetition 1, presence 0, frequency 0.
    top_k: int32 `[L]`, off at 0.
    seed: uint64 `[L]`; choice, position: uint32 `[L]`; position is that of the token drawn.
    bias: float32 values, or None. counts: int32 values, times that an id was generated (0 for ids
        that only the prompt has), or None. mask: uint32 `[L, ceil(V / 32)]`, bit `id % 32` of word
        `id // 32`, or None.
    targets: int32 `[L]`, id whose log-probability is wanted, -1 for none; or None.
    logprobs: whether the drawn token's log-probability is wanted.
    top_logprobs: n, at most V: how many of the most likely ids are reported with their
        log-probabilities.
    """

    draw: Bool
    temperature: Float32
    top_k: Int32
    top_p: Float32
    min_p: Float32
    typical_p: Float32
    repetition: Float32
    presence: Float32
    frequency: Float32
    seed: UInt64
    choice: UInt32
    position: UInt32
    bias: SparseRows | None = None
    counts: SparseRows | None = None
    mask: UInt32 | None = None
    targets: Int32 | None = None
    logprobs: bool = False
    top_logprobs: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SampledTokens:
    """What `PendingTokens.result()` gives back; rows as in the `SamplingBatch`.

    tokens: int32 `[L]`. logprobs: float32 `[L]` of the drawn tokens, or None. target_logprobs:
    float32 `[L]`, 0 where there was no target, or None. top_ids int32 and top_logprobs float32
    `[L, n]`, most likely first, the lower id first among equals, or None.
    """

    tokens: Int32
    logprobs: Float32 | None = None
    target_logprobs: Float32 | None = None
    top_ids: Int32 | None = None
    top_logprobs: Float32 | None = None
