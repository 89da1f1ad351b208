"""When the load generator sends: all at once, Poisson, gamma, or at a growing rate."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class RampUp:
    """Request rates, in requests per second, that grow from the first request to the last."""

    strategy: Literal["linear", "exponential"]
    start_rps: float
    end_rps: float

    def rates(self, count: int) -> list[float]:
        progress = [index / max(count - 1, 1) for index in range(count)]
        if self.strategy == "linear":
            return [self.start_rps + (self.end_rps - self.start_rps) * part for part in progress]
        return [self.start_rps * (self.end_rps / self.start_rps) ** part for part in progress]


def arrivals(
    count: int, *, rate: float, burstiness: float, ramp_up: RampUp | None, seed: int
) -> list[float]:
    """Seconds after the start at which each of `count` requests is sent, in order.

    rate: requests per second; infinite: all at once. Intervals follow a gamma distribution of
    shape `burstiness` and mean 1 / rate: 1 is a Poisson process, less comes in bursts, more is
    evener. At a constant rate all intervals are then stretched alike so that the last request is
    sent at count / rate exactly and the load offered does not depend on the seed. With `ramp_up`,
    its rates stand in place of `rate`.
    """
    if ramp_up is None and math.isinf(rate):
        return [0.0] * count
    rates = np.array(ramp_up.rates(count) if ramp_up else [rate] * count)
    random = np.random.default_rng([seed, round(burstiness * 1e6)])
    times = np.cumsum(random.gamma(burstiness, 1 / burstiness, count) / rates)
    if ramp_up is None and count and times[-1] > 0:
        times *= count / rate / times[-1]
    spread: list[float] = times.tolist()
    return spread
