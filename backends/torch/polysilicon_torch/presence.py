"""What a probe finds: the cards of a vendor, or why there are none. Loads torch only where it is
installed, and nothing when it is imported."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence

from polysilicon.backend import DeviceInfo, Unavailable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vendor:
    """Whose cards a backend runs on.

    platform: what torch is built for, in its own words; `attribute` of `torch.version` holds the
    version. install: how to get such a torch, as a command or a sentence. tool: what lists the
    cards; visible: the environment variable that hides some.
    """

    backend: str
    platform: str
    attribute: str
    install: str
    tool: str
    visible: str


CUDA = Vendor(
    backend="cuda",
    platform="CUDA",
    attribute="cuda",
    install="pip install 'polysilicon[cuda]'",
    tool="nvidia-smi",
    visible="CUDA_VISIBLE_DEVICES",
)
ROCM = Vendor(
    backend="rocm",
    platform="ROCm",
    attribute="hip",
    install=(
        "install torch from the ROCm index that pytorch.org names (pip install torch --index-url "
        "INDEX), then pip install 'polysilicon[rocm]'"
    ),
    tool="rocm-smi",
    visible="HIP_VISIBLE_DEVICES",
)
VENDORS = (CUDA, ROCM)


def find_devices(vendor: Vendor) -> Sequence[DeviceInfo] | Unavailable:
    """The cards of a vendor that torch sees, in its order, or why none can be used."""
    if importlib.util.find_spec("torch") is None:
        return Unavailable(reason=f"torch is not installed: {vendor.install}")
    try:
        import torch
    except Exception as error:
        cause = str(error).partition("\n")[0]
        return Unavailable(reason=f"torch cannot be imported ({cause}): {vendor.install}")
    built = built_for()
    if built is None:
        return Unavailable(reason=f"the torch installed here is built for CPUs: {vendor.install}")
    if built is not vendor:
        return Unavailable(
            reason=f"the torch installed here is built for {built.platform}, which the "
            f"{built.backend} backend runs on; for this one, in another environment: "
            f"{vendor.install}"
        )
    if importlib.util.find_spec("triton") is None:
        return Unavailable(reason=f"triton, which comes with torch, is missing: {vendor.install}")
    if not torch.cuda.is_available():
        return Unavailable(
            reason=f"torch is built for {vendor.platform} but sees no GPU: see whether "
            f"{vendor.tool} lists one, and whether {vendor.visible} hides it"
        )
    return _supported(vendor)


def built_for() -> Vendor | None:
    """Whose cards the installed torch is built for, None for CPUs alone."""
    import torch

    return next((v for v in VENDORS if getattr(torch.version, v.attribute, None)), None)


def _supported(vendor: Vendor) -> Sequence[DeviceInfo] | Unavailable:
    import torch

    from polysilicon_torch.target import UnsupportedTarget, detect

    found, refused = [], []
    built = f"{vendor.platform} {getattr(torch.version, vendor.attribute)}"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        try:
            target = detect(torch.device("cuda", index))
        except UnsupportedTarget as error:
            refused.append(f"{properties.name}: {error}")
            continue
        details = {
            "architecture": target.name,
            "torch": f"{torch.__version__}, built for {built}",
            "index": str(index),
        }
        found.append(
            DeviceInfo(name=properties.name, memory=properties.total_memory, details=details)
        )
    if not found:
        return Unavailable(reason="; ".join(refused) or "torch sees no GPU")
    return found
