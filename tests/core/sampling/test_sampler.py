"""`sample_on_host` against a slow and obvious float64 implementation, and at the boundaries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.special
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from polysilicon.batch import SamplingBatch, SparseRows
from polysilicon.sampling.philox import gumbel
from polysilicon.sampling.sampler import sample_on_host

Make = Callable[..., SamplingBatch]
NEAR = 2e-6
"""Decisions that hang on less than this are left to rounding."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One row's parameters, as they are after rounding to float32."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: dict[int, float] = dataclasses.field(default_factory=dict)
    counts: dict[int, int] = dataclasses.field(default_factory=dict)


class NearTieError(Exception):
    """The definition's answer hangs on rounding."""


def refuse_near_ties(kept: Any, cut: Any) -> None:
    """Values on both sides of a cut may be equal, for the lower id decides, but not close."""
    kept = np.array(kept)
    for value in cut:
        if ((kept != value) & (np.abs(kept - value) < NEAR * np.maximum(1, np.abs(kept)))).any():
            raise NearTieError


def shortest_prefix(order: list[int], p: dict[int, float], mass: float) -> list[int]:
    kept, total = [], 0.0
    for token in order:
        kept.append(token)
        total += p[token]
        if abs(total - mass) < NEAR:
            raise NearTieError
        if total >= mass:
            break
    return kept


def scores_by_definition(logits: Any, row: Row, allowed: Any) -> dict[int, float]:
    """The ids that are left after step 5, with their x."""
    x = [float(value) for value in logits]
    for token, bias in row.bias.items():
        x[token] += bias
    x = [value if ok else -np.inf for value, ok in zip(x, allowed, strict=True)]
    for token, count in row.counts.items():
        x[token] = x[token] / row.repetition if x[token] > 0 else x[token] * row.repetition
        x[token] -= row.frequency * count
        x[token] -= row.presence if count > 0 else 0.0
    if row.temperature == 0:
        best = max(range(len(x)), key=lambda token: (x[token], -token))
        refuse_near_ties([x[best]], x)
        return {best: 0.0}
    left = {token: value / row.temperature for token, value in enumerate(x) if value > -np.inf}

    def softmax() -> dict[int, float]:
        return dict(zip(left, scipy.special.softmax(list(left.values())), strict=True))

    def keep(kept: list[int], key: dict[int, float]) -> dict[int, float]:
        cut = left.keys() - set(kept)
        refuse_near_ties([key[token] for token in kept], {key[token] for token in cut})
        return {token: left[token] for token in kept}

    if row.top_k:
        by_size = sorted(left, key=lambda token: (-left[token], token))
        left = keep(by_size[: row.top_k], left)
    if row.typical_p < 1:
        p = softmax()
        entropy = -sum(value * np.log(value) for value in p.values() if value > 0)
        far = {token: abs(-np.log(max(p[token], 1e-300)) - entropy) for token in p}
        by_distance = sorted(far, key=lambda token: (far[token], token))
        left = keep(shortest_prefix(by_distance, p, row.typical_p), far)
    if row.top_p < 1:
        by_size = sorted(left, key=lambda token: (-left[token], token))
        left = keep(shortest_prefix(by_size, softmax(), row.top_p), left)
    if row.min_p > 0:
        p = softmax()
        ratio = {token: p[token] / max(p.values()) for token in p}
        if any(abs(value - row.min_p) < NEAR for value in ratio.values() if value != 1):
            raise NearTieError
        left = {token: left[token] for token in left if ratio[token] >= row.min_p}
    return left


def token_by_definition(scores: dict[int, float], noise: Any) -> int | None:
    """None where two are nearly tied."""
    reached = sorted(((x + float(noise[token]), token) for token, x in scores.items()))
    if len(reached) > 1:
        margin = reached[-1][0] - reached[-2][0]
        if margin < 1e-4 * max(1.0, *(abs(x) for x in scores.values())):
            return None
    return reached[-1][1]


