"""When requests are sent."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from polysilicon.bench.arrivals import RampUp, arrivals

COUNT = 4000


def gaps(**changes):
    fixed = {"rate": 5.0, "burstiness": 1.0, "ramp_up": None, "seed": 0}
    times = arrivals(COUNT, **fixed | changes)
    assert times == sorted(times)
    return np.diff([0.0, *times])


def test_an_infinite_rate_sends_all_at_once():
    assert arrivals(3, rate=math.inf, burstiness=1, ramp_up=None, seed=0) == [0, 0, 0]


def test_no_requests_have_no_times():
    assert arrivals(0, rate=2, burstiness=1, ramp_up=None, seed=0) == []


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_intervals_follow_the_gamma_distribution(burstiness):
    intervals = gaps(burstiness=burstiness)
    assert intervals.sum() == pytest.approx(COUNT / 5)
    # The coefficient of variation of a gamma distribution of shape k is 1 / sqrt(k).
    assert intervals.std() * 5 == pytest.approx(burstiness**-0.5, rel=0.1)
    test = stats.kstest(intervals, stats.gamma(burstiness, scale=1 / (5 * burstiness)).cdf)
    assert test.pvalue > 0.01
    other = stats.kstest(intervals, stats.gamma(burstiness * 1.5, scale=1 / 5).cdf)
    assert other.pvalue < 1e-6


def test_poisson_counts_have_the_variance_of_their_mean():
    times = np.cumsum(gaps())
    counts = np.bincount((times / 2).astype(int))[:-1]
    assert counts.mean() == pytest.approx(10, rel=0.05)
    assert counts.var() == pytest.approx(counts.mean(), rel=0.25)


def test_equal_seeds_give_equal_times():
    assert np.array_equal(gaps(seed=4), gaps(seed=4))
    assert not np.array_equal(gaps(seed=4), gaps(seed=5))


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_rates_grow_from_the_first_to_the_last(strategy):
    ramp = RampUp(strategy=strategy, start_rps=2, end_rps=32)
    middle = {"linear": 17, "exponential": 8}[strategy]
    assert [ramp.rates(5)[index] for index in (0, 2, 4)] == pytest.approx([2, middle, 32])
    assert ramp.rates(1) == [2]
    intervals = gaps(rate=math.inf, ramp_up=ramp)
    for start, rate in ((0, 2), (COUNT // 2 - 100, middle), (COUNT - 200, 32)):
        assert 1 / intervals[start : start + 200].mean() == pytest.approx(rate, rel=0.3)
