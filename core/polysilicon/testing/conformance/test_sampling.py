"""Sampling on the device against sampling on the host, from the device's own logits."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from polysilicon.backend import SampledTokens, SamplingBatch, SparseRows, sample_on_host
from polysilicon.testing import noise
from polysilicon.testing.batches import Chunk, make_batch
from polysilicon.testing.kit import Kit, as_forward
from polysilicon.testing.sampling import drawing, sampling

CLOSE = 3e-5
"""Differences of adjusted logits that float32 arithmetic may turn round."""


def random_rows(
    kit: Kit, rows: int, vocabulary: int, dtype: type[np.generic], size: int
) -> SparseRows:
    """Up to `size` ids a row, some rows with none."""
    counts = kit.rng.integers(0, min(size, vocabulary) + 1, rows)
    counts[0] = 0
    ids = [kit.rng.permutation(vocabulary)[:count] for count in counts]
    total = int(counts.sum())
    values = kit.rng.normal(0, 3, total) if dtype is np.float32 else kit.rng.integers(0, 4, total)
    return SparseRows(
        start=np.cumsum([0, *counts]).astype(np.int32),
        ids=np.concatenate(ids).astype(np.int32),
        values=values.astype(dtype),
    )


def random_mask(kit: Kit, rows: int, vocabulary: int) -> npt.NDArray[np.uint32]:
    """About half of the ids, one at least, and in the last row only that one. Bits past the
    vocabulary are set too."""
    words = -(-vocabulary // 32)
    mask = kit.rng.integers(0, 2**32, (rows, words), np.uint32)
    mask[-1] = 0
    only = kit.rng.integers(0, vocabulary, rows)
    mask[np.arange(rows), only // 32] |= np.left_shift(np.uint32(1), (only % 32).astype(np.uint32))
    return mask


class Sampled:
    """One step's logits, and samples from them on the device and on the host."""

    def __init__(self, kit: Kit, logits: npt.NDArray[np.float32]) -> None:
        self.kit = kit
        table, _ = kit.dense(logits)
        program = kit.device.compile(as_forward(lambda ops, batch: ops.embed(table, batch.tokens)))
        # The logits come from other rows of the step than their own numbers say.
        rows = len(logits)
        tokens = [0, *range(rows), 0]
        batch = make_batch([Chunk(tokens=tokens)], logit_rows=range(1, rows + 1))
        self.pending = program(batch, None)
        self.logits = self.pending.result().logits

    def check(self, batch: SamplingBatch, *, exact: bool = False) -> SampledTokens:
        """Hold the device's sample to the host's; gives back the device's.

        exact: no rounding comes between the logits and the choice, so that every row must agree.
        Otherwise the rows count whose token stands when the logits change by `CLOSE`.
        """
        before = frozen_arrays(batch)
        actual = self.kit.device.sample(self.pending, batch).result()
        assert frozen_arrays(batch) == before, "sampling changed the batch's arrays"
        expected = sample_on_host(self.logits, batch)
        drawn = batch.draw.copy()
        if not exact:
            drawn &= self.stable(batch, expected)
            enough = np.count_nonzero(batch.draw) // 4
            assert np.count_nonzero(drawn) >= enough, "too few rows are clear of ties"
        assert actual.tokens.dtype == np.int32
        assert np.array_equal(actual.tokens[drawn], expected.tokens[drawn])
        self.check_reports(batch, drawn, actual, expected)
        return actual

    def stable(self, batch: SamplingBatch, expected: SampledTokens) -> npt.NDArray[np.bool_]:
        same = np.ones(len(self.logits), np.bool_)
        for _ in range(4):
            shift = self.kit.rng.uniform(-CLOSE, CLOSE, self.logits.shape)
            moved = sample_on_host((self.logits + shift).astype(np.float32), batch)
            same &= moved.tokens == expected.tokens
        return same

    def check_reports(
        self,
        batch: SamplingBatch,
        drawn: npt.NDArray[np.bool_],
        actual: SampledTokens,
        expected: SampledTokens,
    ) -> None:
        tolerance = {"atol": 2e-5 * (1 + np.abs(self.logits).max()), "rtol": 1e-5}
        for name in ("logprobs", "target_logprobs", "top_logprobs"):
            own, wanted = getattr(actual, name), getattr(expected, name)
            assert (own is None) == (wanted is None), name
            if own is not None:
                rows = drawn if name == "logprobs" else np.ones_like(drawn)
                assert own.shape == wanted.shape
                np.testing.assert_allclose(own[rows], wanted[rows], **tolerance, err_msg=name)
        assert (actual.top_ids is None) == (expected.top_ids is None)
        if actual.top_ids is not None and expected.top_ids is not None:
            assert np.array_equal(actual.top_ids, expected.top_ids)


