"""The entry point of the reference backend."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence

from polysilicon.backend import CONTRACT_VERSION, Backend, Device, DeviceInfo, hookimpl
from polysilicon.host_memory import total_memory


class ReferenceBackend:
    """numpy on the host: runs everywhere, last in the order of choice."""

    name = "reference"
    contract = CONTRACT_VERSION
    priority = 0

    def probe(self) -> Sequence[DeviceInfo]:
        return (
            DeviceInfo(
                name="numpy", memory=total_memory(), details={"processor": platform.machine()}
            ),
        )

    def open(self, index: int, options: Mapping[str, str]) -> Device:
        if index != 0:
            raise ValueError(f"the reference backend has device 0 only, got {index}")
        for name, value in options.items():
            if name != "deterministic":
                raise ValueError(
                    f"unknown option {name!r}: the reference backend has deterministic=0"
                )
            if value != "0":
                raise ValueError(
                    "the reference backend is not deterministic across batch sizes: leave "
                    "deterministic out, or choose a backend that declares it"
                )
        from polysilicon.reference.device import ReferenceDevice

        return ReferenceDevice()


@hookimpl
def polysilicon_backends() -> Sequence[Backend]:
    return (ReferenceBackend(),)
