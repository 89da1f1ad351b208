"""The OpenCL devices of this machine."""

from __future__ import annotations

from collections.abc import Sequence

import pyopencl as cl
from polysilicon.backend import DeviceInfo, Unavailable

_KINDS = {
    cl.device_type.GPU: "GPU",
    cl.device_type.ACCELERATOR: "accelerator",
    cl.device_type.CPU: "CPU",
}
"""In the order in which devices are listed."""

_NO_DEVICE = (
    "no OpenCL 1.2 device was found: install the driver of your device (Debian and Ubuntu: "
    "intel-opencl-icd, mesa-opencl-icd or nvidia-opencl-icd), or pocl-opencl-icd for the processor"
)


def probe() -> Sequence[DeviceInfo] | Unavailable:
    try:
        found = devices()
    except cl.Error as error:
        return Unavailable(reason=f"{_NO_DEVICE} ({error})")
    if not found:
        return Unavailable(reason=_NO_DEVICE)
    return tuple(
        DeviceInfo(
            name=_text(device.name),
            memory=int(device.global_mem_size),
            stand_in=bool(device.type & cl.device_type.CPU),
            details={
                "kind": kind_of(device),
                "platform": _text(device.platform.name),
                "version": _text(device.version),
                "units": f"{device.max_compute_units} compute units",
            },
        )
        for device in found
    )


def device(index: int) -> cl.Device:
    """Device `index` of `probe`'s list. Raises ValueError where there is none."""
    found = devices()
    if not 0 <= index < len(found):
        raise ValueError(f"there are {len(found)} OpenCL devices, and none has index {index}")
    return found[index]


def devices() -> list[cl.Device]:
    """Usable devices, GPUs first; within a kind as the platforms list them."""
    found = [device for platform in cl.get_platforms() for device in platform.get_devices()]
    usable = [device for device in found if _usable(device)]
    order = list(_KINDS.values())
    return sorted(usable, key=lambda device: order.index(kind_of(device)))


def kind_of(device: cl.Device) -> str:
    return next((name for flag, name in _KINDS.items() if device.type & flag), "accelerator")


def _usable(device: cl.Device) -> bool:
    """OpenCL 1.2 or later (`OpenCL <major>.<minor> ...`), with a compiler, and little-endian."""
    major, minor = (int(part) for part in device.version.split()[1].split(".")[:2])
    return bool(
        (major, minor) >= (1, 2)
        and device.available
        and device.compiler_available
        and device.endian_little
    )


def _text(value: str) -> str:
    return " ".join(value.split())
