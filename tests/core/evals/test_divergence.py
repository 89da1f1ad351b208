"""Divergences against scipy's, and figures against their formulas."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special
import scipy.stats

from polysilicon.evals import divergence
from polysilicon.evals.divergence import aligned, compare
from polysilicon.evals.statistics import estimate, spread


def random_logits(rows: int, width: int) -> np.ndarray:
    rng = np.random.default_rng()
    logits = (rng.normal(0, 4, (rows, width)) + rng.normal(0, 50, (rows, 1))).astype(np.float32)
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[:, 0] = 0
    return logits


@pytest.mark.parametrize("block", [1, 1000, 1 << 20])
@pytest.mark.parametrize(("rows", "width"), [(1, 2), (7, 33), (40, 301)])
def test_a_comparison_is_that_of_scipy(monkeypatch, block, rows, width):
    monkeypatch.setattr(divergence, "_BLOCK", block)
    logits, reference = random_logits(rows, width), random_logits(rows, width)
    # Where the reference has a token, so has the model, in all rows but the last.
    logits[:-1][np.isneginf(logits[:-1])] = -30
    targets = np.random.default_rng().integers(0, width, rows)
    found = compare(logits, reference, targets)
    p = scipy.special.softmax(reference.astype(np.float64), axis=1)
    q = scipy.special.softmax(logits.astype(np.float64), axis=1)
    expected = scipy.special.rel_entr(p, q).sum(axis=1)
    np.testing.assert_allclose(found.divergence, expected, rtol=1e-9, atol=1e-12)
    at = np.arange(rows)
    for scores, probabilities in ((found.logprob, q), (found.reference, p)):
        with np.errstate(divide="ignore"):
            logprobs = np.log(probabilities[at, targets])
        np.testing.assert_allclose(scores, logprobs, rtol=1e-9, atol=1e-12)
    assert list(found.same_top) == list(p.argmax(axis=1) == q.argmax(axis=1))


def test_equal_distributions_do_not_diverge_whatever_their_constant():
    logits = np.array([[1.0, 5.0, 5.0, -np.inf], [0.0, -3.0, 2.0, 1.0]], np.float32)
    found = compare(logits + np.float32(64), logits, np.array([1, 0]))
    assert list(found.divergence) == [0, 0]
    assert found.same_top.all()
    assert list(found.logprob) == list(found.reference)


def test_what_is_no_number_has_no_probability():
    nothing = np.full((1, 4), -np.inf, np.float32)
    some = np.array([[0.0, np.nan, 1.0, -np.inf]], np.float32)
    clean = np.array([[0.0, -np.inf, 1.0, -np.inf]], np.float32)
    assert compare(some, clean, np.array([0])).divergence == [0]
    assert compare(some, clean, np.array([1])).logprob == [-np.inf]
    for pair in ((nothing, some), (some, nothing), (nothing, nothing)):
        assert compare(*pair, np.array([2])).divergence == [np.inf]
        assert not compare(*pair, np.array([2])).same_top
    infinite = np.array([[np.inf, 0.0, 0.0, 0.0]], np.float32)
    assert compare(infinite, some, np.array([0])).logprob == [0]


def test_a_token_that_only_the_reference_has_diverges_by_infinity():
    ours = np.array([[0.0, -np.inf]], np.float32)
    theirs = np.array([[0.0, 0.0]], np.float32)
    assert compare(ours, theirs, np.array([0])).divergence == [np.inf]
    assert compare(theirs, ours, np.array([0])).divergence == pytest.approx([np.log(2)])


@pytest.mark.parametrize("cuts", [([], []), ([3], [5]), ([1, 2, 9], [4, 9]), ([2, 4], [2, 4])])
def test_pieces_are_paired_by_row(cuts):
    rows = np.arange(20, dtype=np.float32).reshape(10, 2)
    pieces = [iter(np.split(rows, at)) for at in cuts]
    pairs = list(aligned(*pieces))
    assert all(len(ours) == len(theirs) > 0 for ours, theirs in pairs)
    for side in range(2):
        assert np.array_equal(np.concatenate([pair[side] for pair in pairs]), rows)
    assert list(aligned(iter(()), iter(()))) == []


def test_means_have_standard_errors():
    values = np.random.default_rng().normal(3, 2, 57)
    found = estimate(values)
    assert found.mean == pytest.approx(values.mean())
    assert found.error == pytest.approx(scipy.stats.sem(values))
    risen = found.exponential()
    assert risen.mean == pytest.approx(np.exp(values.mean()))
    assert risen.error == pytest.approx(np.exp(values.mean()) * scipy.stats.sem(values))
    shares = estimate(np.array([True, False, True, True]))
    assert shares.mean == 0.75
    # As lm-eval's: the root of p (1 - p) / (n - 1).
    assert shares.error == pytest.approx((0.75 * 0.25 / 3) ** 0.5)


def test_what_has_no_error_says_so():
    assert estimate(np.array([2.0])).error is None
    assert estimate(np.array([1.0, np.inf])).error is None
    assert estimate(np.array([1e9, 1e9])).exponential().mean == np.inf
    assert estimate(np.array([1e9, 1e9])).exponential().error is None


def test_percentiles_are_interpolated():
    values = np.random.default_rng().exponential(1, 31)
    found = spread("x", values)
    ordered = np.sort(values)
    for name, share in (("x_p50", 0.5), ("x_p90", 0.9), ("x_p99.9", 0.999)):
        place = share * 30
        low = int(place)
        high = min(low + 1, 30)
        expected = ordered[low] * (1 - place + low) + ordered[high] * (place - low)
        assert found[name] == pytest.approx(expected)
    assert found["x_max"] == ordered[-1]
    assert found["mean_x"] == pytest.approx(values.mean())
