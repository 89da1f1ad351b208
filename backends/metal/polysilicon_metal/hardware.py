"""What MLX computes on here, and how much memory that has."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

import mlx.core as mx

from polysilicon.backend import DeviceInfo, OutOfMemory, Unavailable
from polysilicon.host_memory import check_fits, free_memory, total_memory

NEEDED = (0, 32)
"""The first MLX whose streams may be used from any thread (`new_thread_unsafe_stream`)."""

_CACHE_SHARE = 0.05
_LARGEST_CACHE = 2 << 30
_WIRED_MARGIN = 1.1
"""Of what weights and pools take: room for a step's own arrays."""


def has_gpu() -> bool:
    return bool(mx.metal.is_available())


def describe() -> Sequence[DeviceInfo] | Unavailable:
    """The one device, or why there is none."""
    installed = version("mlx")
    number = tuple(int(part) for part in installed.split(".")[:2])
    if number < NEEDED:
        return Unavailable(
            reason=f"mlx {installed} is too old: pip install -U 'polysilicon[metal]'"
        )
    facts = mx.device_info(mx.gpu if has_gpu() else mx.cpu)
    details = {"mlx": installed, "processor": str(facts.get("architecture", "unknown"))}
    name = str(facts.get("device_name", "unknown"))
    if not has_gpu():
        name = f"MLX on CPU ({name})"
        details["kernels"] = "none of Metal's run here, MLX's operations stand in for them"
    return (DeviceInfo(name=name, memory=total(), details=details, stand_in=not has_gpu()),)


def total() -> int:
    """Bytes that the device may use."""
    if has_gpu():
        return int(mx.device_info(mx.gpu)["max_recommended_working_set_size"])
    return total_memory()


def free() -> int:
    """Bytes that can still be allocated."""
    if has_gpu():
        return max(0, min(total() - int(mx.get_active_memory()), free_memory()))
    return free_memory()


def check_room(what: str, size: int) -> None:
    """Raises OutOfMemory where `size` bytes are more than are free."""
    if has_gpu() and size > free():
        raise OutOfMemory(f"{size:,} bytes of {what} do not fit in the {free():,} that are free")
    check_fits(what, size)


def bound_cache() -> None:
    """MLX keeps freed buffers for later; without a bound it keeps nearly all memory."""
    mx.set_cache_limit(min(int(total() * _CACHE_SHARE), _LARGEST_CACHE))


def wire(planned: int) -> None:
    """Keep what weights and pools take resident, and never more than the system recommends: macOS
    panics where wired memory grows without a bound. planned: bytes of all of them."""
    if has_gpu():
        mx.set_wired_limit(min(int(planned * _WIRED_MARGIN), total()))
