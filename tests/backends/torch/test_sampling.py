"""Sampling kernels against sampling on the host: ties, hostile logits, every block size."""

import dataclasses

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from polysilicon.backend import SampledTokens, SparseRows, sample_on_host
from polysilicon.sampling import philox
from polysilicon.testing.sampling import sampling
from polysilicon_torch.runtime import HostRuntime
from polysilicon_torch.sampling import upload_sampling
from polysilicon_torch.target import INTERPRETER
from polysilicon_torch.triton import sampling as kernels
from polysilicon_torch.triton.sampling_noise import logarithm, noise_from, noise_of
from polysilicon_torch.tuning import Tuning

# Hostile numbers are the point; numpy, which interprets here, remarks on them.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered")

CLOSE = 3e-5
"""Differences of adjusted logits that float32 arithmetic may turn round."""


def tuned(chunk, cut):
    """Blocks so small that a short row has several."""
    tuning = Tuning.of(INTERPRETER).over("sampling", {"BLOCK": chunk})
    return tuning.over("sampling_cut", {"BLOCK": cut}).over("sampling_lists", {"BLOCK": 16})


SMALL = tuned(128, 128)


def sample(logits, batch, tuning=SMALL):
    result = kernels.sample(
        torch.from_numpy(logits), upload_sampling(HostRuntime(), batch), tuning=tuning
    )
    fields = {
        field.name: getattr(result, field.name) for field in dataclasses.fields(SampledTokens)
    }
    return SampledTokens(
        **{name: None if value is None else value.numpy() for name, value in fields.items()}
    )


def check(logits, batch, rng, tuning=SMALL):
    """Hold a sample to the host's; rows count whose token stands when logits change by CLOSE."""
    actual, expected = sample(logits, batch, tuning), sample_on_host(logits, batch)
    drawn = batch.draw.copy()
    for _ in range(4):
        shift = rng.uniform(-CLOSE, CLOSE, logits.shape).astype(np.float32)
        with np.errstate(over="ignore"):
            drawn &= sample_on_host(logits + shift, batch).tokens == expected.tokens
    assert np.array_equal(actual.tokens[drawn], expected.tokens[drawn])
    same = actual.tokens == expected.tokens
    finite = logits[np.isfinite(logits)]
    tolerance = {"atol": 2e-6 * (1 + np.abs(finite).max(initial=0)), "rtol": 1e-5}
    for name in ("logprobs", "target_logprobs", "top_logprobs"):
        own, wanted = getattr(actual, name), getattr(expected, name)
        assert (own is None) == (wanted is None), name
        if own is not None:
            rows = batch.draw & same if name == "logprobs" else slice(None)
            np.testing.assert_allclose(own[rows], wanted[rows], **tolerance, err_msg=name)
    assert (actual.top_ids is None) == (expected.top_ids is None)
    if actual.top_ids is not None:
        assert np.array_equal(actual.top_ids, expected.top_ids)
    return int(drawn.sum())


def lists(rng, rows, vocabulary, dtype, most):
    counts = rng.integers(0, min(most, vocabulary) + 1, rows)
    ids = [rng.permutation(vocabulary)[:count] for count in counts]
    total = int(counts.sum())
    values = rng.normal(0, 3, total) if dtype is np.float32 else rng.integers(0, 4, total)
    return SparseRows(
        start=np.cumsum([0, *counts]).astype(np.int32),
        ids=np.concatenate(ids).astype(np.int32),
        values=values.astype(dtype),
    )


def random_logits(rng, rows, vocabulary):
    """Flat, peaked, or of few values; with NaN, infinities and rows of nothing."""
    logits = rng.normal(0, rng.choice([0.3, 2, 5]), (rows, vocabulary)).astype(np.float32)
    if rng.random() < 0.3:
        logits = np.round(logits * 2) / 2
    for value in (-np.inf, np.nan, np.inf):
        if rng.random() < 0.4:
            logits[rng.random(logits.shape) < 0.05] = value
    if rng.random() < 0.3:
        logits[rng.integers(rows)] = -np.inf
    return logits