def frozen_arrays(batch: SamplingBatch) -> list[bytes]:
    arrays: list[Any] = []
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        arrays += (
            [value.start, value.ids, value.values] if isinstance(value, SparseRows) else [value]
        )
    return [array.tobytes() for array in arrays if isinstance(array, np.ndarray)]


@pytest.fixture(params=[(1, 300), (9, 7), (9, 4099), (33, 321)], ids=lambda p: f"{p[0]}x{p[1]}")
def sampled(kit: Kit, request: pytest.FixtureRequest) -> Sampled:
    rows, vocabulary = request.param
    return Sampled(kit, kit.normal(rows, vocabulary, scale=3))


@pytest.fixture
def many(kit: Kit) -> Sampled:
    return Sampled(kit, kit.normal(40, 500, scale=2))


def test_greedy(sampled: Sampled) -> None:
    sampled.check(sampling(len(sampled.logits)), exact=True)


def test_greedy_takes_the_lowest_of_equals(kit: Kit) -> None:
    logits = np.full((4, 65), -1, np.float32)
    logits[0, [3, 40, 64]] = 2
    logits[1, [64]] = 2
    logits[3, [31, 32]] = 2
    actual = Sampled(kit, logits).check(sampling(4), exact=True)
    assert actual.tokens.tolist() == [3, 64, 0, 31]


def test_draws(kit: Kit, sampled: Sampled) -> None:
    sampled.check(drawing(kit, len(sampled.logits)))


@pytest.mark.parametrize("temperature", [0.01, 0.5, 1.0, 2.0, 100.0])
def test_temperature(kit: Kit, many: Sampled, temperature: float) -> None:
    many.check(drawing(kit, 40, temperature=temperature))


@pytest.mark.parametrize("top_k", [1, 2, 50, 499, 500, 10_000])
def test_top_k(kit: Kit, many: Sampled, top_k: int) -> None:
    many.check(drawing(kit, 40, temperature=2.0, top_k=top_k))


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.99])
def test_top_p(kit: Kit, many: Sampled, top_p: float) -> None:
    many.check(drawing(kit, 40, temperature=2.0, top_p=top_p))


@pytest.mark.parametrize("min_p", [0.001, 0.05, 0.5, 1.0])
def test_min_p(kit: Kit, many: Sampled, min_p: float) -> None:
    many.check(drawing(kit, 40, temperature=2.0, min_p=min_p))


