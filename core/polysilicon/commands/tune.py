"""`polysilicon tune`: measure a device's kernels and keep what is best for this card."""

from __future__ import annotations

from polysilicon.commands.options import configured
from polysilicon.config import Config


@configured({"backend", "device", "backend_option", "block_plugins"})
def tune(config: Config) -> None:
    """Measure which variants of a backend's kernels are the fastest on this card, for some minutes
    that it should have to itself, and keep them for later runs."""
    from polysilicon.backend import DeviceError
    from polysilicon.engine.loading import open_device
    from polysilicon.errors import PluginError
    from polysilicon.plugins import load_plugins
    from polysilicon.selection import select_backend

    selection = select_backend(load_plugins(config.block_plugins), config.backend)
    device = open_device(config, selection)
    try:
        kept = device.tune(lambda line: print(line, flush=True))
    except DeviceError as error:
        raise PluginError(f"backend {selection.name} failed: {error}") from error
    finally:
        device.close()
    name = selection.devices[config.device].name
    if kept is None:
        print(f"backend {selection.name} has nothing to tune on {name}")
    else:
        print(f"kept for {name} in {kept}")
