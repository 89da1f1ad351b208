"""The frequencies of drawn tokens against probabilities computed independently in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats

from polysilicon.batch import SamplingBatch
from polysilicon.sampling.sampler import sample_on_host

DRAWS = 6000
LOGITS = np.array([1.5, -0.5, 0.3, 2.0, 0.0, 1.1, -2.0], np.float32)
Make = Callable[..., SamplingBatch]


def softmax(x: Any) -> Any:
    return scipy.special.softmax(np.asarray(x, np.float64))


def only(x: Any, kept: list[int]) -> Any:
    """x at the ids kept, -inf elsewhere."""
    cut = np.full(len(x), -np.inf)
    cut[kept] = np.asarray(x, np.float64)[kept]
    return cut


def draw(make: Make, logits: Any, **fields: Any) -> Any:
    fields.setdefault("position", np.arange(DRAWS))
    return sample_on_host(np.tile(logits, (DRAWS, 1)), make(DRAWS, **fields)).tokens


def assert_drawn_from(tokens: Any, probabilities: Any) -> None:
    """A chi-square test at one in a million. Seeds are fixed: it passes or fails for good."""
    seen = np.bincount(tokens, minlength=len(probabilities))
    possible = probabilities > 0
    assert seen[~possible].sum() == 0
    if possible.sum() > 1:
        expected = probabilities[possible] * len(tokens)
        assert scipy.stats.chisquare(seen[possible], expected).pvalue > 1e-6


# Of LOGITS by falling size: ids 3, 0, 5, 2, 4, 1, 6 with probabilities 0.411, 0.249, 0.167, 0.075,
# 0.056, 0.034, 0.008; the entropy is 1.52, and |-log p - entropy| 0.63, 0.13, 0.27, 1.07, 1.37, ...
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "plain": ({}, LOGITS),
    "cool": ({"temperature": 0.5}, LOGITS / 0.5),
    "hot": ({"temperature": 3}, LOGITS / 3),
    "top_k": ({"top_k": 3}, only(LOGITS, [3, 0, 5])),
    "top_k of one": ({"top_k": 1}, only(LOGITS, [3])),
    "top_k beyond the vocabulary": ({"top_k": 100}, LOGITS),
    "top_p": ({"top_p": 0.7}, only(LOGITS, [3, 0, 5])),
    "tiny top_p": ({"top_p": 1e-6}, only(LOGITS, [3])),
    "min_p": ({"min_p": 0.15}, only(LOGITS, [3, 0, 5, 2])),
    "whole min_p": ({"min_p": 1}, only(LOGITS, [3])),
    "typical": ({"typical_p": 0.3}, only(LOGITS, [0, 5])),
    "top_k then top_p": ({"top_k": 3, "top_p": 0.75}, only(LOGITS, [3, 0])),
    "cuts come after temperature": ({"temperature": 4, "top_p": 0.3}, only(LOGITS / 4, [3, 0])),
    "bias": ({"bias": {6: 4.0, 3: -1.0}}, LOGITS + np.array([0, 0, 0, -1, 0, 0, 4])),
    "forbidding bias": ({"bias": {3: -np.inf}}, only(LOGITS, [0, 1, 2, 4, 5, 6])),
    "repetition": (
        {"repetition": 2, "counts": {3: 0, 1: 5, 4: 1, 2: 1}},
        [1.5, -1.0, 0.15, 1.0, 0.0, 1.1, -2.0],
    ),
    "presence": (
        {"presence": 0.8, "counts": {3: 2, 0: 0, 6: 1}},
        [1.5, -0.5, 0.3, 1.2, 0.0, 1.1, -2.8],
    ),
    "frequency": (
        {"frequency": 0.4, "counts": {3: 2, 0: 0, 6: 1}},
        [1.5, -0.5, 0.3, 1.2, 0.0, 1.1, -2.4],
    ),
    "all penalties after the bias": (
        {
            "bias": {1: 2.5},
            "repetition": 1.6,
            "frequency": 0.1,
            "presence": -0.3,
            "counts": {1: 3, 6: 1, 0: 0},
        },
        [1.5 / 1.6, 2.0 / 1.6 - 0.3 + 0.3, 0.3, 2.0, 0.0, 1.1, -3.2 - 0.1 + 0.3],
    ),
    "mask": ({"mask": np.full((DRAWS, 1), 0b0100111, np.uint32)}, only(LOGITS, [0, 1, 2, 5])),
}


@pytest.mark.parametrize("case", CASES)
def test_frequencies(case: str, sampling_batch: Make) -> None:
    fields, adjusted = CASES[case]
    tokens = draw(sampling_batch, LOGITS, seed=list(CASES).index(case), **fields)
    assert_drawn_from(tokens, softmax(adjusted))


@pytest.mark.parametrize("over", ["position", "choice", "seed"])
def test_draws_are_independent(over: str, sampling_batch: Make) -> None:
    tokens = draw(sampling_batch, LOGITS, **{"position": 5, over: np.arange(DRAWS)})
    assert_drawn_from(tokens, softmax(LOGITS))
    for lag in (1, 2, 4):
        pairs = np.zeros((6, 6))
        np.add.at(pairs, (np.minimum(tokens[:-lag], 5), np.minimum(tokens[lag:], 5)), 1)
        assert scipy.stats.chi2_contingency(pairs).pvalue > 1e-6


def test_choices_are_independent_of_each_other(sampling_batch: Make) -> None:
    first = draw(sampling_batch, LOGITS, seed=77, choice=0)
    second = draw(sampling_batch, LOGITS, seed=77, choice=1)
    pairs = np.zeros((6, 6))
    np.add.at(pairs, (np.minimum(first, 5), np.minimum(second, 5)), 1)
    assert scipy.stats.chi2_contingency(pairs).pvalue > 1e-6


def test_high_and_low_halves_of_a_seed_both_count(sampling_batch: Make) -> None:
    tokens = [
        draw(sampling_batch, LOGITS, seed=seed)[:100].tolist()
        for seed in (5, 5 + 2**32, 5 * 2**32, 6)
    ]
    assert all(tokens[i] != tokens[j] for i in range(4) for j in range(i))


def test_rare_tokens_of_a_large_vocabulary(sampling_batch: Make) -> None:
    vocabulary = 1001
    logits = np.zeros(vocabulary, np.float32)
    logits[17] = np.log(1000)
    tokens = draw(sampling_batch, logits, seed=12)
    part = np.where(tokens == 17, 10, tokens // 101)
    sizes = np.bincount(np.arange(vocabulary) // 101, minlength=11).astype(np.float64)
    sizes[17 // 101] -= 1
    sizes[10] = 1000
    assert_drawn_from(part, sizes / 2000)
