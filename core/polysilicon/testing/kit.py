"""What every test of the kit needs: fresh inputs, placing weights, running ops, and the bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from polysilicon.backend import (
    KV_DTYPES,
    Batch,
    Capabilities,
    Dense,
    Device,
    Handle,
    ModelOutputs,
    Ops,
    PendingTokens,
    Shard,
    Weight,
)
from polysilicon.testing.batches import Chunk, make_batch

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Computation = Callable[[Ops, Batch], Any]
"""A piece of a forward: returns one value, or a tuple of them."""

COMPUTE_BOUNDS = {"f32": 2e-5, "f16": 2e-3, "bf16": 1.5e-2, "int8": 3e-2}
"""Largest error, relative to the largest magnitude of the expected output, by declared compute."""

STORE_BOUNDS = {"f32": 0.0, "f16": 1e-3, "bf16": 8e-3, "int8": 2e-2, "fp8_e4m3": 5e-2}
"""What a value that lies between two of the KV dtype's may add, when it is rounded to the other.

int8's neighbours are 1/127 of a vector's largest value apart: 0.008 from the values themselves, and
0.012 from scores whose keys, of which the largest is 2.5 times the mean, were rounded otherwise.
fp8's are 1/14 of the largest value apart where they are farthest, which few values come near.
"""

FLOAT32_BOUND = 1e-6
"""For what the contract keeps in float32 on every device."""


def assert_close(actual: npt.NDArray[Any], expected: Float64, bound: float) -> None:
    """Every element within `bound` of the expected one, relative to the largest magnitude."""
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    if not expected.size:
        return
    assert np.isfinite(actual).all(), f"{np.count_nonzero(~np.isfinite(actual))} not finite"
    scale = float(np.abs(expected).max()) or 1.0
    error = np.abs(actual - expected) / scale
    worst = np.unravel_index(int(error.argmax()), error.shape)
    assert error[worst] <= bound, (
        f"error {error[worst]:.3g} of the largest magnitude exceeds the bound {bound:.3g}: "
        f"got {actual[worst]:.7g} at {tuple(map(int, worst))}, expected {expected[worst]:.7g}; "
        f"{np.count_nonzero(error > bound)} of {error.size} elements exceed it"
    )


class Kit:
    """A device with a source of random inputs. Inputs are embeddings of tokens, the only way in."""

    def __init__(self, device: Device, rng: np.random.Generator) -> None:
        self.device = device
        self.rng = rng

    @property
    def capabilities(self) -> Capabilities:
        return self.device.capabilities

    @property
    def bound(self) -> float:
        return COMPUTE_BOUNDS[self.capabilities.compute]

    def normal(self, *shape: int, scale: float = 1.0) -> Float32:
        return self.rng.standard_normal(shape, np.float32) * np.float32(scale)

    def exact(self, *shape: int) -> Float32:
        """Multiples of 1/32 within 2: exact in every compute dtype, and so are few sums of them."""
        return (self.rng.integers(-64, 65, shape) / 32).astype(np.float32)

    def put(self, *parts: Weight, shard: Shard | None = None) -> Handle:
        """Place parts, or skip the test where the device declares no such encoding."""
        for part in parts:
            if not self.capabilities.takes(part.encoding):
                pytest.skip(f"declares no encoding {part.encoding}")
        return self.device.put(list(parts), shard)

    def dense(self, array: npt.NDArray[Any]) -> tuple[Handle, Float64]:
        """Place an array, rounded to the device's compute dtype as it may round it, in its most
        precise dense encoding; gives back the values as they are after that."""
        values = np.asarray(array, np.float32)
        if self.capabilities.compute in ("f16", "bf16"):
            values = values.astype(KV_DTYPES[self.capabilities.compute]).astype(np.float32)
        for name, dtype in KV_DTYPES.items():
            if self.capabilities.takes(f"dense:{name}"):
                weight = Dense(array=values.astype(dtype))
                return self.device.put([weight]), weight.dequantize().astype(np.float64)
        pytest.fail("the device takes no dense encoding: the kit cannot give it inputs")

    def evaluate(
        self,
        computation: Computation,
        batch: Batch,
        previous: PendingTokens | None = None,
        *,
        outputs: int = 1,
    ) -> tuple[Float32, ...]:
        """The values of a computation at the batch's `logit_rows`, one program for each of them."""
        results = []
        for index in range(outputs):
            program = self.device.compile(as_forward(computation, index))
            results.append(program(batch, previous).result().logits)
        return tuple(results)

    def rows(self, tokens: Sequence[int] | npt.NDArray[Any]) -> Batch:
        """A batch of one sequence without KV, whose rows are all wanted."""
        return make_batch([Chunk(tokens=[int(token) for token in tokens])])


def as_forward(computation: Computation, index: int = 0) -> Callable[[Ops, Batch], ModelOutputs]:
    """A forward whose logits are the wanted rows of one value of a computation."""

    def forward(ops: Ops, batch: Batch) -> ModelOutputs:
        value = computation(ops, batch)
        if isinstance(value, tuple):
            value = value[index]
        return ModelOutputs(logits=ops.select(value, batch.logit_rows), hidden=())

    return forward