def check(
    make: Make, pack: Any, logits: Any, row: Row, allowed: Any, draws: int, seed: int
) -> None:
    scores = scores_by_definition(logits, row, allowed)
    fields = dataclasses.asdict(row)
    fields |= {"bias": row.bias or None, "counts": row.counts or None}
    if not allowed.all():
        fields["mask"] = pack(np.tile(allowed, (draws, 1)))
    batch = make(draws, seed=seed, choice=3, position=np.arange(draws), **fields)
    tokens = sample_on_host(np.tile(logits, (draws, 1)), batch).tokens
    for position in range(draws):
        expected = token_by_definition(scores, gumbel(seed, 3, position, len(logits)))
        if expected is not None:
            assert tokens[position] == expected


def floats32(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(np.float32(low).item(), np.float32(high).item(), width=32)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, Row, Any]:
    size = draw(st.integers(1, 40))
    value = st.one_of(st.integers(-5, 5).map(float), floats32(-30, 30), st.just(-np.inf))
    logits = np.array(draw(st.lists(value, min_size=size, max_size=size)), np.float32)
    ids = st.integers(0, size - 1)
    off_or = lambda off, strategy: st.one_of(st.just(off), strategy)  # noqa: E731
    row = Row(
        temperature=draw(st.one_of(st.sampled_from([0.0, 1.0]), floats32(0.05, 20))),
        top_k=draw(off_or(0, st.integers(1, 50))),
        top_p=draw(off_or(1.0, floats32(0.01, 1))),
        min_p=draw(off_or(0.0, floats32(0.001, 1))),
        typical_p=draw(off_or(1.0, floats32(0.01, 1))),
        repetition=draw(off_or(1.0, floats32(0.25, 4))),
        presence=draw(off_or(0.0, floats32(-2, 2))),
        frequency=draw(off_or(0.0, floats32(-2, 2))),
        bias=draw(st.dictionaries(ids, st.one_of(floats32(-9, 9), st.just(-np.inf)), max_size=5)),
        counts=draw(st.dictionaries(ids, st.integers(0, 4), max_size=5)),
    )
    allowed = np.ones(size, np.bool_)
    if draw(st.booleans()):
        allowed[draw(st.lists(ids, max_size=size))] = False
    return logits, row, allowed


@settings(max_examples=250, deadline=None)
@given(case=cases(), seed=st.integers(0, 2**64 - 1))
def test_tokens_are_those_of_the_definition(
    sampling_batch: Make, pack_mask: Any, case: tuple[Any, Row, Any], seed: int
) -> None:
    logits, row, allowed = case
    biased = logits.astype(np.float64)
    for token, bias in row.bias.items():
        biased[token] += bias
    assume(np.isfinite(biased[allowed]).any())
    try:
        check(sampling_batch, pack_mask, logits, row, allowed, 24, seed)
    except NearTieError:
        assume(False)


@pytest.mark.parametrize(
    "row",
    [
        Row(),
        Row(top_k=700),
        Row(top_k=3000, top_p=0.5),
        Row(top_p=0.875),
        Row(top_p=0.953125),
        Row(typical_p=0.125),
        Row(typical_p=0.9375),
        Row(min_p=0.03125),
        Row(typical_p=0.75, top_p=0.75, min_p=0.0625, top_k=4000),
    ],
)
@pytest.mark.parametrize("spread", ["flat", "steep", "ties"])
def test_large_vocabularies(sampling_batch: Make, pack_mask: Any, row: Row, spread: str) -> None:
    random = np.random.default_rng(4)
    step = {"flat": 1 / 512, "steep": 1 / 32, "ties": 1 / 4}[spread]  # no two are nearly equal
    logits = np.round(random.normal(size=5003) * (4 if spread == "steep" else 1) / step) * step
    logits = logits.astype(np.float32)
    check(sampling_batch, pack_mask, logits, row, np.ones(5003, np.bool_), 40, 99)


def test_more_candidates_than_one_group(sampling_batch: Make) -> None:
    logits = np.random.default_rng(6).normal(size=(40, 30000)).astype(np.float32)
    batch = sampling_batch(40, position=np.arange(40), top_k=[3000, 30000] * 20)
    tokens = sample_on_host(logits, batch).tokens
    for row in range(40):
        scores = dict(enumerate(logits[row].astype(np.float64)))
        if row % 2 == 0:
            bound = np.sort(logits[row])[-3000]
            scores = {token: x for token, x in scores.items() if x >= bound}
        expected = token_by_definition(scores, gumbel(0, 0, row, 30000))
        assert expected is None or tokens[row] == expected


