"""What the core computes on the host for sampling: per sequence, and per step for its rows."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from polysilicon.batch import Float32, Int32, SamplingBatch, SparseRows, UInt32
from polysilicon.errors import RequestError
from polysilicon.request import SamplingParams
from polysilicon.sampling.grammar import GrammarState

_RECORD = np.dtype(
    [
        ("seed", np.uint64),
        ("choice", np.uint32),
        ("top_k", np.int32),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("typical_p", np.float32),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("draw", np.bool_),
    ],
    align=True,
)
"""The fields of a `SamplingBatch` row that stay the same for a sequence. A step joins the records
of its rows as bytes, which costs far less than a list for each field."""

_NO_DRAW = np.array((0, 0, 0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, False), _RECORD).tobytes()
_ALL_ALLOWED = np.uint32(0xFFFFFFFF)
_LARGEST = float(np.finfo(np.float32).max)


def validate(params: SamplingParams, vocab_size: int) -> None:
    """Refuse token ids that the model's vocabulary lacks. Raises RequestError."""
    fields: tuple[tuple[str, Iterable[int]], ...] = (
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
        ("bad_words", (token for word in params.bad_words for token in word)),
        ("allowed_token_ids", params.allowed_token_ids or ()),
    )
    for name, ids in fields:
        for token in ids:
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"{name} names token {token}, which is not in the vocabulary: "
                    f"ids lie between 0 and {vocab_size - 1}"
                )


class SequenceSampler:
    """How one sequence is sampled, and what its past means for its next token.

    num_output: tokens that were appended. record: the bytes of this sequence's `_RECORD`.
    mask: uint32 `[ceil(V / 32)]`, packed as `SamplingBatch.mask`, or None.
    grammar: what the output follows, or None.
    needs_last_token: whether the last token must be appended before the next step's batch is built.
    is_plain: whether none of its rows ever has a bias, counts or a mask.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        choice: int,
        prompt: Sequence[int] | npt.NDArray[np.integer],
        eos_ids: frozenset[int],
        vocab_size: int,
    ) -> None:
        """params: validated for `vocab_size`. seed: below 2^64, params.seed where that is set."""
        self.num_output = 0
        self.grammar: GrammarState | None = None
        self.record = _record(params, seed, choice)
        self.mask = (
            None
            if params.allowed_token_ids is None
            else _packed(params.allowed_token_ids, vocab_size)
        )
        self._allowed = self.mask
        self._min_tokens = params.min_tokens
        self._end_ids = frozenset(params.stop_token_ids)
        self._ignored_ids = frozenset[int]()
        if params.ignore_eos:
            self._ignored_ids = eos_ids - self._end_ids
        else:
            self._end_ids |= eos_ids
        self._vocab_size = vocab_size
        self._bad_words = _BadWords(params.bad_words, prompt)
        self._counts = _Counts(params, prompt) if params.uses_counts else None
        self.needs_last_token = self._counts is not None or self._bad_words.needs_tail
        self._bias = {
            token: min(max(value, -_LARGEST), _LARGEST)
            for token, value in params.logit_bias.items()
        } | dict.fromkeys(self._bad_words.single, -np.inf)
        self._is_free = not (self._bias or self._bad_words.needs_tail or self._allowed is not None)
        self._early_bias = self._bias
        if params.min_tokens > 0:
            ends = (token for token in self._end_ids if token < vocab_size)
            self._early_bias = self._bias | dict.fromkeys(ends, -np.inf)
        self._bias_arrays = _arrays(self._bias)
        self._early_bias_arrays = _arrays(self._early_bias)
        self.is_plain = not (self._early_bias or self.needs_last_token or self.mask is not None)

    def append(self, token: int) -> None:
        """Take note of the sequence's next output token."""
        self.num_output += 1
        self._bad_words.append(token)
        if self._counts is not None:
            self._counts.append(token)
        if self.grammar is not None:
            self.grammar.consume([token])

    def follow(self, grammar: GrammarState) -> None:
        """Let the output, of which nothing is there yet, follow a grammar."""
        assert not self.num_output
        self.grammar = grammar
        self.needs_last_token = True
        self.is_plain = False

    def forced(self) -> list[int]:
        """Tokens that the grammar lets come next and no others; none where anything but the grammar
        has a say in which tokens may come."""
        if self.grammar is None or not self._is_free:
            return []
        return self.grammar.forced()

    def restrict(self) -> bool:
        """Bring `mask` up to date with the grammar's own. False when it leaves no token."""
        assert self.grammar is not None
        mask = self.grammar.mask
        if self.grammar.may_end:
            _clear(mask, self._ignored_ids, self._vocab_size)
            _set(mask, self._end_ids, self._vocab_size)
        if self._allowed is not None:
            mask &= self._allowed
        ids, values = self.bias(self.num_output)
        _clear(mask, ids[values == -np.inf].tolist(), self._vocab_size)
        self.mask = mask
        return bool(mask.any())

    def ends(self, token: int, num_output: int) -> bool:
        """Whether this token, with `num_output` tokens before it, ends the sequence. In the middle
        of what a grammar wants, no token does."""
        if token not in self._end_ids or num_output < self._min_tokens:
            return False
        return self.grammar is None or self.grammar.may_end

    def bias(self, num_output: int) -> tuple[Int32, Float32]:
        """Ids and biases for the token with `num_output` tokens before it, each int32 and float32
        `[n]`."""
        assert not self.needs_last_token or num_output == self.num_output
        early = num_output < self._min_tokens
        forbidden = self._bad_words.completions()
        if forbidden:
            bias = self._early_bias if early else self._bias
            return _arrays(bias | dict.fromkeys(forbidden, -np.inf))
        return self._early_bias_arrays if early else self._bias_arrays

    def counts(self) -> tuple[Int32, Int32]:
        """Ids that penalties apply to and how often each was generated, int32 `[n]` both. They are
        views that the next `append` changes."""
        return self._counts.arrays() if self._counts is not None else _NO_COUNTS


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleRow:
    """One row of a step's logits.

    sampler: of the sequence whose next token is drawn, or None where only log-probabilities are
    wanted. position: in the sequence, of the token drawn; num_output: output tokens before it.
    target: id whose log-probability is wanted, -1 for none. logprobs: how many of the most likely
    ids are reported beside the drawn token, None for no log-probabilities.
    """

    sampler: SequenceSampler | None
    position: int
    num_output: int = 0
    target: int = -1
    logprobs: int | None = None


