"""Results that may still be computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from polysilicon.backend import Outputs, SampledTokens
from polysilicon_torch.errors import contract_errors
from polysilicon_torch.sampling import SampledTensors

if TYPE_CHECKING:
    from polysilicon_torch.device import TorchDevice


class PendingStep:
    """A step's outputs. logits: float32 `[L, V]` on the device, in the order of its stream."""

    def __init__(
        self,
        device: TorchDevice,
        layers: Sequence[int],
        logits: torch.Tensor,
        hidden: Sequence[torch.Tensor],
    ) -> None:
        self.device = device
        self.logits = logits
        self._layers = layers
        self._hidden = hidden
        self._computed = device.runtime.record()

    def result(self) -> Outputs:
        self.device.check_open()
        runtime = self.device.runtime
        with contract_errors("a step"), runtime.aside():
            runtime.wait(self._computed)
            hosts = [_to_host(self.device, tensor) for tensor in (self.logits, *self._hidden)]
            runtime.record().synchronize()
        logits, *hidden = (_array(host.float()) for host in hosts)
        return Outputs(logits=logits, hidden=dict(zip(self._layers, hidden, strict=True)))


class TorchPendingTokens:
    """A step's sampled tokens: on the device for the next step, and on their way to the host."""

    def __init__(self, device: TorchDevice, sampled: SampledTensors) -> None:
        self.device = device
        self.sampled = sampled
        self._hosts = {
            name: None if tensor is None else _to_host(device, tensor)
            for name, tensor in vars(sampled).items()
        }
        self._arrived = device.runtime.record()

    def result(self) -> SampledTokens:
        self.device.check_open()
        with contract_errors("sampling"):
            self._arrived.synchronize()
        arrays = {
            name: None if host is None else _array(host) for name, host in self._hosts.items()
        }
        return SampledTokens(**arrays)  # type: ignore[arg-type]


def _to_host(device: TorchDevice, tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, submitted to the current stream."""
    host = device.runtime.host_tensor(tuple(tensor.shape), tensor.dtype)
    host.copy_(tensor, non_blocking=True)
    return host


def _array(host: torch.Tensor) -> npt.NDArray[Any]:
    """A copy of its own, so that the transfer's memory can be used again."""
    return np.array(host.numpy())
