"""LoRA weights on the device."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from polysilicon.backend import AdapterPool, AdapterSpec, AdapterWeights, DeviceError
from polysilicon.device_checks import adapter_factors, check_adapter_slot
from polysilicon_torch.errors import contract_errors

if TYPE_CHECKING:
    from polysilicon_torch.device import TorchDevice


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LoraTarget:
    """One target's weights in every slot of an adapter pool, R = the pool's largest rank.

    down: A of the activation dtype, `[slots, parts, R, inputs]`. up: B, `[slots, N, R]`, N over all
    parts, the adapter's scaling folded in. Ranks beyond an adapter's own are zero.
    ranks: int32 `[slots, parts]`, the adapter's own rank, 0 where it leaves the part unchanged.
    outputs: rows of each part.
    """

    down: torch.Tensor
    up: torch.Tensor
    ranks: torch.Tensor
    outputs: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.down, self.up, self.ranks))


class TorchAdapterPool(AdapterPool):
    """Every slot's memory is taken when the pool is made."""

    def __init__(self, device: TorchDevice, spec: AdapterSpec, slots: int) -> None:
        self.spec = spec
        self.slots = slots
        self._device = device
        self._targets: dict[str, LoraTarget] | None = {}
        memory, dtype = device.runtime.device, device.kernels.dtype
        with contract_errors("adapter slots"):
            for name, target in spec.targets.items():
                parts, outputs = len(target.outputs), sum(target.outputs)
                self._targets[name] = LoraTarget(
                    down=torch.zeros(
                        (slots, parts, spec.max_rank, target.inputs), dtype=dtype, device=memory
                    ),
                    up=torch.zeros((slots, outputs, spec.max_rank), dtype=dtype, device=memory),
                    ranks=torch.zeros((slots, parts), dtype=torch.int32, device=memory),
                    outputs=tuple(target.outputs),
                )

    @staticmethod
    def bytes_of(spec: AdapterSpec, slots: int, dtype: torch.dtype) -> int:
        """What a pool takes, but for its ranks."""
        elements = sum(
            len(target.outputs) * target.inputs + sum(target.outputs)
            for target in spec.targets.values()
        )
        return elements * spec.max_rank * slots * dtype.itemsize

    @property
    def nbytes(self) -> int:
        return sum(target.nbytes for target in (self._targets or {}).values())

    def target(self, name: str) -> LoraTarget:
        """Raises DeviceError when the pool is closed, ValueError for another target."""
        targets = self._open_targets()
        if name not in targets:
            raise ValueError(f"the adapter pool has no target {name!r}")
        return targets[name]

    def check_open(self) -> None:
        """Raise DeviceError when the pool or its device is closed."""
        self._device.check_open()
        self._open_targets()

    def write(self, slot: int, weights: AdapterWeights) -> None:
        self.check_open()
        check_adapter_slot(slot, self.slots)
        factors = list(adapter_factors(self.spec, weights))
        with contract_errors("an adapter"), self._device.runtime.active():
            self._clear(slot)
            for name, part, down, up in factors:
                target, rank = self.target(name), down.shape[0]
                first = sum(target.outputs[:part])
                rows = slice(first, first + target.outputs[part])
                target.down[slot, part, :rank].copy_(torch.from_numpy(down))
                target.up[slot, rows, :rank].copy_(torch.from_numpy(up))
                target.ranks[slot, part] = rank

    def clear(self, slot: int) -> None:
        self.check_open()
        check_adapter_slot(slot, self.slots)
        with contract_errors("an adapter"), self._device.runtime.active():
            self._clear(slot)

    def close(self) -> None:
        self._targets = None

    def _clear(self, slot: int) -> None:
        for target in self._open_targets().values():
            target.ranks[slot].zero_()
            target.down[slot].zero_()
            target.up[slot].zero_()

    def _open_targets(self) -> dict[str, LoraTarget]:
        if self._targets is None:
            raise DeviceError("the adapter pool is closed")
        return self._targets
