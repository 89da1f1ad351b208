"""Native sampling against the host's, at every level that runs here."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from polysilicon.backend import (
    DeviceError,
    SampledTokens,
    SamplingBatch,
    SparseRows,
    sample_on_host,
)
from polysilicon_cpu import library

try:
    library.load()
except library.LibraryError as failure:
    pytest.skip(str(failure), allow_module_level=True)

from polysilicon_cpu import levels
from polysilicon_cpu.device import CPUDevice
from polysilicon_cpu.options import Options
from polysilicon_cpu.sampling import sample

Float32 = npt.NDArray[np.float32]

CLOSE = 3e-5
"""Differences of logits that float32 arithmetic may turn round."""

PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "choice", "position")

FEATURES = ("top_k", "top_p", "min_p", "typical_p", "penalties", "bias", "mask", "reports")


@pytest.fixture(params=[level for level in levels.built() if levels.failure(level) is None])
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def device(request: pytest.FixtureRequest, level: str) -> Iterator[CPUDevice]:
    device = CPUDevice(Options(level=level, threads=request.param))
    yield device
    device.close()


def sampled(device: CPUDevice, logits: Float32, batch: SamplingBatch) -> SampledTokens:
    """Samples from these logits, as if a step before had computed them."""
    step: Any = types.SimpleNamespace(logits=np.ascontiguousarray(logits), ticket=0)
    return sample(device, step, batch).result()


def batch_of(rng: np.random.Generator, rows: int, vocabulary: int, *features: str) -> Any:
    """Rows with parameters of their own, greedy ones among them."""

    def choice(values: list[float], dtype: type[np.generic] = np.float32) -> Any:
        return rng.choice(values, rows).astype(dtype)

    off: dict[str, Any] = {
        name: np.full(rows, value, np.float32)
        for name, value in (("top_p", 1), ("min_p", 0), ("typical_p", 1), ("repetition", 1),
                            ("presence", 0), ("frequency", 0))
    }  # fmt: skip
    fields = off | {
        "draw": rng.random(rows) < 0.9,
        "temperature": choice([0, 0.01, 0.3, 1, 1.7, 100]),
        "top_k": np.zeros(rows, np.int32),
        "seed": rng.integers(0, 2**64, rows, np.uint64),
        "choice": rng.integers(0, 2**32, rows, np.uint32),
        "position": rng.integers(0, 2**32, rows, np.uint32),
    }
    if "top_k" in features:
        fields["top_k"] = choice([0, 1, 2, 20, 300, 5000], np.int32)
    if "top_p" in features:
        fields["top_p"] = choice([1, 0.99, 0.95, 0.5, 1e-6])
    if "min_p" in features:
        fields["min_p"] = choice([0, 0.02, 0.2, 1])
    if "typical_p" in features:
        fields["typical_p"] = choice([1, 0.9, 0.4, 1e-6])
    if "penalties" in features:
        fields |= {"repetition": choice([1, 1.2, 0.8]), "presence": choice([0, 0.5])}
        fields |= {"frequency": choice([0, 0.2, -0.5])}
        fields["counts"] = sparse(rng, rows, vocabulary, np.int32)
    if "bias" in features:
        fields["bias"] = sparse(rng, rows, vocabulary, np.float32)
    if "mask" in features:
        mask = rng.integers(0, 2**32, (rows, -(-vocabulary // 32)), np.uint32)
        mask[-1] = 0  # allows nothing
        fields["mask"] = mask
    if "reports" in features:
        fields["targets"] = rng.integers(-1, vocabulary, rows).astype(np.int32)
        fields |= {"logprobs": True, "top_logprobs": min(vocabulary, int(rng.choice([1, 5, 200])))}
    return SamplingBatch(**fields)


def sparse(rng: np.random.Generator, rows: int, vocabulary: int, dtype: Any) -> SparseRows:
    counts = rng.integers(0, min(vocabulary, 90) + 1, rows)
    ids = [rng.permutation(vocabulary)[:count] for count in counts]
    total = int(counts.sum())
    values = rng.normal(0, 3, total) if dtype is np.float32 else rng.integers(0, 4, total)
    return SparseRows(
        start=np.cumsum([0, *counts]).astype(np.int32),
        ids=np.concatenate(ids).astype(np.int32),
        values=values.astype(dtype),
    )


def check(device: CPUDevice, rng: np.random.Generator, logits: Float32, batch: Any) -> None:
    expected = sample_on_host(logits, batch)
    clear = batch.draw.copy()  # rows whose token stands when the logits change a little
    for _ in range(8):
        shift = rng.uniform(-CLOSE, CLOSE, logits.shape).astype(np.float32)
        with np.errstate(over="ignore"):
            moved = sample_on_host(logits + shift, batch)
        clear &= (batch.temperature == 0) | (moved.tokens == expected.tokens)
    actual = sampled(device, logits, batch)
    wrong = np.flatnonzero(clear & (actual.tokens != expected.tokens))
    assert not len(wrong), [
        (
            row,
            actual.tokens[row],
            expected.tokens[row],
            logits[row].tolist()[:9],
            *tuple(getattr(batch, name)[row] for name in PARAMETERS),
        )
        for row in wrong[:3]
    ]
    largest = np.abs(logits[np.isfinite(logits)]).max(initial=0)
    bound: dict[str, float] = {"atol": 2e-5 * (1 + largest), "rtol": 1e-5}
    if batch.logprobs:
        assert actual.logprobs is not None
        assert expected.logprobs is not None
        np.testing.assert_allclose(actual.logprobs[clear], expected.logprobs[clear], **bound)
        for name in ("target_logprobs", "top_logprobs"):
            np.testing.assert_allclose(getattr(actual, name), getattr(expected, name), **bound)
        assert np.array_equal(actual.top_ids, expected.top_ids)


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 64, 65, 300, 4099, 17_000])
def test_random_rows(device: CPUDevice, vocabulary: int) -> None:
    rng = np.random.default_rng()
    for _ in range(6):
        rows = int(rng.choice([1, 9, 33]))
        features = [feature for feature in FEATURES if rng.random() < 0.4]
        logits = rng.normal(0, rng.choice([0, 1, 3, 8]), (rows, vocabulary)).astype(np.float32)
        if rng.random() < 0.2:
            logits = np.round(logits)  # many equals
        check(device, rng, logits, batch_of(rng, rows, vocabulary, *features))


def test_values_that_are_not_numbers(device: CPUDevice) -> None:
    rng = np.random.default_rng()
    for features in ((), ("top_k",), ("top_p", "reports"), ("mask", "bias", "penalties")):
        logits = rng.normal(0, 3, (9, 700)).astype(np.float32)
        kind = rng.random(logits.shape)
        logits[kind < 0.01] = np.nan
        logits[(kind > 0.01) & (kind < 0.02)] = -np.inf
        logits[0] = -np.inf
        logits[1] = np.nan
        logits[2, [5, 600]] = np.inf
        check(device, rng, logits, batch_of(rng, 9, 700, *features))


@pytest.mark.parametrize("scale", [0.05, 2.5])
def test_large_vocabulary(device: CPUDevice, scale: float) -> None:
    """Rows that are cut up among threads, likely ids scattered over them."""
    rng = np.random.default_rng()
    logits = rng.normal(0, scale, (2, 262_144)).astype(np.float32)
    logits[:, rng.integers(0, 262_144, 50)] += 9
    for features in ((), ("top_p",), ("top_k", "top_p"), ("min_p", "mask", "reports")):
        batch = batch_of(rng, 2, 262_144, *features)
        draws = dataclasses.replace(batch, temperature=np.ones(2, np.float32))
        check(device, rng, logits, draws)


def test_ids_beyond_the_vocabulary(device: CPUDevice) -> None:
    rng = np.random.default_rng()
    batch = batch_of(rng, 1, 50)
    far = SparseRows(
        start=np.array([0, 1], np.int32),
        ids=np.array([50], np.int32),
        values=np.ones(1, np.float32),
    )
    with pytest.raises(DeviceError, match="bias names id 50"):
        sampled(device, np.zeros((1, 50), np.float32), dataclasses.replace(batch, bias=far))


@pytest.mark.parametrize("features", [(), ("top_k", "top_p"), ("penalties", "mask", "reports")])
def test_drafted_rows_are_sampled_as_if_alone(device: CPUDevice, features: tuple[str, ...]) -> None:
    """Rows of one sequence at successive positions, as speculation verifies a draft with them: each
    draws its own noise, and gets bitwise what a step without a draft gives."""
    rng = np.random.default_rng()
    logits = rng.normal(0, 3, (5, 20_000)).astype(np.float32)
    batch = dataclasses.replace(
        batch_of(rng, 5, 20_000, *features),
        draw=np.ones(5, np.bool_),
        temperature=np.ones(5, np.float32),
        seed=np.full(5, 7, np.uint64),
        choice=np.zeros(5, np.uint32),
        position=np.arange(100, 105, dtype=np.uint32),
    )
    together = sampled(device, logits, batch)
    for row in range(5):
        alone = sampled(device, logits[row : row + 1], row_of(batch, row))
        for name in ("tokens", "logprobs", "target_logprobs", "top_ids", "top_logprobs"):
            expected = getattr(together, name)
            if expected is not None:
                np.testing.assert_array_equal(getattr(alone, name)[0], expected[row])


def test_noise_differs_by_position_and_nothing_else(device: CPUDevice) -> None:
    rng = np.random.default_rng()
    logits = np.repeat(rng.normal(0, 1, (1, 5000)).astype(np.float32), 8, axis=0)
    batch = dataclasses.replace(
        batch_of(rng, 8, 5000),
        draw=np.ones(8, np.bool_),
        temperature=np.ones(8, np.float32),
        seed=np.full(8, 7, np.uint64),
        choice=np.zeros(8, np.uint32),
        position=np.array([3, 4, 5, 6, 3, 4, 5, 6], np.uint32),
    )
    tokens = sampled(device, logits, batch).tokens.tolist()
    assert tokens[:4] == tokens[4:]
    assert len(set(tokens)) > 1


def row_of(batch: SamplingBatch, row: int) -> SamplingBatch:
    """One row of a batch, as a batch."""

    def cut(value: Any) -> Any:
        if isinstance(value, SparseRows):
            begin, end = value.start[row : row + 2]
            return SparseRows(
                start=np.array([0, end - begin], np.int32),
                ids=value.ids[begin:end],
                values=value.values[begin:end],
            )
        return value[row : row + 1] if isinstance(value, np.ndarray) else value

    fields = {field.name: cut(getattr(batch, field.name)) for field in dataclasses.fields(batch)}
    return SamplingBatch(**fields)