def build_sampling_batch(rows: Sequence[SampleRow], vocab_size: int) -> SamplingBatch:
    """The arrays by which a device samples these rows. Those that no row needs are left out."""
    records = np.frombuffer(
        b"".join([_NO_DRAW if row.sampler is None else row.sampler.record for row in rows]),
        _RECORD,
    )
    samplers = [
        None if row.sampler is None or row.sampler.is_plain else row.sampler for row in rows
    ]
    bias = counts = mask = None
    if any(samplers):
        bias = _sparse_rows(
            [
                _NO_BIAS if sampler is None else sampler.bias(row.num_output)
                for sampler, row in zip(samplers, rows, strict=True)
            ]
        )
        counts = _sparse_rows(
            [_NO_COUNTS if sampler is None else sampler.counts() for sampler in samplers]
        )
        mask = _masks([None if sampler is None else sampler.mask for sampler in samplers])
    targets = [row.target for row in rows]
    wanted = [row.logprobs for row in rows if row.logprobs is not None]
    return SamplingBatch(
        draw=records["draw"].copy(),
        temperature=records["temperature"].copy(),
        top_k=records["top_k"].copy(),
        top_p=records["top_p"].copy(),
        min_p=records["min_p"].copy(),
        typical_p=records["typical_p"].copy(),
        repetition=records["repetition"].copy(),
        presence=records["presence"].copy(),
        frequency=records["frequency"].copy(),
        seed=records["seed"].copy(),
        choice=records["choice"].copy(),
        position=np.array([row.position for row in rows], np.uint32),
        bias=bias,
        counts=counts,
        mask=mask,
        targets=np.array(targets, np.int32) if max(targets, default=-1) >= 0 else None,
        logprobs=any(row.logprobs is not None and row.sampler is not None for row in rows),
        top_logprobs=min(max(wanted, default=0), vocab_size),
    )


_NO_BIAS: tuple[Int32, Float32] = (np.empty(0, np.int32), np.empty(0, np.float32))
_NO_COUNTS: tuple[Int32, Int32] = (np.empty(0, np.int32), np.empty(0, np.int32))


