"""A device that is as unlike numpy as the contract allows, over the ops of the reference device.

It traces a forward once, with symbols that tell nothing of shapes or values; pads every batch to
buckets of its own; runs nothing before a result is asked for, and then only as far as that one; and
raises `ContractError` where the core or a model definition breaks a rule of `polysilicon.backend`.
What passes on the reference device and fails here leans on numpy's eagerness.

It is no installed backend. Name it by its module:

    pytest --pyargs polysilicon.testing.conformance \\
        --polysilicon-backend polysilicon.testing.lazy:lazy
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polysilicon.backend import CONTRACT_VERSION, Backend, Device, DeviceInfo, hookimpl
from polysilicon.testing.lazy_trace import ContractError

__all__ = ["ContractError", "LazyBackend", "polysilicon_backends"]


class LazyBackend:
    """Opens lazy devices; takes no options."""

    name = "lazy"
    contract = CONTRACT_VERSION
    priority = 0

    def probe(self) -> Sequence[DeviceInfo]:
        return (DeviceInfo(name="lazy numpy", memory=1 << 30),)

    def open(self, index: int, options: Mapping[str, str]) -> Device:
        if index != 0 or options:
            raise ValueError(
                f"the lazy backend has device 0 only, and no options: got {index}, {options}"
            )
        from polysilicon.testing.lazy_device import LazyDevice

        return LazyDevice()


@hookimpl
def polysilicon_backends() -> Sequence[Backend]:
    return (LazyBackend(),)
