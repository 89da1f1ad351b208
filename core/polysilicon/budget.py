"""How many tokens a step may compute, from what steps were measured to cost."""

from __future__ import annotations

import dataclasses
from collections import deque

import numpy as np

MIN_CHUNK = 16
"""Prefill tokens that a step may have even where they cost running streams their TPOT: with fewer,
reading the weights costs more than the tokens."""

_FORGETTING = 0.99
_RIDGE = 1e-3
_MIN_STEPS = 8
_MOST_UNSEEN = 512
# Where steps do not tell shares apart, more goes to the one whose unit is small against its count:
# rather to decodes than to the constant.
_UNITS = np.array([4.0, 64.0, 4.0, 8192.0])

_Vector = np.ndarray[tuple[int], np.dtype[np.float64]]


class StepCost:
    """Seconds of a step as a sum: a constant, and shares of each prefill token, each decode and
    each KV slot that decodes read. Fitted to measured steps by ridge regression over sums that
    forget exponentially, so that it follows load and frequency."""

    def __init__(self) -> None:
        self._squares = np.eye(4) * _RIDGE
        self._products = np.zeros(4)
        self._fitted = np.zeros(4)
        self._unseen: deque[tuple[int, int, int, float]] = deque(maxlen=_MOST_UNSEEN)
        self._steps = 0

    @property
    def is_known(self) -> bool:
        """Whether enough steps were measured for predictions."""
        return self._steps >= _MIN_STEPS

    def observe(self, *, prefill: int, decodes: int, context: int, seconds: float) -> None:
        """Take in a step. context: KV slots that its decodes read, of all sequences."""
        self._unseen.append((prefill, decodes, context, seconds))
        self._steps += 1

    @property
    def _costs(self) -> _Vector:
        """The shares by unit. Fitted when they are asked for, which without an SLO is never."""
        if self._unseen:
            for prefill, decodes, context, seconds in self._unseen:
                features = _features(prefill, decodes, context)
                self._squares *= _FORGETTING
                self._products *= _FORGETTING
                self._squares += np.outer(features, features)
                self._products += features * seconds
                self._squares.flat[::5] += (1 - _FORGETTING) * _RIDGE
            self._unseen.clear()
            # A share that comes out negative is one that the steps so far do not tell apart.
            self._fitted = np.maximum(np.linalg.solve(self._squares, self._products), 0.0)
        return self._fitted

    def seconds(self, *, prefill: int, decodes: int, context: int) -> float:
        """What a step will take."""
        return float(self._costs @ _features(prefill, decodes, context))

    def prefill_seconds(self, tokens: int) -> float:
        """What prefill tokens take by themselves, in large steps."""
        return float(self._costs[1] / _UNITS[1]) * tokens

    def prefill_within(self, seconds: float, *, decodes: int, context: int) -> int:
        """Prefill tokens for which a step that has these decodes stays below `seconds`."""
        share = self.prefill_seconds(1)
        rest = seconds - self.seconds(prefill=0, decodes=decodes, context=context)
        return max(0, min(int(rest / share), 2**31 - 1)) if share > 0 else 2**31 - 1


def _features(prefill: int, decodes: int, context: int) -> _Vector:
    features: _Vector = np.array([1.0, prefill, decodes, context]) / _UNITS
    return features


@dataclasses.dataclass
class StepBudget:
    """Tokens that one step may compute. Decodes are not held back by `limit`, and at least one
    prefill token runs beside them: a running stream goes on, and a waiting prompt comes nearer, in
    every step. Only `ceiling`, which the device has shown that it has no memory beyond, binds all.
    """

    limit: int
    ceiling: int = 2**31 - 1
    left: int = 0

    def start(self, decodes: int, within: int | None = None) -> None:
        """Begin a step. within: prefill tokens that the TPOT of the decodes leaves time for."""
        prefill = self.limit - decodes
        if within is not None:
            prefill = min(prefill, max(within, MIN_CHUNK))
        self.left = min(max(prefill, 1), self.ceiling - decodes)
