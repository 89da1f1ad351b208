"""Opening a card."""

from __future__ import annotations

from collections.abc import Mapping

from polysilicon.backend import DeviceError, Unavailable
from polysilicon_torch.device import TorchDevice
from polysilicon_torch.errors import contract_errors
from polysilicon_torch.options import Options
from polysilicon_torch.presence import Vendor, find_devices
from polysilicon_torch.runtime import CardRuntime
from polysilicon_torch.target import detect
from polysilicon_torch.triton_kernels import TritonKernels
from polysilicon_torch.tuning import Table, Tuning, read_card, shared_table


def open_card(
    vendor: Vendor, index: int, given: Mapping[str, str], vendor_table: Table
) -> TorchDevice:
    """Open a card of a vendor, by its place in the probe's list, with the tables that serve it.

    Raises ValueError for an unknown option or card, DeviceError where there is none.
    """
    options = Options.parse(vendor.backend, given)
    found = find_devices(vendor)
    if isinstance(found, Unavailable):
        raise DeviceError(found.reason)
    if not 0 <= index < len(found):
        raise ValueError(f"the {vendor.backend} backend has {len(found)} devices, got {index}")
    card = found[index]
    with contract_errors(f"opening {card.name}"):
        runtime = CardRuntime(int(card.details["index"]))
        target = detect(runtime.device)
        own = read_card(card.name, target, (shared_table(), vendor_table))
        tuning = Tuning.of(target, vendor_table, own)
        kernels = TritonKernels(options.activations, runtime.device, tuning, fp8=options.fp8)
        return TorchDevice(runtime, kernels, options)
