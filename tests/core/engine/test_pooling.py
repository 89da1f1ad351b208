"""Pooling hidden states that come in pieces."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polysilicon.engine.pooling import Pooling


@given(
    kind=st.sampled_from(["mean", "last"]),
    length=st.integers(1, 40),
    chunks=st.lists(st.integers(1, 12), min_size=40, max_size=40),
    restarts=st.sets(st.integers(0, 10), max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_pieces_and_repetitions_change_nothing(
    kind: Literal["mean", "last"], length: int, chunks: list[int], restarts: set[int], seed: int
) -> None:
    states = np.random.default_rng(seed).standard_normal((length, 5)).astype(np.float32)
    pooling = Pooling(kind, length)
    start = 0
    for index, size in enumerate(chunks):
        pooling.take(states[start : start + size], start)
        start = min(start + size, length)
        if start == length:
            break
        if index in restarts:
            start = 0
    else:
        pooling.take(states[start:], start)
    expected = states.mean(axis=0, dtype=np.float64) if kind == "mean" else states[-1]
    assert pooling.result() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_the_last_state_needs_no_others() -> None:
    pooling = Pooling("last", 10)
    pooling.take(np.array([[1.0, 2.0], [3.0, 4.0]], np.float32), 8)
    assert pooling.result() == (3.0, 4.0)


def test_missing_states_are_noticed() -> None:
    pooling = Pooling("mean", 10)
    with pytest.raises(AssertionError, match="missing"):
        pooling.take(np.zeros((2, 2), np.float32), 8)
