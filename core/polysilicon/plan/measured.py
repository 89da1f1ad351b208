"""The machine at hand, whose ceilings its backend measures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from polysilicon.backend import Device, DeviceError
from polysilicon.config import Config
from polysilicon.engine.loading import open_device
from polysilicon.errors import ConfigError, PluginError
from polysilicon.plan.hardware import THIS, Figure, Hardware, hardware_table
from polysilicon.plugins import Plugins
from polysilicon.selection import select_backend

_LEAST_BYTES, _MOST_BYTES = 1 << 20, 1 << 29
"""Working sets below and beyond are read as fast as these, as far as caches go."""

_BANDWIDTH = "bandwidth"


class MeasuredHardware(Hardware):
    """An opened device, measured when it is asked."""

    key = THIS

    def __init__(self, device: Device, *, name: str, backend: str) -> None:
        """Raises ConfigError for a backend that does not measure its devices."""
        self.name = name
        self._device = device
        self._backend = backend
        self._bandwidths: dict[int, float | None] = {}
        memory = device.memory()
        self._most_bytes = max(_LEAST_BYTES, min(_MOST_BYTES, memory.free // 2))
        self.memory = Figure(value=memory.total, source=f"backend {backend}")
        measured = device.ceilings(_LEAST_BYTES)
        if not measured:
            raise ConfigError(
                f"backend {backend} does not measure its devices: name yours, as --hardware "
                f"{next(iter(hardware_table()))}, or choose another with --backend"
            )
        source = f"measured by backend {backend}"
        self.rates: Mapping[str, Figure] = {
            dtype: Figure(value=rate, source=source)
            for dtype, rate in measured.items()
            if dtype != _BANDWIDTH
        }
        self.compute = device.capabilities.compute

    def bandwidth(self, nbytes: int) -> Figure | None:
        nbytes = max(_LEAST_BYTES, min(nbytes, self._most_bytes))
        # Rounded to eighths of a power of two, so that few sizes are measured.
        unit = 1 << (nbytes.bit_length() - 4)
        size = nbytes // unit * unit
        if size not in self._bandwidths:
            self._bandwidths[size] = self._device.ceilings(size).get(_BANDWIDTH)
        value = self._bandwidths[size]
        if value is None:
            return None
        read = f"reading {size / 2**20:,.0f} MiB over and over"
        return Figure(value=value, source=f"measured by backend {self._backend}, {read}")


@contextlib.contextmanager
def this_machine(config: Config, plugins: Plugins) -> Iterator[MeasuredHardware]:
    """The configured backend's configured device, open for as long as it is measured.

    Raises ConfigError and PluginError as loading a model does.
    """
    selection = select_backend(plugins, config.backend)
    device = open_device(config, selection)
    try:
        name = selection.devices[config.device].name
        yield MeasuredHardware(device, name=name, backend=selection.name)
    except DeviceError as error:
        raise PluginError(f"backend {selection.name} failed: {error}") from error
    finally:
        device.close()
