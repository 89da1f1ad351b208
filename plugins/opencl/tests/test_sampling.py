"""Sampling by the device's kernels: ties, extremes, and vocabularies of several parts."""

from __future__ import annotations

import numpy as np
import pytest
from polysilicon.backend import sample_on_host
from polysilicon.testing.batches import Chunk, make_batch
from polysilicon.testing.kit import Kit, as_forward
from polysilicon.testing.sampling import drawing, sampling

from polysilicon_opencl.sampling import DeviceTokens, HostTokens


@pytest.fixture
def kit(device):
    return Kit(device, np.random.default_rng(np.random.SeedSequence()))


def pending_of(kit, logits):
    table, _ = kit.dense(logits)
    program = kit.device.compile(as_forward(lambda ops, batch: ops.embed(table, batch.tokens)))
    return program(make_batch([Chunk(tokens=range(len(logits)))]), None)


def drawn(kit, logits, batch):
    sampled = kit.device.sample(pending_of(kit, logits), batch)
    assert isinstance(sampled, DeviceTokens)
    return sampled.result().tokens


def exact_logits(kit, rows, vocabulary):
    """Halves within 8: many ties, and scores that are exact at a temperature of 1."""
    return (kit.rng.integers(-16, 17, (rows, vocabulary)) / 2).astype(np.float32)


@pytest.mark.parametrize("vocabulary", [1, 31, 4096, 4097, 13000])
def test_greedy_takes_the_lowest_of_equals(kit, vocabulary):
    logits = exact_logits(kit, 9, vocabulary)
    assert np.array_equal(drawn(kit, logits, sampling(9)), logits.argmax(axis=1))


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_k": 700}, {"top_k": 4100}])
def test_top_k_cuts_through_ties(kit, fields):
    """The lower ids stay: exactly as on the host, as nothing is rounded."""
    logits = exact_logits(kit, 60, 5000)
    batch = drawing(kit, 60, **{"temperature": 1.0} | fields)
    assert np.array_equal(drawn(kit, logits, batch), sample_on_host(logits, batch).tokens)


@pytest.mark.parametrize("top_k", [0, 50, 1200])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.9999])
def test_top_p_of_well_separated_weights(kit, top_p, top_k):
    """Without ties at the edge the kernels and the host keep the same ids."""
    logits = kit.normal(40, 9000, scale=3)
    batch = drawing(kit, 40, temperature=1.0, top_k=top_k, top_p=top_p)
    same = drawn(kit, logits, batch) == sample_on_host(logits, batch).tokens
    assert np.count_nonzero(same) >= 38


def test_equal_logits_and_top_p(kit):
    """Every id weighs the same: the first of them stay, and only those are drawn. Many times, as
    work-groups on several threads may only meet by chance."""
    logits = np.zeros((200, 64), np.float32)
    tokens = [drawn(kit, logits, drawing(kit, 200, temperature=1.0, top_p=0.25)) for _ in range(20)]
    assert set(np.concatenate(tokens)) == set(range(16))


def test_extremes(kit):
    """Rows without any value, with NaN, with infinities, and a very small temperature."""
    logits = np.full((6, 50), -np.inf, np.float32)
    logits[1] = np.nan
    logits[1, 7] = -3
    logits[2, [4, 9]] = np.inf
    logits[3, 49] = -1e30
    logits[4] = np.arange(50)
    logits[5] = 5
    for batch in (sampling(6), drawing(kit, 6, temperature=1e-4), drawing(kit, 6, top_p=0.5)):
        tokens = drawn(kit, logits, batch)
        assert tokens[0] == 0
        assert tokens[1] == 7
        assert tokens[2] in ((4, 9) if batch.temperature[0] else (4,))
        assert tokens[3] == 49
        if batch.top_p[0] == 1:
            assert tokens[4] == 49
        assert 0 <= tokens[5] < 50


def test_rows_that_ask_for_more_are_sampled_on_the_host(kit):
    logits = kit.normal(3, 100)
    pending = pending_of(kit, logits)
    for fields in ({"logprobs": True}, {"typical_p": 0.5}, {"top_logprobs": 2}):
        batch = drawing(kit, 3, **fields)
        sampled = kit.device.sample(pending, batch)
        assert isinstance(sampled, HostTokens)
        assert np.array_equal(sampled.result().tokens, sample_on_host(logits, batch).tokens)