def random_batch(rng, rows, vocabulary):
    def maybe(value, chance=0.4):
        return value if rng.random() < chance else None

    return sampling(
        rows,
        draw=rng.random(rows) < 0.9,
        temperature=rng.choice([0, 0.3, 1, 1.7, 1e-30], rows),
        top_k=rng.choice([0, 0, 1, 20, vocabulary, 10 * vocabulary], rows),
        top_p=rng.choice([1, 1, 0.95, 0.5, 1e-6], rows),
        min_p=rng.choice([0, 0, 0.02, 1], rows),
        typical_p=rng.choice([1, 0.9, 0.4, 1e-6], rows) if rng.random() < 0.5 else 1,
        repetition=rng.choice([1, 1.2, 0.8], rows),
        presence=rng.choice([0, 0.5], rows),
        frequency=rng.choice([0, 0.2], rows),
        seed=rng.integers(0, 2**64, rows, np.uint64),
        choice=rng.integers(0, 2**32, rows, np.uint32),
        position=rng.integers(0, 2**32, rows, np.uint32),
        bias=maybe(lists(rng, rows, vocabulary, np.float32, 30)),
        counts=maybe(lists(rng, rows, vocabulary, np.int32, 40)),
        mask=maybe(rng.integers(0, 2**32, (rows, -(-vocabulary // 32)), np.uint32)),
        targets=maybe(rng.integers(-1, vocabulary, rows).astype(np.int32)),
        logprobs=bool(rng.random() < 0.5),
        top_logprobs=int(rng.integers(0, min(vocabulary, 9) + 1)),
    )


@pytest.mark.parametrize("vocabulary", [1, 2, 31, 33, 128, 300])
def test_random_batches(vocabulary):
    rng = np.random.default_rng()
    for _ in range(2):
        rows = int(rng.integers(1, 6))
        logits = random_logits(rng, rows, vocabulary)
        check(logits, random_batch(rng, rows, vocabulary), rng)


def test_empty_batch():
    result = sample(np.zeros((0, 40), np.float32), sampling(0, logprobs=True, top_logprobs=2))
    assert result.tokens.shape == result.logprobs.shape == (0,)
    assert result.top_ids.shape == (0, 2)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_p": 0.7},
        {"top_k": 150},
        {"typical_p": 0.6},
        {"min_p": 0.01},
        {"top_k": 100, "typical_p": 0.8, "top_p": 0.8, "min_p": 0.05},
    ],
    ids=lambda fields: "+".join(fields) or "all",
)
def test_draws(fields):
    """Rows nearly flat, so that each cut leaves many and the noise decides."""
    rng = np.random.default_rng()
    logits = rng.normal(0, 0.8, (4, 300)).astype(np.float32)
    seed = rng.integers(0, 2**64, 4, np.uint64)
    stable = check(logits, sampling(4, temperature=1.3, seed=seed, **fields), rng)
    assert stable >= 2


@pytest.mark.parametrize(
    "fields", [{"top_k": 70}, {"top_p": 0.35}, {"typical_p": 0.35}], ids=" ".join
)
def test_cuts_among_equals_keep_the_lower_ids(fields):
    """All of a row are equal: 70 of 200 ids are left, the lowest of them."""
    seeds = np.random.default_rng().integers(0, 2**64, 5, np.uint64)
    logits = np.full((5, 200), 1.5, np.float32)
    tokens = sample(logits, sampling(5, temperature=1, seed=seeds, **fields)).tokens
    wanted = [philox.gumbel(int(seed), 0, 0, 70).argmax() for seed in seeds]
    assert tokens.tolist() == wanted


def test_blocks_change_nothing():
    """Sums of weights are exact: where a cut falls does not depend on how a row is divided."""
    rng = np.random.default_rng()
    logits = np.round(rng.normal(0, 1, (4, 260)) * 4).astype(np.float32) / 4
    batch = sampling(
        4,
        temperature=1.5,
        top_p=[0.5, 0.9, 1, 0.8],
        typical_p=[1, 1, 0.7, 0.9],
        top_k=[0, 150, 0, 200],
        seed=rng.integers(0, 2**64, 4, np.uint64),
    )
    tokens = [sample(logits, batch, tuned(*blocks)).tokens for blocks in ((128, 64), (512, 512))]
    assert np.array_equal(*tokens)


def test_rows_in_parts(monkeypatch):
    """More rows than are worked on at once, lists among what is divided."""
    rng = np.random.default_rng()
    logits = random_logits(rng, 20, 20)
    batch = dataclasses.replace(
        random_batch(rng, 20, 20),
        typical_p=np.ones(20, np.float32),
        bias=lists(rng, 20, 20, np.float32, 9),
        counts=lists(rng, 20, 20, np.int32, 9),
        targets=rng.integers(-1, 20, 20).astype(np.int32),
        logprobs=True,
        top_logprobs=3,
    )
    whole = sample(logits, batch)
    monkeypatch.setattr(kernels, "_AT_ONCE", 1)
    parts = sample(logits, batch)
    for field in dataclasses.fields(SampledTokens):
        assert np.array_equal(getattr(whole, field.name), getattr(parts, field.name))


def test_nothing_is_left():
    """Rows at -inf throughout: the lowest id that the mask allows, and 0 where it allows none."""
    rows, vocabulary = 5, 1100 * 32 + 7
    logits = np.zeros((rows, vocabulary), np.float32)
    logits[[0, 2]] = -np.inf
    logits[4] = np.nan
    mask = np.zeros((rows, -(-vocabulary // 32)), np.uint32)
    mask[0, 1090] = 1 << 31 | 1 << 9
    mask[2, -1] = 1 << 7  # past the vocabulary
    mask[3, -1] = 1 << 6
    mask[4, 3] = 1 << 31
    for temperature, top_p in ((0, 1), (1, 1), (1, 0.5)):
        batch = sampling(rows, temperature=temperature, top_p=top_p, mask=mask)
        tokens = sample(logits, batch, tuned(32768, 4096)).tokens
        assert tokens.tolist() == [1090 * 32 + 9, 0, 0, vocabulary - 1, 3 * 32 + 31]
    assert not sample(logits, sampling(rows), tuned(32768, 4096)).tokens.any()


@pytest.mark.parametrize("count", [1, 7, 64, 65, 150])
def test_most_likely_ids(count):
    """Found one by one or by a sort, with ties across chunks and both zeros."""
    rng = np.random.default_rng()
    logits = rng.integers(-2, 3, (4, 150)).astype(np.float32)
    logits[0, rng.random(150) < 0.5] = -0.0
    logits[1, rng.random(150) < 0.7] = -np.inf
    logits[2] = -np.inf
    logits[3, :90] = np.nan
    check(logits, sampling(4, top_logprobs=count, logprobs=True), rng)


def test_certain_token_has_no_positive_logprob():
    """Where one id has all of the mass, and where float32 has few steps between logits."""
    logits = np.zeros((3, 100), np.float32)
    logits[0, 3], logits[1, 3] = 30, 12
    logits[2] = 3e38
    result = sample(logits, sampling(3, logprobs=True))
    exact = sample_on_host(logits, sampling(3, logprobs=True))
    assert (result.logprobs <= 0).all()
    np.testing.assert_allclose(result.logprobs, exact.logprobs, rtol=1e-5, atol=1e-7)


def test_drafted_rows_draw_what_single_steps_draw():
    """Rows of a chain of drafted tokens, each with its own position, as verification samples them,
    and a tree's, where two rows share one."""
    rng = np.random.default_rng()
    logits = rng.normal(0, 2, (4, 90)).astype(np.float32)
    fields = {"temperature": 0.9, "top_p": 0.9, "seed": 12345, "choice": 2}
    positions = [41, 42, 43, 43]
    together = sample(logits, sampling(4, position=positions, **fields)).tokens
    for row, position in enumerate(positions):
        one = sampling(1, position=position, **fields)
        assert sample(logits[row : row + 1], one).tokens[0] == together[row]


@triton.jit
def noise_kernel(seed, choice, position, by_id, by_block, first, BLOCK: tl.constexpr):
    ids = first + tl.arange(0, BLOCK)
    keys = (tl.load(seed), tl.load(choice), tl.load(position))
    tl.store(by_id + tl.arange(0, BLOCK), noise_of(ids, keys[0], keys[1], keys[2]))
    block = noise_from(first, keys[0], keys[1], keys[2], BLOCK)
    tl.store(by_block + tl.arange(0, BLOCK), block)


@pytest.mark.parametrize("seed", [0, 2**32, 2**64 - 1])
@pytest.mark.parametrize("counter", [0, 7, 2**32 - 1])
def test_noise(seed, counter):
    """Both ways to draw it give the specified noise: exactly its uniforms, as the error against
    float64 logarithms of them shows."""
    tensors = [
        torch.from_numpy(np.array([value], dtype).view(f"i{np.dtype(dtype).itemsize}"))
        for value, dtype in ((seed, np.uint64), (counter, np.uint32), (counter // 3, np.uint32))
    ]
    results = torch.empty((2, 256))
    noise_kernel[(1,)](*tensors, results[0], results[1], 8192, BLOCK=256)
    uniform = philox.uniforms(seed, counter, counter // 3, 8192 + 256)[8192:].astype(np.float64)
    exact = -np.log(-np.log1p(-uniform))
    for noise in results.numpy():
        assert (np.abs(noise - exact) < 4 * np.spacing(np.float32(np.abs(exact) + 0.5))).all()


@triton.jit
def logarithm_kernel(x, y, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(y + places, logarithm(tl.load(x + places)))


def test_logarithm():
    """To a unit in the last place, from the least uniform to the largest exponential, and by 1."""
    rng = np.random.default_rng()
    parts = (
        np.exp(rng.uniform(np.log(2**-33), np.log(20), 4096)),
        rng.uniform(0.5, 2, 2048),
        1 + rng.uniform(-1e-5, 1e-5, 2046),
        [1, 1 - 2**-24],
    )
    x = np.concatenate(parts).astype(np.float32)
    y = torch.empty(len(x))
    logarithm_kernel[(1,)](torch.from_numpy(x), y, BLOCK=len(x))
    exact = np.log(x.astype(np.float64))
    assert (np.abs(y.numpy() - exact) <= np.spacing(np.abs(exact).astype(np.float32))).all()
    assert y[-2] == 0