@pytest.mark.parametrize("typical_p", [1e-6, 0.2, 0.5, 0.95])
def test_typical_p(kit: Kit, many: Sampled, typical_p: float) -> None:
    many.check(drawing(kit, 40, temperature=2.0, typical_p=typical_p))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "fields",
    [{"repetition": 1.5}, {"repetition": 0.7}, {"presence": 1.2}, {"frequency": 0.9},
     {"frequency": -0.5}, {"repetition": 1.3, "presence": 0.4, "frequency": 0.3}],
    ids=lambda fields: "+".join(f"{name}={value}" for name, value in fields.items()),
)  # fmt: skip
def test_penalties(kit: Kit, many: Sampled, fields: dict[str, float], temperature: float) -> None:
    """Ids that were generated, and ids that only the prompt has (a count of 0)."""
    counts = random_rows(kit, 40, 500, np.int32, 400)
    many.check(drawing(kit, 40, temperature=temperature, counts=counts, **fields))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bias(kit: Kit, sampled: Sampled, temperature: float) -> None:
    rows, vocabulary = sampled.logits.shape
    bias = random_rows(kit, rows, vocabulary, np.float32, 200)
    sampled.check(drawing(kit, rows, temperature=temperature, bias=bias))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_mask(kit: Kit, sampled: Sampled, temperature: float) -> None:
    rows, vocabulary = sampled.logits.shape
    mask = random_mask(kit, rows, vocabulary)
    batch = drawing(kit, rows, temperature=temperature, mask=mask)
    actual = sampled.check(batch)
    words = mask[np.arange(rows), actual.tokens // 32]
    assert (words >> (actual.tokens % 32).astype(np.uint32) & 1).all(), "a masked id was drawn"


def test_everything_at_once(kit: Kit) -> None:
    """Every row with parameters of its own, greedy rows among them, and all the lists."""
    rows, vocabulary = 64, 700
    sampled = Sampled(kit, kit.normal(rows, vocabulary, scale=2))
    rng = kit.rng
    sampled.check(
        drawing(
            kit,
            rows,
            draw=rng.random(rows) < 0.9,
            temperature=rng.choice([0, 0.3, 1, 1.7], rows),
            top_k=rng.choice([0, 1, 20, 300], rows),
            top_p=rng.choice([1, 0.95, 0.5], rows),
            min_p=rng.choice([0, 0.02, 0.2], rows),
            typical_p=rng.choice([1, 0.9, 0.4], rows),
            repetition=rng.choice([1, 1.2, 0.8], rows),
            presence=rng.choice([0, 0.5], rows),
            frequency=rng.choice([0, 0.2], rows),
            bias=random_rows(kit, rows, vocabulary, np.float32, 30),
            counts=random_rows(kit, rows, vocabulary, np.int32, 90),
            mask=random_mask(kit, rows, vocabulary),
            targets=rng.integers(-1, vocabulary, rows).astype(np.int32),
            logprobs=True,
            top_logprobs=7,
        )
    )


@pytest.mark.parametrize("top_logprobs", [0, 1, 5])
@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs(
    kit: Kit, sampled: Sampled, temperature: float, logprobs: bool, top_logprobs: int
) -> None:
    """They are the model's, whatever bias, mask and temperature do to the draw."""
    rows, vocabulary = sampled.logits.shape
    sampled.check(
        drawing(
            kit,
            rows,
            temperature=temperature,
            bias=random_rows(kit, rows, vocabulary, np.float32, 20),
            mask=random_mask(kit, rows, vocabulary),
            logprobs=logprobs,
            top_logprobs=top_logprobs,
        )
    )


def test_top_logprobs_of_equals(kit: Kit) -> None:
    """The lower id first."""
    logits = np.zeros((2, 70), np.float32)
    logits[1, 5], logits[1, 69] = 1, 1
    actual = Sampled(kit, logits).check(sampling(2, top_logprobs=4), exact=True)
    assert actual.top_ids is not None
    assert actual.top_ids.tolist() == [[0, 1, 2, 3], [5, 69, 0, 1]]


def test_targets(kit: Kit, sampled: Sampled) -> None:
    """Prompt log-probabilities: rows that draw nothing, some without a target."""
    rows, vocabulary = sampled.logits.shape
    targets = np.array(kit.rng.integers(-1, vocabulary, rows), np.int32)
    targets[0] = -1
    actual = sampled.check(sampling(rows, draw=False, targets=targets))
    assert actual.target_logprobs is not None
    assert actual.target_logprobs[0] == 0


def test_vectors_of_the_generator() -> None:
    """The kit's own generator gives the published vectors."""
    text = importlib.resources.files("polysilicon.testing").joinpath("philox_vectors.json")
    vectors = json.loads(text.read_text())["vectors"]
    assert vectors
    for vector in vectors:
        bits = noise.word(*(vector[name] for name in ("seed", "choice", "position", "id")))
        assert bits == vector["bits"]
        assert noise.uniform(bits) == float.fromhex(vector["uniform"])


def test_draws_follow_the_generator(kit: Kit) -> None:
    """With equal logits the largest noise wins, for keys at every edge."""
    vocabulary = 203
    edges = [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1]
    keys = [(seed, 0, 0) for seed in edges] + [(7, choice, 0) for choice in (1, 2, 2**32 - 1)]
    keys += [(7, 0, position) for position in (1, 2, 1000, 2**32 - 1)]
    keys += [
        (int(seed), int(choice), int(position))
        for seed, choice, position in kit.rng.integers(0, [2**63, 2**32, 2**32], (8, 3), np.uint64)
    ]
    sampled = Sampled(kit, np.zeros((len(keys), vocabulary), np.float32))
    seeds, choices, positions = zip(*keys, strict=True)
    batch = sampling(
        len(keys),
        temperature=1,
        seed=np.array(seeds, np.uint64),
        choice=np.array(choices, np.uint32),
        position=np.array(positions, np.uint32),
    )
    tokens = kit.device.sample(sampled.pending, batch).result().tokens
    clear = 0
    for token, key in zip(tokens, keys, strict=True):
        draws = noise.gumbel(*key, vocabulary)
        best, second = np.sort(draws)[[-1, -2]]
        if best - second > CLOSE:
            clear += 1
            assert token == draws.argmax(), key
    assert clear > len(keys) // 2


def test_rows_do_not_depend_on_each_other(kit: Kit) -> None:
    """A row draws the same alone, among others and in another place."""
    logits = kit.normal(12, 300)
    together = Sampled(kit, logits)
    batch = drawing(kit, 12, top_p=0.9, top_k=100)
    tokens = kit.device.sample(together.pending, batch).result().tokens
    stable = together.stable(batch, sample_on_host(together.logits, batch))
    order = kit.rng.permutation(12)
    fields = ("temperature", "top_k", "top_p", "seed", "choice", "position")
    for rows in (order, order[:5], order[:1]):
        part = sampling(len(rows), **{name: getattr(batch, name)[rows] for name in fields})
        alone = kit.device.sample(Sampled(kit, logits[rows]).pending, part).result().tokens
        assert np.array_equal(alone[stable[rows]], tokens[rows][stable[rows]])
