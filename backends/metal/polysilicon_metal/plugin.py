"""The entry point of the Metal backend."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence

from polysilicon.backend import (
    CONTRACT_VERSION,
    Backend,
    Device,
    DeviceInfo,
    Unavailable,
    hookimpl,
)


class MetalBackend:
    """Apple's GPU through MLX; where there is none, MLX on the CPU."""

    name = "metal"
    contract = CONTRACT_VERSION
    priority = 0

    def probe(self) -> Sequence[DeviceInfo] | Unavailable:
        if importlib.util.find_spec("mlx") is None:
            return Unavailable(reason="mlx is not installed: pip install 'polysilicon[metal]'")
        try:
            from polysilicon_metal.hardware import describe
        except ImportError as error:
            # On Linux mlx's library is a package of its own, which plain `mlx` does not bring.
            return Unavailable(
                reason=f"mlx cannot be loaded ({error}): pip install 'polysilicon[metal]'"
            )
        return describe()

    def open(self, index: int, options: Mapping[str, str]) -> Device:
        if index != 0:
            raise ValueError(f"the metal backend has device 0 only, got {index}")
        from polysilicon_metal.device import MetalDevice
        from polysilicon_metal.options import Options

        return MetalDevice(Options.parse(options))


@hookimpl
def polysilicon_backends() -> Sequence[Backend]:
    return (MetalBackend(),)
