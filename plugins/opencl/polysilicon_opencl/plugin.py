"""The entry point of the OpenCL backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polysilicon.backend import Backend, Device, DeviceInfo, Unavailable, hookimpl


class OpenCLBackend:
    """Any OpenCL 1.2 device: GPUs first, then accelerators and processors."""

    name = "opencl"
    contract = (1, 1)
    priority = 0

    def probe(self) -> Sequence[DeviceInfo] | Unavailable:
        try:
            import pyopencl  # noqa: F401
        except ImportError as error:
            return Unavailable(
                reason=f"pyopencl cannot be imported ({error}): pip install pyopencl"
            )
        from polysilicon_opencl import discovery

        return discovery.probe()

    def open(self, index: int, options: Mapping[str, str]) -> Device:
        from polysilicon_opencl.options import Options

        parsed = Options.parse(options)
        from polysilicon_opencl import discovery
        from polysilicon_opencl.device import OpenCLDevice

        return OpenCLDevice(discovery.device(index), parsed)


@hookimpl
def polysilicon_backends() -> Sequence[Backend]:
    return (OpenCLBackend(),)
