"""The entry point of the rocm backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polysilicon.backend import (
    CONTRACT_VERSION,
    Backend,
    Device,
    DeviceInfo,
    Unavailable,
    hookimpl,
)


class ROCmBackend:
    """AMD GPUs, through torch and Triton."""

    name = "rocm"
    contract = CONTRACT_VERSION
    priority = 0

    def probe(self) -> Sequence[DeviceInfo] | Unavailable:
        from polysilicon_torch.presence import ROCM, find_devices

        return find_devices(ROCM)

    def open(self, index: int, options: Mapping[str, str]) -> Device:
        from polysilicon_rocm.device import open_device

        return open_device(index, options)


@hookimpl
def polysilicon_backends() -> Sequence[Backend]:
    return (ROCmBackend(),)