class _Counts:
    """How often ids were generated, kept as arrays that grow in place. Ids that only the prompt has
    stand at 0, for the repetition penalty, and are left out where that is off."""

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int] | npt.NDArray[np.integer]
    ) -> None:
        seen = np.unique(np.asarray(prompt, np.int32)) if params.repetition_penalty != 1 else ()
        self._size = len(seen)
        self._ids = np.zeros(self._size + 64, np.int32)
        self._ids[: self._size] = seen
        self._values = np.zeros_like(self._ids)
        self._index = {int(token): index for index, token in enumerate(seen)}

    def append(self, token: int) -> None:
        index = self._index.setdefault(token, self._size)
        if index == self._size:
            if self._size == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._values = np.concatenate([self._values, np.zeros_like(self._values)])
            self._ids[index] = token
            self._size += 1
        self._values[index] += 1

    def arrays(self) -> tuple[Int32, Int32]:
        return self._ids[: self._size], self._values[: self._size]


class _BadWords:
    """Token sequences that must not be completed, whether they begin in the prompt or after it.

    single: those of one token, which are forbidden at all times. needs_tail: whether any is longer.
    """

    def __init__(
        self,
        words: Sequence[tuple[int, ...]],
        prompt: Sequence[int] | npt.NDArray[np.integer],
    ) -> None:
        self.single = [word[0] for word in words if len(word) == 1]
        self._by_last: dict[int, list[tuple[int, ...]]] = {}
        longest = 1
        for word in words:
            if len(word) > 1:
                self._by_last.setdefault(word[-2], []).append(word)
                longest = max(longest, len(word))
        self.needs_tail = longest > 1
        self._tail = deque((int(token) for token in prompt[-longest:]), maxlen=longest - 1)

    def append(self, token: int) -> None:
        self._tail.append(token)

    def completions(self) -> list[int]:
        """Ids that would complete a word now."""
        if not self.needs_tail or not self._tail:
            return []
        tail = tuple(self._tail)
        return [
            word[-1]
            for word in self._by_last.get(tail[-1], ())
            if tail[1 - len(word) :] == word[:-1]
        ]


def _record(params: SamplingParams, seed: int, choice: int) -> bytes:
    record = np.zeros((), _RECORD)
    record["seed"] = seed
    record["choice"] = choice
    record["top_k"] = params.top_k
    record["temperature"] = params.temperature
    record["top_p"] = params.top_p
    record["min_p"] = params.min_p
    record["typical_p"] = params.typical_p
    record["repetition"] = params.repetition_penalty
    record["presence"] = params.presence_penalty
    record["frequency"] = params.frequency_penalty
    record["draw"] = True
    return record.tobytes()


def _packed(ids: Iterable[int], vocab_size: int) -> UInt32:
    """A mask that allows these ids."""
    allowed = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    allowed[list(ids)] = 1
    return np.packbits(allowed, bitorder="little").view("<u4").astype(np.uint32)


def _set(mask: UInt32, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if token < vocab_size:
            mask[token // 32] |= np.uint32(1 << token % 32)


def _clear(mask: UInt32, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if token < vocab_size:
            mask[token // 32] &= ~np.uint32(1 << token % 32)


def _arrays(bias: dict[int, float]) -> tuple[Int32, Float32]:
    return (
        np.fromiter(bias.keys(), np.int32, len(bias)),
        np.fromiter(bias.values(), np.float32, len(bias)),
    )


def _sparse_rows(
    parts: Sequence[tuple[Int32, npt.NDArray[np.generic]]],
) -> SparseRows | None:
    """Lists of (ids, values) by row; None where all are empty."""
    start = np.zeros(len(parts) + 1, np.int32)
    np.cumsum([len(ids) for ids, _ in parts], out=start[1:])
    if start[-1] == 0:
        return None
    return SparseRows(
        start=start,
        ids=np.concatenate([ids for ids, _ in parts]),
        values=np.concatenate([values for _, values in parts]),
    )


def _masks(masks: Sequence[UInt32 | None]) -> UInt32 | None:
    """The rows' masks as one array, everything allowed where a row has none; None where all are."""
    width = next((len(mask) for mask in masks if mask is not None), 0)
    if width == 0:
        return None
    packed = np.full((len(masks), width), _ALL_ALLOWED)
    for row, mask in enumerate(masks):
        if mask is not None:
            packed[row] = mask
    return packed
