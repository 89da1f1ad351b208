"""LoRA: the adapters of a pool, and what they add to a product."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from polysilicon.backend import AdapterPool, AdapterSpec, AdapterWeights, DeviceError
from polysilicon.device_checks import adapter_factors, check_adapter_slot

if TYPE_CHECKING:
    from polysilicon_metal.device import MetalDevice

Key = tuple[str, int, str]
"""A target, a part of it, and `down` (A) or `up` (B)."""


class MetalAdapterPool(AdapterPool):
    """By target and part, float32 A `[slots, inputs, rank]` and B `[slots, rank, outputs]`,
    transposed and filled up to the largest rank with zeros."""

    def __init__(self, device: MetalDevice, spec: AdapterSpec, slots: int) -> None:
        self.spec = spec
        self.slots = slots
        self._device = device
        self.arrays: dict[Key, mx.array] = {}
        for name, target in spec.targets.items():
            for part, outputs in enumerate(target.outputs):
                shapes = {"down": (target.inputs, spec.max_rank), "up": (spec.max_rank, outputs)}
                for side, shape in shapes.items():
                    self.arrays[name, part, side] = mx.zeros((slots, *shape))
        mx.eval(self.arrays)
        self.nbytes = sum(int(array.nbytes) for array in self.arrays.values())
        self._closed = False

    def parts_of(self, target: str) -> int:
        if target not in self.spec.targets:
            raise ValueError(f"the adapter pool has no target {target!r}")
        return len(self.spec.targets[target].outputs)

    def write(self, slot: int, weights: AdapterWeights) -> None:
        self._check_slot(slot)
        given = {(name, part): (a.T, b.T) for name, part, a, b in
                 adapter_factors(self.spec, weights)}  # fmt: skip
        with self._device.active():
            for key, array in self.arrays.items():
                name, part, side = key
                values = np.zeros(array.shape[1:], np.float32)
                if (name, part) in given:
                    down, up = given[name, part]
                    matrix = down if side == "down" else up
                    values[: matrix.shape[0], : matrix.shape[1]] = matrix
                self._assign(key, slot, values)

    def clear(self, slot: int) -> None:
        self._check_slot(slot)
        with self._device.active():
            for key, array in self.arrays.items():
                self._assign(key, slot, np.zeros(array.shape[1:], np.float32))

    def close(self) -> None:
        if not self._closed:
            with self._device.active():
                self._device.queue.drain()
            self.forget()

    def forget(self) -> None:
        """Free it; the device has ended what used it."""
        self._closed = True
        self.arrays = {}
        self.nbytes = 0

    def check_open(self) -> None:
        """Raise DeviceError when the pool or its device is closed."""
        self._device.check_open()
        if self._closed:
            raise DeviceError("the adapter pool is closed")

    def _assign(self, key: Key, slot: int, values: npt.NDArray[np.float32]) -> None:
        # A new object: a step in flight may hold the old one.
        self.arrays[key] = copy.copy(self.arrays[key])
        self.arrays[key][slot] = mx.array(values)

    def _check_slot(self, slot: int) -> None:
        self.check_open()
        check_adapter_slot(slot, self.slots)


def adapted(
    x: mx.array,
    parts: Sequence[mx.array],
    pairs: Sequence[tuple[mx.array, mx.array]],
    token_slot: mx.array,
) -> tuple[mx.array, ...]:
    """`part + (x A^T) B^T` by each token's slot. x `[T, K]`; pairs: A and B of each part, of all
    slots; token_slot: int32 `[T]`."""
    rows = x.astype(mx.float32)[:, None, :]
    own = (token_slot > 0)[:, None]
    result = []
    for part, (down, up) in zip(parts, pairs, strict=True):
        inner = mx.gather_mm(rows, down, rhs_indices=token_slot)
        added = mx.gather_mm(inner, up, rhs_indices=token_slot)[:, 0]
        result.append(mx.where(own, part + added, part))
    return tuple(result)