def rows_of(lists: SparseRows | None, index: slice) -> SparseRows | None:
    if lists is None:
        return None
    start = lists.start[index.start : index.stop + 1]
    part = slice(start[0], start[-1])
    return SparseRows(start=start - start[0], ids=lists.ids[part], values=lists.values[part])


@pytest.mark.parametrize("vocabulary", [33, 1000, 20001])
def test_a_row_alone_equals_the_row_in_a_batch(
    sampling_batch: Make, pack_mask: Any, vocabulary: int
) -> None:
    random = np.random.default_rng(vocabulary)
    size = 19
    logits = (random.normal(size=(size, vocabulary)) * 3).astype(np.float32)
    some = lambda values: random.choice(values, size)  # noqa: E731
    batch = sampling_batch(
        size,
        draw=some([True, True, True, False]),
        temperature=some([0, 0.5, 1, 2]),
        top_k=some([0, 0, 5, 200]),
        top_p=some([1, 0.5, 0.95]),
        min_p=some([0, 0.05]),
        typical_p=some([1, 1, 0.5]),
        repetition=some([1, 1.3]),
        presence=some([0, 0.5]),
        frequency=some([0, -0.5]),
        seed=random.integers(0, 2**64, size, dtype=np.uint64),
        choice=some(range(4)),
        position=some(range(1000)),
        bias=[{int(i): 2.5 for i in random.choice(vocabulary, row % 4)} for row in range(size)],
        counts=[{int(i): 1 for i in random.choice(vocabulary, row % 5)} for row in range(size)],
        mask=pack_mask(random.random((size, vocabulary)) < 0.7),
        targets=random.integers(-1, vocabulary, size),
        logprobs=True,
        top_logprobs=7,
    )
    together = sample_on_host(logits, batch)
    fields = [field.name for field in dataclasses.fields(batch)]
    for first, stop in [*((row, row + 1) for row in range(size)), (3, 9), (4, 4)]:
        index = slice(first, stop)
        changes: dict[str, Any] = {
            name: getattr(batch, name)[index]
            for name in fields
            if isinstance(getattr(batch, name), np.ndarray)
        }
        changes |= {"bias": rows_of(batch.bias, index), "counts": rows_of(batch.counts, index)}
        alone = sample_on_host(logits[index], dataclasses.replace(batch, **changes))
        for field in dataclasses.fields(alone):
            np.testing.assert_array_equal(
                getattr(alone, field.name), getattr(together, field.name)[index]
            )


def test_log_probabilities(sampling_batch: Make) -> None:
    random = np.random.default_rng(8)
    logits = (random.normal(size=(9, 101)) * 5).astype(np.float32)
    logits[3, 5:] = -np.inf
    logits[4] = 7
    logits[5, ::2] = 3e38
    logits[6] = np.round(logits[6] / 4)  # many equals
    targets = np.array([-1, 0, 100, 50, 7, 0, -1, 3, 3])
    batch = sampling_batch(
        9,
        draw=[True, False] * 4 + [True],
        temperature=0.7,
        position=np.arange(9),
        bias={1: 3.0},  # what is reported is the model's, not the sampler's
        counts={2: 1},
        repetition=1.5,
        targets=targets,
        logprobs=True,
        top_logprobs=60,
    )
    given = logits.copy()
    out = sample_on_host(logits, batch)
    np.testing.assert_array_equal(logits, given)
    expected = scipy.special.log_softmax(logits.astype(np.float64), axis=1)
    assert out.logprobs is not None
    assert out.target_logprobs is not None
    assert out.top_ids is not None
    assert out.top_logprobs is not None
    assert out.tokens.dtype == np.int32
    assert out.top_ids.dtype == np.int32
    for array in (out.logprobs, out.target_logprobs, out.top_logprobs):
        assert array.dtype == np.float32
    close = {"rtol": 1e-6, "atol": 1e-6}
    for row in range(9):
        if batch.draw[row]:
            np.testing.assert_allclose(out.logprobs[row], expected[row, out.tokens[row]], **close)
        target = 0.0 if targets[row] < 0 else expected[row, targets[row]]
        np.testing.assert_allclose(out.target_logprobs[row], target, **close)
        by_size = sorted(range(101), key=lambda token: (-logits[row, token], token))[:60]
        assert out.top_ids[row].tolist() == by_size
        np.testing.assert_allclose(out.top_logprobs[row], expected[row, by_size], **close)


