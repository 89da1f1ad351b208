"""The entry point of the CPU backend."""

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


class CPUBackend:
    """The host's processor, through the native library."""

    name = "cpu"
    contract = CONTRACT_VERSION
    priority = 0

    def probe(self) -> Sequence[DeviceInfo] | Unavailable:
        from polysilicon.host_memory import total_memory
        from polysilicon_cpu import levels, library, placement, processor

        try:
            library.load()
            level = levels.choose()
        except library.LibraryError as error:
            return Unavailable(reason=str(error))
        places = placement.places()
        return (
            DeviceInfo(
                name=processor.name(),
                memory=total_memory(),
                details={
                    "level": level,
                    **placement.details(places),
                    **levels.details(),
                },
            ),
        )

    def open(self, index: int, options: Mapping[str, str]) -> Device:
        if index != 0:
            raise ValueError(f"the cpu backend has device 0 only, got {index}")
        from polysilicon_cpu.device import CPUDevice
        from polysilicon_cpu.options import Options

        return CPUDevice(Options.parse(options))


@hookimpl
def polysilicon_backends() -> Sequence[Backend]:
    return (CPUBackend(),)
