"""LoRA adapters: for each target one buffer of A and one of B, with room for every slot."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyopencl as cl
from polysilicon.backend import AdapterPool, AdapterSpec, AdapterWeights, DeviceError
from polysilicon.device_checks import adapter_factors, check_adapter_slot

from polysilicon_opencl.runtime import Runtime


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TargetBuffers:
    """down: float32 `[slots, parts, rank, inputs]`; up: `[slots, outputs of all parts, rank]`."""

    down: cl.Buffer
    up: cl.Buffer
    rank: int
    inputs: int
    outputs: tuple[int, ...]

    @property
    def down_bytes(self) -> int:
        """Of one slot."""
        return 4 * len(self.outputs) * self.rank * self.inputs

    @property
    def up_bytes(self) -> int:
        return 4 * sum(self.outputs) * self.rank


class OpenCLAdapterPool(AdapterPool):
    """See `AdapterPool`. Ranks below the largest are filled up with zeros."""

    def __init__(self, runtime: Runtime, spec: AdapterSpec, slots: int) -> None:
        self.spec = spec
        self.slots = slots
        self._runtime = runtime
        self._closed = False
        rank = spec.max_rank
        each = (
            4
            * rank
            * sum(
                len(target.outputs) * target.inputs + sum(target.outputs)
                for target in spec.targets.values()
            )
        )
        self.nbytes = slots * each
        runtime.check_fits("adapters", self.nbytes)
        self._targets: dict[str, TargetBuffers] = {}
        for name, target in spec.targets.items():
            down = 4 * slots * len(target.outputs) * rank * target.inputs
            up = 4 * slots * sum(target.outputs) * rank
            runtime.check_buffer(f"adapter target {name!r}", max(down, up))
            self._targets[name] = TargetBuffers(
                down=runtime.allocate("adapters", down),
                up=runtime.allocate("adapters", up),
                rank=rank,
                inputs=target.inputs,
                outputs=tuple(target.outputs),
            )
        runtime.allocated += self.nbytes
        for slot in range(slots):
            self._zero(slot)

    def target(self, name: str) -> TargetBuffers:
        self._check_open()
        if name not in self._targets:
            raise ValueError(f"the adapter pool has no target {name!r}")
        return self._targets[name]

    def write(self, slot: int, weights: AdapterWeights) -> None:
        self._check_open()
        check_adapter_slot(slot, self.slots)
        factors = list(adapter_factors(self.spec, weights))
        self._zero(slot)
        for name, part, down, up in factors:
            target = self._targets[name]
            padded_down = np.zeros((target.rank, target.inputs), np.float32)
            padded_down[: len(down)] = down
            padded_up = np.zeros((target.outputs[part], target.rank), np.float32)
            padded_up[:, : len(down)] = up
            self._copy(
                padded_down, target.down, slot * target.down_bytes + part * padded_down.nbytes
            )
            first = sum(target.outputs[:part])
            self._copy(padded_up, target.up, slot * target.up_bytes + 4 * first * target.rank)

    def clear(self, slot: int) -> None:
        self._check_open()
        check_adapter_slot(slot, self.slots)
        self._zero(slot)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._targets = {}
            self._runtime.allocated -= self.nbytes
            self.nbytes = 0

    def _copy(self, array: np.ndarray, target: cl.Buffer, at: int) -> None:
        self._runtime.copy(self._runtime.upload(array), target, array.nbytes, at)

    def _zero(self, slot: int) -> None:
        for target in self._targets.values():
            self._runtime.fill_zeros(target.down, slot * target.down_bytes, target.down_bytes)
            self._runtime.fill_zeros(target.up, slot * target.up_bytes, target.up_bytes)

    def _check_open(self) -> None:
        self._runtime.check_open()
        if self._closed:
            raise DeviceError("the adapter pool is closed")