def test_what_was_not_asked_for_is_left_out(sampling_batch: Make) -> None:
    out = sample_on_host(np.zeros((2, 5), np.float32), sampling_batch(2))
    assert out.logprobs is None
    assert out.target_logprobs is None
    assert out.top_ids is None
    assert out.top_logprobs is None


def test_the_lower_id_comes_first_among_equals(sampling_batch: Make) -> None:
    logits = np.array([0, 1, 1, 0, 1, 1, 0], np.float32)
    batch = sampling_batch(2, temperature=0, top_logprobs=5)
    out = sample_on_host(np.stack([logits, -logits]), batch)
    assert out.tokens.tolist() == [1, 0]
    assert out.top_ids is not None
    assert out.top_ids.tolist() == [[1, 2, 4, 5, 0], [0, 3, 6, 1, 2]]
    rows = np.tile(logits, (300, 1))
    for fields, support in (
        ({"top_k": 3}, {1, 2, 4}),
        ({"top_k": 5}, {0, 1, 2, 4, 5}),
        ({"top_p": 0.3}, {1, 2}),
        ({"min_p": 1}, {1, 2, 4, 5}),
        ({"typical_p": 0.3}, {1, 2}),
        ({"typical_p": 0.9}, {0, 1, 2, 3, 4, 5}),
        ({"top_k": 3, "top_p": 0.5}, {1, 2}),
        ({"top_k": 4, "top_p": 0.5}, {1, 2}),  # exactly half
        ({"top_k": 4, "typical_p": 0.75}, {1, 2, 4}),
    ):
        batch = sampling_batch(300, position=np.arange(300), **fields)
        assert set(sample_on_host(rows, batch).tokens.tolist()) == support


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 5, 31, 32, 33, 63, 65])
def test_odd_vocabularies(sampling_batch: Make, pack_mask: Any, vocabulary: int) -> None:
    logits = np.zeros((vocabulary * 2, vocabulary), np.float32)
    allowed = np.tile(np.eye(vocabulary, dtype=np.bool_), (2, 1))
    batch = sampling_batch(
        vocabulary * 2,
        temperature=[0] * vocabulary + [1] * vocabulary,
        mask=pack_mask(allowed),
        top_logprobs=vocabulary,
        logprobs=True,
    )
    out = sample_on_host(logits, batch)
    assert out.tokens.tolist() == list(range(vocabulary)) * 2
    assert out.top_ids is not None
    assert out.top_ids[0].tolist() == list(range(vocabulary))
    np.testing.assert_allclose(out.logprobs, -np.log(vocabulary), rtol=1e-6)


def test_one_token_vocabulary_with_every_cut(sampling_batch: Make) -> None:
    batch = sampling_batch(
        1, top_k=1, top_p=0.1, min_p=1, typical_p=0.1, top_logprobs=1, targets=[0], logprobs=True
    )
    out = sample_on_host(np.array([[-4]], np.float32), batch)
    assert out.tokens.tolist() == [0]
    assert out.logprobs is not None
    assert out.target_logprobs is not None
    assert out.logprobs.tolist() == out.target_logprobs.tolist() == [0]


def test_no_rows(sampling_batch: Make) -> None:
    batch = sampling_batch(0, logprobs=True, top_logprobs=3, targets=[], bias=[], counts=[])
    out = sample_on_host(np.zeros((0, 17), np.float32), batch)
    assert out.tokens.shape == (0,)
    assert out.logprobs is not None
    assert out.logprobs.shape == (0,)
    assert out.target_logprobs is not None
    assert out.target_logprobs.shape == (0,)
    assert out.top_ids is not None
    assert out.top_ids.shape == (0, 3)
    assert out.top_logprobs is not None
    assert out.top_logprobs.shape == (0, 3)


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-6, 1.0, 100.0])
@pytest.mark.parametrize("cut", [{}, {"top_k": 2, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.9}])
@pytest.mark.filterwarnings("error")
def test_extreme_logits(sampling_batch: Make, temperature: float, cut: dict[str, float]) -> None:
    rows = np.array(
        [
            [1e30, -1e30, 0, -np.inf],
            [-np.inf, -np.inf, -3e38, -np.inf],
            [-3.4e38, 3.4e38, -3.4e38, 3.3e38],
            [0, np.nan, 1e6, np.nan],
            [0, np.inf, 5, -np.inf],
            [1e-40, -1e-40, -1e4, -1e4],
        ],
        np.float32,
    )
    batch = sampling_batch(
        6,
        temperature=temperature,
        logprobs=True,
        top_logprobs=4,
        repetition=[1, 1, 3, 1, 1, 1],
        counts={0: 1},
        position=np.arange(6),
        **cut,
    )
    out = sample_on_host(rows, batch)
    assert out.tokens[:5].tolist() == [0, 2, 1, 2, 1]
    assert out.tokens[5] in (
        [0] if temperature in (0.0, 1e-45) else [0, 1] if temperature < 100 else range(4)
    )
    assert out.logprobs is not None
    assert not np.isnan(out.logprobs).any()
    np.testing.assert_array_equal(out.logprobs[:5], 0)
    assert out.top_ids is not None
    assert out.top_logprobs is not None
    assert out.top_ids[3].tolist() == [2, 0, 1, 3]
    assert out.top_logprobs[3].tolist() == [0, -1e6, -np.inf, -np.inf]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [-np.inf, np.nan])
@pytest.mark.filterwarnings("error")
def test_a_row_without_any_probability(
    sampling_batch: Make, pack_mask: Any, temperature: float, value: float
) -> None:
    rows = np.full((2, 40), value, np.float32)
    fields = {"temperature": temperature, "logprobs": True, "top_logprobs": 2, "targets": [1, -1]}
    plain = sample_on_host(rows, sampling_batch(2, top_p=0.5, top_k=3, **fields))
    assert plain.tokens.tolist() == [0, 0]
    assert plain.logprobs is not None
    assert plain.logprobs.tolist() == [-np.inf, -np.inf]
    assert plain.target_logprobs is not None
    assert plain.target_logprobs.tolist() == [-np.inf, 0]
    assert plain.top_ids is not None
    assert plain.top_ids.tolist() == [[0, 1], [0, 1]]
    allowed = np.zeros((2, 40), np.bool_)
    allowed[0, 37:] = True
    masked = sample_on_host(rows, sampling_batch(2, mask=pack_mask(allowed), **fields))
    assert masked.tokens.tolist() == [37, 0]


@pytest.mark.filterwarnings("error")
def test_overflow_in_bias_and_penalties_stays_finite(sampling_batch: Make) -> None:
    logits = np.array([[3e38, 2e38, 0, -3e38]], np.float32)
    batch = sampling_batch(
        1, temperature=0, bias={1: 3e38, 3: -3e38}, repetition=0.01, counts={2: 1, 0: 1}
    )
    assert sample_on_host(logits, batch).tokens.tolist() == [0]  # both saturate: the lower id
    batch = sampling_batch(1, bias={0: np.nan, 1: -np.inf}, position=2)
    assert sample_on_host(logits, batch).tokens.tolist() == [2]


def test_rows_that_only_report_need_no_sampling(sampling_batch: Make) -> None:
    batch = sampling_batch(2, draw=[False, True], temperature=0, targets=[2, -1])
    out = sample_on_host(np.array([[0, 0, 9], [0, 7, 0]], np.float32), batch)
    assert out.tokens[1] == 1
    assert out.target_logprobs is not None
    assert out.target_logprobs[0] == pytest.approx(-np.log1p(2 * np.exp(-9.0)), rel=1e-4)
